"""What `deterministic=True` costs: CPU seconds with it and without it, in turn, in one run.

python benchmarks/deterministic.py Qwen3-0.6B --layers 4 --threads 1 --dtype float32 bfloat16

Weights are random, in a published shape with a few of its layers. Of each workload the quickest pass counts. CPU
seconds do not count what other programs do meanwhile; with several threads they count all of them.
"""

import argparse
import random
import time

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.models.presets import preset_config

# Prompts, tokens of each, and tokens to generate.
WORKLOADS = {"prefill": (8, 256, 1), "decode, 1 at a time": (1, 16, 24), "decode, 16 at a time": (16, 16, 16)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="Qwen3-0.6B", help="a published shape")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for dtype in options.dtype:
        measure(options.model, options.layers, dtype, options.passes)


def measure(model: str, num_layers: int, dtype: str, passes: int) -> None:
    config = preset_config(model)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    common = {"load_format": "dummy", "hf_config": config, "dtype": dtype, "device": "cpu", "max_model_len": 1024}
    common |= {"skip_tokenizer_init": True, "use_tqdm": False, "enable_prefix_caching": False, "num_kvcache_blocks": 32}
    times = [time.process_time()]
    engines = {}
    for is_on in (False, True):
        engines[is_on] = LLM(model, deterministic=is_on, **common)
        times.append(time.process_time())
    print(f"{dtype}, start: {times[1] - times[0]:.2f} s without, {times[2] - times[1]:.2f} s with it", flush=True)
    for name, (num_prompts, prompt_len, max_tokens) in WORKLOADS.items():
        draw = random.Random(0)
        prompts = [[draw.randrange(1000) for _ in range(prompt_len)] for _ in range(num_prompts)]
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(passes):
            for is_on, llm in engines.items():
                start = time.process_time()
                llm.generate(prompts, SamplingParams(0, max_tokens, ignore_eos=True), use_tqdm=False)
                seconds[is_on].append(time.process_time() - start)
        off, on = (min(seconds[is_on]) for is_on in (False, True))
        print(f"{dtype}, {name}: {off:.2f} s without, {on:.2f} s with it ({on / off - 1:+.0%})", flush=True)
    for llm in engines.values():
        llm.exit()


if __name__ == "__main__":
    main()
