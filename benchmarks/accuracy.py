"""What 8 bits and 4 bits cost in accuracy: one table for all formats, of real weights and of English prose.

python scripts/real_model.py && python benchmarks/accuracy.py    # SmolLM2-135M-Instruct, in float32 on a CPU
python benchmarks/accuracy.py --dtype bfloat16
python benchmarks/accuracy.py --model Qwen/Qwen3-0.6B --device cuda --pieces 100
python benchmarks/accuracy.py --formats unquantized --checkpoints FOLDER ...    # of the same model, in other formats

The text is Python's language reference as the running Python has it (`pydoc_data.topics`).

- Perplexity: of 8 pieces of 1,024 tokens (`--pieces`), spread over the text. "More" is how much larger it is than that
  of the first format, with the standard error of the tokens' differences.
- Greedy agreement: the leading tokens, of 32, that a format shares with the first one, over 20 beginnings of topics.
- Paragraphs: nats per token of six paragraphs, without their first words: when they are new; when each follows itself;
  and when all of them stand 3,000 tokens back.
"""

import argparse
import math
import sys
from dataclasses import fields
from pathlib import Path
from pydoc_data.topics import topics

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from real_model import default_folder

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config

PIECE = 1024
NUM_PROMPTS, PROMPT_TOKENS, AGREEMENT_TOKENS = 20, 64, 32
NUM_PARAGRAPHS, DISTANCE, NUM_FIRST_WORDS = 6, 3000, 8
SHORTEST_PARAGRAPH, LONGEST_PARAGRAPH = 40, 80  # words


def formats() -> dict[str, dict]:
    """{name: options}; those that this version has."""
    fp8_kv = {"kv_cache_dtype": "fp8"}
    found = {"unquantized": {}, "fp8 KV cache": fp8_kv}
    if "quantization" in {field.name for field in fields(Config)}:
        weights = {"quantization": "fp8"}
        found |= {"fp8 weights": weights, "fp8 weights and KV cache": weights | fp8_kv}
        found |= {f"{name} weights": {"quantization": name} for name in ("int4", "mxfp4")}
    return found


def tokenize(llm: LLM, texts: list[str]) -> list[list[int]]:
    return [llm.tokenizer.encode(text, add_special_tokens=False) for text in texts]


def prose() -> list[str]:
    """The topics, in alphabetical order."""
    return [topics[name].strip() + "\n\n" for name in sorted(topics)]


def token_losses(llm: LLM, num_pieces: int) -> torch.Tensor:
    """Nats of each token of the pieces."""
    token_ids = [token for topic in tokenize(llm, prose()) for token in topic]
    pieces = [token_ids[i : i + PIECE] for i in range(0, len(token_ids) - PIECE + 1, PIECE)]
    pieces = pieces[:: max(1, len(pieces) // num_pieces)][:num_pieces]
    scores = llm.score([piece[:1] for piece in pieces], [piece[1:] for piece in pieces], use_tqdm=False)
    return -torch.tensor([logprob for score in scores for logprob in score["logprobs"]])


def continuations(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=AGREEMENT_TOKENS, ignore_eos=True)
    prompts = [token_ids[:PROMPT_TOKENS] for token_ids in tokenize(llm, prose()[:NUM_PROMPTS])]
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def num_shared(first: list[int], second: list[int]) -> int:
    """Leading tokens that two texts share."""
    pairs = enumerate(zip(first, second, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(first))


def paragraphs(llm: LLM) -> tuple[list[list[list[int]]], list[int]]:
    """[first words, the rest] of paragraphs of different topics, and a text of other topics, as tokens."""
    found, others = [], []
    for topic in prose():
        paragraph = next((text for text in topic.split("\n\n") if is_paragraph(text)), None)
        if paragraph is None or len(found) == NUM_PARAGRAPHS:
            others.append(topic)
        else:
            words = paragraph.split()
            texts = [" ".join(words[:NUM_FIRST_WORDS]), " " + " ".join(words[NUM_FIRST_WORDS:]) + "\n\n"]
            found.append(tokenize(llm, texts))
    between = [token for topic in tokenize(llm, others) for token in topic]
    return found, between[:DISTANCE]


def is_paragraph(text: str) -> bool:
    is_prose = text[:1].isupper() and text.endswith(".")
    return is_prose and SHORTEST_PARAGRAPH <= len(text.split()) <= LONGEST_PARAGRAPH


def paragraph_losses(llm: LLM) -> dict[str, float]:
    """{where a paragraph was before: nats per token of its rest}."""
    found, between = paragraphs(llm)
    each_twice = [paragraph for paragraph in found for _ in range(2)]
    known = [token for paragraph in found for part in paragraph for token in part]
    new_and_again = rest_losses(llm, between, each_twice)
    again_later = rest_losses(llm, known + between, found)
    losses = {"new": new_and_again[::2], "right before": new_and_again[1::2], "3,000 back": again_later}
    return {place: torch.cat(parts).mean().item() for place, parts in losses.items()}


def rest_losses(llm: LLM, prompt: list[int], found: list[list[list[int]]]) -> list[torch.Tensor]:
    """Nats of each token after a paragraph's first words; one tensor for each paragraph, which follow each other."""
    parts = [part for paragraph in found for part in paragraph]
    (score,) = llm.score([prompt], [[token for part in parts for token in part]], use_tqdm=False)
    losses = -torch.tensor(score["logprobs"])
    return list(losses.split([len(part) for part in parts]))[1::2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(default_folder()), help="default: %(default)s")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--pieces", type=int, default=8, help="of the text, for the perplexity")
    parser.add_argument("--formats", nargs="+", default=list(formats()), choices=list(formats()), metavar="FORMAT")
    parser.add_argument("--checkpoints", nargs="+", default=[], metavar="FOLDER", help="of this model, to compare too")
    args = parser.parse_args()
    rows = [(name, args.model, formats()[name]) for name in args.formats]
    rows += [(Path(folder).name, folder, {}) for folder in args.checkpoints]
    first_texts, first_losses = None, None
    print(f"Python {sys.version.split()[0]}\n")
    print("| format | perplexity | more | greedy tokens shared | new paragraphs | right before | 3,000 back |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, model, options in rows:
        with LLM(model, device=args.device, dtype=args.dtype, use_tqdm=False, **options) as llm:
            texts, losses = continuations(llm), token_losses(llm, args.pieces)
            if first_texts is None:
                first_texts, first_losses = texts, losses
            shared = [num_shared(*pair) for pair in zip(first_texts, texts, strict=True)]
            more = losses - first_losses
            dtype = str(llm.config.dtype).removeprefix("torch.")
            num_equal = shared.count(AGREEMENT_TOKENS)
            cells = [
                f"{name} ({dtype})",
                f"{math.exp(losses.mean()):.3f}",
                f"{math.expm1(more.mean()):+.2%} ± {more.std() / len(more) ** 0.5:.2%}",
                f"{sum(shared) / len(shared):.1f} of {AGREEMENT_TOKENS}; all in {num_equal} of {len(shared)}",
                *(f"{nats:.3f}" for nats in paragraph_losses(llm).values()),
            ]
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
