"""How far are log-probabilities of sampled tokens from those of transformers?

python benchmarks/logprob_distance.py                     # SmolLM2-135M (scripts/real_model.py), bfloat16, on a CPU
python benchmarks/logprob_distance.py MODEL --device cuda

The engine samples tokens. transformers computes the same tokens in one forward pass, in the same dtype and in float32.
Its own distance between the two is what the dtype costs.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from real_model import default_folder

from nanovllm import LLM, SamplingParams

BATCH = 8


def main() -> None:
    options = parse_args()
    sequences, ours = sample(options)
    same = of_transformers(options, options.dtype, sequences)
    exact = of_transformers(options, "float32", sequences)
    print(f"{len(ours)} tokens sampled from {options.model} in {options.dtype} on {options.device}")
    print("absolute difference of log-probabilities | mean | 99th percentile | largest")
    show(f"engine to transformers, both in {options.dtype}", ours, same)
    show(f"engine in {options.dtype} to transformers in float32", ours, exact)
    show(f"transformers in {options.dtype} to transformers in float32", same, exact)


def sample(options: argparse.Namespace) -> tuple[list[tuple[list[int], list[int]]], torch.Tensor]:
    """(prompt, completion) pairs, and the engine's log-probabilities of all completion tokens."""
    with LLM(str(options.model), device=options.device, dtype=options.dtype, max_model_len=1024, seed=0) as llm:
        prompts = [ids[: options.prompt_tokens] for ids in tokenized(llm) if len(ids) >= options.prompt_tokens]
        params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True, logprobs=0)
        outputs = llm.generate(prompts[: options.prompts], params)
    pairs = [(prompt, output["token_ids"]) for prompt, output in zip(prompts, outputs, strict=False)]
    found = [token.values() for output in outputs for token in output["logprobs"]]
    return pairs, torch.tensor([value for (value,) in found])


def tokenized(llm: LLM) -> Iterator[list[int]]:
    """Texts of Python's documentation, in alphabetical order."""
    return (llm.tokenizer.encode(topics[name].strip(), add_special_tokens=False) for name in sorted(topics))


@torch.no_grad()
def of_transformers(options: argparse.Namespace, dtype: str, pairs: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Log-probabilities of all completion tokens. Logits are rounded to the dtype, their softmax is in float32."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device)
    found = []
    for start in range(0, len(pairs), BATCH):
        ids = torch.tensor([prompt + completion for prompt, completion in pairs[start : start + BATCH]])
        logits = model(input_ids=ids.to(options.device), use_cache=False).logits[:, options.prompt_tokens - 1 : -1]
        chosen = ids[:, options.prompt_tokens :, None].to(options.device)
        found.append(logits.float().log_softmax(-1).gather(2, chosen).flatten().cpu())
    return torch.cat(found)


def show(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    distance = (one - other).abs()
    print(f"{name} | {distance.mean():.5f} | {distance.quantile(0.99):.5f} | {distance.max():.4f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", default=default_folder(), help="a directory or a hub id")
    add("--device", default="cpu")
    add("--dtype", default="bfloat16")
    add("--prompts", type=int, default=48)
    add("--prompt-tokens", type=int, default=64, help="of each prompt")
    add("--max-tokens", type=int, default=64, help="of each completion")
    return parser.parse_args()


if __name__ == "__main__":
    main()
