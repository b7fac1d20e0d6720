"""What `deterministic=True` costs: tokens a second with it and without it, in turn, on one machine.

python benchmarks/deterministic.py Qwen3-0.6B --layers 4 --dtype float32 bfloat16

Weights are random, in a published shape with a few of its layers. Two workloads: prompts alone, of which one token is
generated each, and short prompts with long completions.
"""

import argparse
import random
import statistics
import time

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.models.presets import preset_config

WORKLOADS = {"prefill": (16, 256, 1), "decode, 1 at a time": (1, 16, 48), "decode, 16 at a time": (16, 16, 48)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="Qwen3-0.6B", help="a published shape")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--passes", type=int, default=5)
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    for dtype in options.dtype:
        measure(options.model, options.layers, dtype, options.device, options.passes)


def measure(model: str, num_layers: int, dtype: str, device: str, passes: int) -> None:
    config = preset_config(model)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    common = {"load_format": "dummy", "hf_config": config, "dtype": dtype, "device": device, "max_model_len": 1024}
    common |= {"skip_tokenizer_init": True, "use_tqdm": False, "enable_prefix_caching": False, "num_kvcache_blocks": 64}
    start = time.perf_counter()
    with LLM(model, **common) as without:
        between = time.perf_counter()
        with LLM(model, deterministic=True, **common) as with_it:
            seconds = between - start, time.perf_counter() - between
            print(f"{dtype}: started in {seconds[0]:.1f} s without, {seconds[1]:.1f} s with it", flush=True)
            for name, (num_prompts, prompt_len, max_tokens) in WORKLOADS.items():
                draw = random.Random(0)
                prompts = [[draw.randrange(1000) for _ in range(prompt_len)] for _ in range(num_prompts)]
                params = SamplingParams(0, max_tokens, ignore_eos=True)
                speeds: dict[bool, list[float]] = {False: [], True: []}
                for _ in range(1 + passes):
                    for is_on, llm in ((False, without), (True, with_it)):
                        start = time.perf_counter()
                        llm.generate(prompts, params, use_tqdm=False)
                        num_tokens = num_prompts * (prompt_len if max_tokens == 1 else max_tokens)
                        speeds[is_on].append(num_tokens / (time.perf_counter() - start))
                off, on = (statistics.median(speeds[is_on][1:]) for is_on in (False, True))
                print(f"{dtype}, {name}: {off:.1f} tokens/s without, {on:.1f} with it ({on / off:.0%})", flush=True)


if __name__ == "__main__":
    main()
