"""What reading an answer costs for each of its tokens, by format. Needs no GPU and no model.

    python benchmarks/answer_readers.py

A token is a piece of text of four characters on average. `splitter` is all that a stream of the server pays beside the
detokenizer: the reader, and telling special tokens from those that spell the same text.
"""

import argparse
import time
from pathlib import Path
from random import Random

from tokenizers import AddedToken
from transformers import AutoTokenizer

from nanovllm import AnswerFormat
from nanovllm.engine.text.formats.all_formats import FORMATS

MODEL = Path(__file__).parents[1] / "assets" / "demo-model"
TEXT = "The row has 7 slots, and a table names its blocks: x = [a < b, c].\nSo it is said, and so it is.\n\n"
PARTS = {  # what an answer begins with, by format
    "harmony": ("<|channel|>analysis<|message|>", '<|channel|>commentary to=functions.f<|message|>{"a": "'),
    "hermes": ("<think>", '<tool_call>\n{"name": "f", "arguments": {"a": "'),
    "qwen_xml": ("<think>", "<tool_call>\n<function=f>\n<parameter=a>\n"),
    "mistral": ("[THINK]", '[TOOL_CALLS]f[ARGS]{"a": "'),
    "gemma4": ("<|channel>thought\n", '<|tool_call>call:f{a:<|"|>'),
    "think": ("<think>", "<tool_call>"),
}
CONTENTS = {"harmony": "<|channel|>final<|message|>"}


def seconds(push, pieces, last) -> float:
    """CPU time of all pieces."""
    start = time.process_time()
    for piece in pieces:
        push(*piece)
    end = time.process_time()
    push(*last)
    return end - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--passes", type=int, default=5)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens([AddedToken(tag) for each in FORMATS.values() for tag in each.tags])
    words = TEXT.split(" ")
    pieces = [" " + Random(i).choice(words) for i in range(args.tokens)]
    ids = [tokenizer.encode(piece, add_special_tokens=False)[:1] for piece in pieces]
    print(f"microseconds a token, of {args.tokens} tokens\n{'':10} thinking  content  argument  splitter")
    for name, (thinking, call) in PARTS.items():
        figures = []
        for opening in (thinking, CONTENTS.get(name, "x "), call):
            times = []
            for _ in range(args.passes):
                reader = FORMATS[name].reader([])
                reader.push(opening)
                times.append(seconds(reader.push, [(piece,) for piece in pieces], ("", True)))
            figures.append(min(times))
        times = []
        for _ in range(args.passes):
            splitter = AnswerFormat(tokenizer, FORMATS[name]).splitter([])
            given = [(piece, tokens) for piece, tokens in zip(pieces, ids, strict=True)]
            splitter.push(thinking, tokenizer.encode(thinking, add_special_tokens=False))
            times.append(seconds(splitter.push, given, ("", [], "length")))
        figures.append(min(times))
        print(f"{name:10} " + "  ".join(f"{1e6 * each / args.tokens:8.2f}" for each in figures))


if __name__ == "__main__":
    main()
