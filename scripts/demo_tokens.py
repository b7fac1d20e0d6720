"""The demo model's training text as tokens, and the random sequences that are drawn from them."""

import random
from dataclasses import dataclass

import torch
from demo_chats import hand_written_dialogues, hand_written_sources
from demo_corpus import Corpus, Message
from demo_tokenizer import CHAT_TEMPLATE, END_OF_TEXT, NO_THOUGHTS
from jinja2 import Template
from tokenizers import Tokenizer

HAND_WRITTEN_PASSES = 20
# The share of a batch's rows that begins in each stream.
STREAM_WEIGHTS = {"hand-written text": 0.10, "dialogues": 0.25, "sources": 0.65}


@dataclass
class TokenPool:
    """All training tokens, and for each stream the positions where a sequence may begin."""

    tokens: torch.Tensor  # [num_tokens] int64
    starts: dict[str, torch.Tensor]  # each [num_starts] int64
    weights: torch.Tensor  # [num_streams], in the order of `starts`

    def draw(self, batch_size: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Random sequences [batch_size, length]; the stream of each row is drawn with STREAM_WEIGHTS."""
        device = self.tokens.device
        streams = torch.multinomial(self.weights, batch_size, replacement=True, generator=generator)
        uniform = torch.rand(batch_size, device=device, generator=generator, dtype=torch.float64)
        begin = torch.zeros(batch_size, dtype=torch.int64, device=device)
        for i, starts in enumerate(self.starts.values()):
            begin = torch.where(streams == i, starts[(uniform * len(starts)).long()], begin)
        begin = begin.clamp(max=len(self.tokens) - length)
        return self.tokens[begin[:, None] + torch.arange(length, device=device)]


def render(dialogues: list[list[Message]], rng: random.Random) -> list[str]:
    """Dialogues as text; in one of five, empty thoughts precede the last answer (enable_thinking=False)."""
    template, texts = Template(CHAT_TEMPLATE), []
    for messages in dialogues:
        if rng.random() < 0.2:
            last = {**messages[-1], "content": NO_THOUGHTS + messages[-1]["content"]}
            messages = [*messages[:-1], last]
        texts.append(template.render(messages=messages))
    return texts


def build_texts(corpus: Corpus, seed: int) -> dict[str, list[str]]:
    """The documents of each stream, in the order of STREAM_WEIGHTS."""
    rng = random.Random(seed)
    hand_written: list[str] = []
    for _ in range(HAND_WRITTEN_PASSES):
        documents = render(hand_written_dialogues(rng), rng) + hand_written_sources()
        rng.shuffle(documents)
        hand_written += documents
    dialogues, sources = render(corpus.dialogues, rng), list(corpus.sources)
    rng.shuffle(dialogues)
    rng.shuffle(sources)
    return dict(zip(STREAM_WEIGHTS, (hand_written, dialogues, sources), strict=True))


def encode_pool(tokenizer: Tokenizer, texts: dict[str, list[str]], device: torch.device) -> TokenPool:
    """Every document followed by <|endoftext|>. Sources also begin at any line, half the time at column 0."""
    tokens, document_starts = [], {}
    for stream, documents in texts.items():
        document_starts[stream] = []
        for encoding in tokenizer.encode_batch(documents, add_special_tokens=False):
            document_starts[stream].append(len(tokens))
            tokens.extend(encoding.ids)
            tokens.append(tokenizer.token_to_id(END_OF_TEXT))
    flat = torch.tensor(tokens)
    starts = {stream: torch.tensor(positions) for stream, positions in document_starts.items()}
    first_source = int(starts["sources"][0])
    starts["sources"] = torch.cat([starts["sources"], first_source + _line_starts(tokenizer, flat[first_source:])])
    weights = torch.tensor([STREAM_WEIGHTS[stream] for stream in starts])
    on_device = {stream: positions.to(device) for stream, positions in starts.items()}
    return TokenPool(flat.to(device), on_device, weights.to(device))


def _line_starts(tokenizer: Tokenizer, tokens: torch.Tensor) -> torch.Tensor:
    newline = tokenizer.encode("\n").ids[0]
    blank = torch.tensor([i for i in range(tokenizer.get_vocab_size()) if not tokenizer.decode([i]).strip(" ")])
    after_newline = (tokens[:-1] == newline) & (tokens[1:] != newline)
    lines = torch.nonzero(after_newline).flatten() + 1
    top_level = lines[~torch.isin(tokens[lines], blank)]
    return torch.cat([lines, top_level.repeat(max(1, len(lines) // max(1, len(top_level))))])
