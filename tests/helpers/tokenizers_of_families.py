"""Small tokenizers that decode as those of real families do."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, CTRLTokenizer, PreTrainedTokenizerFast

DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo-model"


@cache
def byte_level() -> Any:
    """As Qwen's and Llama 3's."""
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def _byte_fallback(words: tuple[str, ...], **parts: Any) -> Any:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges = []
    pieces = ["▁", "\ufffd", *map(chr, range(33, 127))]
    for word in words:
        for i in range(1, len(word)):
            pieces.append(word[: i + 1])
            merges.append((word[:i], word[i]))
    for piece in dict.fromkeys(pieces):
        vocab[piece] = len(vocab)
    model = models.BPE(vocab, list(dict.fromkeys(merges)), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


_WORDS = ("▁▁", "▁▁▁", "▁the", "▁Paris", "▁yes", "▁no", "▁return", "▁is")


@cache
def sentencepiece_like() -> Any:
    """As Llama 2's, Mistral's and Phi-3's: its decoder drops a space at the beginning, and bytes are tokens."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _byte_fallback(_WORDS, decoder=decoders.Sequence(steps), normalizer=normalizer)


@cache
def gemma_like() -> Any:
    """Bytes are tokens, and no space is dropped."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _byte_fallback(_WORDS, decoder=decoders.Sequence(steps), normalizer=normalizers.Replace(" ", "▁"))


@cache
def metaspace() -> Any:
    """As T5's."""
    pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return _byte_fallback(_WORDS, decoder=decoders.Metaspace(), pre_tokenizer=pre_tokenizer)


@cache
def wordpiece() -> Any:
    """As BERT's."""
    words = ["[UNK]", "[SEP]", "one", "two", "##s", "##", ".", ",", "n't", "##é", "\ufffd", "do", "<0x41>"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece("##")
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", sep_token="[SEP]")


@cache
def words() -> Any:
    """Without a decoder: words are joined by spaces."""
    vocab = {word: i for i, word in enumerate(["one", "two", "three", "END", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)


@cache
def suffixes() -> Any:
    """As OpenAI GPT's: the last token decides whether a space follows the one before. Here also within a token."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "a", "b</w>", "c</w>d", "é</w>", "</w>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@cache
def replacing_late() -> Any:
    """Its decoder replaces a text that may be made of two tokens."""
    vocab = {piece: i for i, piece in enumerate(["<unk>", "a", "b", "ab", "c", " "])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "X")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@cache
def python_bytes() -> Any:
    """Written in Python. Bytes that are no characters have no text."""
    return ByT5Tokenizer(extra_ids=2)


@cache
def python_words() -> Any:
    """Written in Python. A token decides whether a space follows the one before."""
    pieces = ["<unk>", "one", "tw@@", "o", "thr@@", "ee", "é", "@@", "\ufffd"]
    with TemporaryDirectory() as folder:
        vocab, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocab.write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
        merges.write_text("#version: 0.2\n\n")
        return CTRLTokenizer(str(vocab), str(merges))


FAMILIES = {
    make.__name__: make
    for make in (
        *(byte_level, sentencepiece_like, gemma_like, metaspace, wordpiece, words, suffixes, replacing_late),
        *(python_bytes, python_words),
    )
}
