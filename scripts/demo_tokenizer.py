"""The demo model's tokenizer: byte-level BPE with Qwen's control tokens and a ChatML template."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
NO_THOUGHTS = f"{THINK_START}\n\n{THINK_END}\n\n"

# In order: one newline, indentation, a word with its underscores, up to three digits, punctuation, other white
# space. A newline and the indentation after it share a token with nothing else, so that a prompt which ends at
# either is cut where the training text was cut too.
PIECES = r"\n| {2,}| ?[\p{L}\p{M}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}_]+|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}"
    "{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learns `vocab_size` tokens from `texts`: 5 control tokens, the 256 bytes, and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END, THINK_START, THINK_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_visible_thoughts(tokenizer)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json, readable by transformers from 4.51 on."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        # transformers 5 would write its own name for this class, which version 4 doesn't know.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": MESSAGE_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [MESSAGE_START, MESSAGE_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _with_visible_thoughts(tokenizer: Tokenizer) -> Tokenizer:
    """As in Qwen3, <think> and </think> are whole tokens that `skip_special_tokens` leaves in the text."""
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["content"] not in (THINK_START, THINK_END)
    return Tokenizer.from_str(json.dumps(description))
