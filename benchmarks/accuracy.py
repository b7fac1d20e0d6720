"""What 8 bits cost in accuracy: one table for all formats, of the demo model and the standard library that it knows.

python benchmarks/accuracy.py                                      # assets/demo-model, in float32 on a CPU
python benchmarks/accuracy.py --dtype bfloat16
python benchmarks/accuracy.py --model Qwen/Qwen3-0.6B --device cuda

- Perplexity: of the modules that the demo model was not trained on, in pieces of 1,024 tokens.
- Greedy agreement: the leading tokens, of 32, that a format shares with the first one, over 20 beginnings of code.
- Needle: functions of those modules. Each stands in the prompt, other text follows, and its first line comes again. The
  table shows how many nats per token the rest of the function costs then, and how many of its tokens greedy decoding
  repeats: with the function 3,000 tokens back, right before, and not in the prompt at all.
"""

import argparse
import ast
import math
import sys
import sysconfig
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from demo_card import AGREEMENT_TOKENS, CODE_PROMPTS  # noqa: E402
from demo_corpus import HELD_OUT_FILES  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.config import Config  # noqa: E402

PIECE = 1024
NUM_NEEDLES, DISTANCE = 8, 3000
SHORTEST_NEEDLE, LONGEST_NEEDLE = 40, 250
BREAK = "\n\n\n"


def formats() -> dict[str, dict]:
    """{name: options}; those that this version has."""
    fp8_kv = {"kv_cache_dtype": "fp8"}
    found = {"unquantised": {}, "fp8 KV cache": fp8_kv}
    if "quantization" in {field.name for field in fields(Config)}:
        weights = {"quantization": "fp8"}
        found |= {"fp8 weights": weights, "fp8 weights and KV cache": weights | fp8_kv}
    return found


def held_out(stdlib: Path) -> dict[str, str]:
    return {name: (stdlib / name).read_text(encoding="utf-8") for name in sorted(HELD_OUT_FILES)}


def perplexity(llm: LLM, text: str) -> float:
    token_ids = llm.tokenizer.encode(text)
    pieces = [token_ids[i : i + PIECE] for i in range(0, len(token_ids), PIECE)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    scores = llm.score([piece[:1] for piece in pieces], [piece[1:] for piece in pieces], use_tqdm=False)
    return math.exp(-sum(s["total"] for s in scores) / sum(len(s["token_ids"]) for s in scores))


def continuations(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=AGREEMENT_TOKENS, ignore_eos=True)
    return [output["token_ids"] for output in llm.generate(list(CODE_PROMPTS), params, use_tqdm=False)]


def num_shared(first: list[int], second: list[int]) -> int:
    """Leading tokens that two texts share."""
    pairs = enumerate(zip(first, second, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(first))


def needles(llm: LLM, texts: dict[str, str]) -> list[tuple[list[int], list[int], list[int]]]:
    """(first line, rest, haystack without the function's module) of some functions, as tokens."""
    found = []
    for name, text in texts.items():
        others = "\n".join(other for other_name, other in texts.items() if other_name != name)
        haystack = llm.tokenizer.encode(others)[:DISTANCE]
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        for source in (ast.get_source_segment(text, node) for node in functions):
            line, rest = source.split("\n", 1)
            tokens = llm.tokenizer.encode(line + "\n"), llm.tokenizer.encode(rest)
            if SHORTEST_NEEDLE <= len(tokens[1]) <= LONGEST_NEEDLE:
                found.append((*tokens, haystack))
    return found[:NUM_NEEDLES]


def needle_test(llm: LLM, texts: dict[str, str]) -> dict[str, tuple[float, float]]:
    """{where the function is: (nats per token of its repetition, share of its tokens repeated)}."""
    gap, result = llm.tokenizer.encode(BREAK), {}
    found = needles(llm, texts)
    for place in ("3,000 back", "right before", "nowhere"):
        prompts, rests = [], []
        for line, rest, haystack in found:
            function = [*line, *rest, *gap]
            before = {"3,000 back": function + haystack, "right before": haystack + gap + function, "nowhere": haystack}
            prompts.append([*before[place], *gap, *line])
            rests.append(rest)
        scores = llm.score(prompts, rests, use_tqdm=False)
        num_tokens = sum(map(len, rests))
        params = [SamplingParams(temperature=0, max_tokens=len(rest), ignore_eos=True) for rest in rests]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        repeated = sum(num_shared(rest, output["token_ids"]) for rest, output in zip(rests, outputs, strict=True))
        result[place] = -sum(s["total"] for s in scores) / num_tokens, repeated / num_tokens
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "assets" / "demo-model"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")), help="a Lib folder of CPython"
    )
    args = parser.parse_args()
    texts = held_out(args.stdlib)
    first: list[list[int]] = []
    print("| format | perplexity | greedy tokens shared | needle 3,000 back | right before | nowhere |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, options in formats().items():
        with LLM(args.model, device=args.device, dtype=args.dtype, use_tqdm=False, **options) as llm:
            completions = continuations(llm)
            first = first or completions
            shared = [num_shared(*pair) for pair in zip(first, completions, strict=True)]
            dtype = str(llm.config.dtype).removeprefix("torch.")
            num_equal = shared.count(AGREEMENT_TOKENS)
            cells = [
                f"{name} ({dtype})",
                f"{perplexity(llm, chr(10).join(texts.values())):.3f}",
                f"{sum(shared) / len(shared):.1f} of {AGREEMENT_TOKENS}; all in {num_equal} of {len(shared)}",
                *(f"{nats:.3f} nats, {share:.0%}" for nats, share in needle_test(llm, texts).values()),
            ]
            print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
