"""How long does the GPU wait for the host before a batch's first step and after its last one? Needs no GPU.

    python benchmarks/host_batches.py --workload prefill prefix many

Runs LLM.generate without the model: a step's inputs are prepared, and its tokens are made up. The time to launch
kernels is not included.
"""

import argparse
import gc
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from nanovllm import LLM, SamplingParams
from nanovllm.bench.workloads import TEMPERATURE, VOCABULARY, WORKLOADS
from nanovllm.engine.step import Step

SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCABULARY + 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


class NoModel:
    """Stands in for ModelRunner.call, and notes when it was first called and when the last tokens were asked for."""

    def __init__(self) -> None:
        self.first_launch = self.last_wait = 0.0

    def __call__(self, method_name: str, step: Step) -> None:
        self.first_launch = self.first_launch or time.perf_counter()
        step.wait = partial(self.wait, len(step.seqs))

    def wait(self, num_seqs: int, check_workers: object) -> list[int]:
        self.last_wait = time.perf_counter()
        return [1] * num_seqs


def measure(llm: LLM, name: str, index: int) -> tuple[float, float]:
    """Milliseconds before the first launch, its inputs included, and after the last tokens."""
    prompts, outputs = WORKLOADS[name].draw(index)
    params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in outputs]
    call = NoModel()
    setattr(llm.model_runner, "call", call)  # noqa: B010
    gc.collect()
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    end = time.perf_counter()
    return 1e3 * (call.first_launch - start), 1e3 * (end - call.last_wait)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", default=["prefill", "prefix", "many"])
    parser.add_argument("--passes", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(SHAPE))
        options = {"num_kvcache_blocks": 8000, "max_model_len": 4096, "seed": 0}
        llm = LLM(directory, load_format="dummy", device="cpu", skip_tokenizer_init=True, **options)
    print(f"ms, median (least) of {args.passes}   before the first launch   after the last tokens")
    for name in args.workload:
        before, after = zip(*(measure(llm, name, index) for index in range(args.passes)), strict=True)
        print(
            f"{name:25s} {median(before):12.2f} ({min(before):.2f}) {median(after):16.2f} ({min(after):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
