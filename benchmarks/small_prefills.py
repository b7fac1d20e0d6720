"""Prefill steps of few tokens, by flash-attn-4 and by the back end's own attention: where launching takes the host
longer than the device computes, the cheaper launch wins. Which one a step takes is
`AttentionBackend.prefill_by_flash_attn4`'s to say.

    python benchmarks/small_prefills.py --models Qwen3-0.6B Qwen3-8B --json out.json

Milliseconds from the call of step() to its tokens, with an idle device before; median of several. Random weights.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random
from statistics import median

import torch
from gpus import require_gpus

from nanovllm import LLM, SamplingParams

SHAPES = ["1x300", "1x1000", "1x2000", "1x3900", "3x1500", "3x2000", "4x2000", "5x2000", "20x500"]
STEPS = 7


def step_millis(llm: LLM, num_prompts: int, num_tokens: int, rng: Random) -> float:
    """Prompts of about num_tokens, several of them not all of one length, for which flash-attn-4 has another kernel."""
    millis = []
    for _ in range(STEPS):
        for i in range(num_prompts):
            prompt = [rng.randint(0, 10000) for _ in range(num_tokens - i % 4)]
            llm.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.step()
        millis.append(1e3 * (time.perf_counter() - start))
    return median(millis)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["Qwen3-0.6B"], help="published shapes")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="PROMPTSxTOKENS, in all no more than a step's")
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    rows = []
    for model in args.models:
        rng = Random(0)
        with LLM(model, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096) as llm:
            backend = llm.model_runner.model.model.layers[0].self_attn.attn.backend
            flash_attn4 = backend.flash_attn4
            if flash_attn4 is None:
                parser.error("needs flash-attn-4: pip install 'nanovllm[flash-attn-4]'")
            min_tokens, backend.flash_attn4_min_tokens = backend.flash_attn4_min_tokens, 0
            print(f"{model}: flash-attn-4 from {min_tokens} tokens on")
            for shape in args.shapes:
                millis = {}
                for name, package in (("flash-attn-4", flash_attn4), (backend.name, None)):
                    backend.flash_attn4 = package
                    millis[name] = step_millis(llm, *map(int, shape.split("x")), rng)
                rows.append({"model": model, "shape": shape, "ms": millis})
                print(f"{model} {shape:8}", *(f"{name} {ms:.2f} ms" for name, ms in millis.items()), flush=True)
        torch.cuda.empty_cache()
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
