"""Is this engine faster than transformers on a CPU? All run in turn, in one process.

    python benchmarks/cpu.py                                    # random weights in the shape of SmolLM2-135M
    python benchmarks/cpu.py PATH --threads 2 --dtype bfloat16 --workload chats

- batch-N: N prompts of 22 tokens, all with as many new tokens.
- chats: 100 prompts of 10 to 400 tokens, with 10 to 200 new tokens each. transformers computes them in batches of 32
  with padding on the left, each until its longest completion is done. The engine decides for itself.
- mixed: the same with 16 prompts of 10 to 200 tokens, and 8 to 64 new tokens each.

transformers computes each workload twice: by `generate`, and by the continuous batching of `generate_batch`
("batching", see continuous_batching.py), which decides for itself too.

Decoding is greedy and ignores end-of-sequence tokens. A ratio is the time of transformers over the engine's: above 1,
the engine is faster. Tokens are compared with those of `generate`. With one thread the process's CPU time tells more
than the clock if other programs are running.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from continuous_batching import continuous_batching
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from nanovllm import LLM, SamplingParams

SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
PROMPT_TOKENS = 22
CHATS_AT_ONCE = 32  # of transformers
ENGINES = "generate", "batching", "nanovllm"
BATCHING_MEMORY = 0.1  # share of the free memory for keys and values; its default is more than half of the machine's


@dataclass
class Workload:
    """Prompts, the number of new tokens of each, and how many of them transformers computes at once."""

    prompts: list[list[int]]
    lengths: list[int]
    at_once: int


class Seconds(NamedTuple):
    wall: float
    cpu: float  # of all threads


def make_workloads(vocab_size: int, num_new: int) -> dict[str, Workload]:
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    found = {f"batch-{n}": Workload([prompt(PROMPT_TOKENS) for _ in range(n)], [num_new] * n, n) for n in (1, 8, 32)}
    prompts = [prompt(rng.randint(10, 400)) for _ in range(100)]
    found |= {"chats": Workload(prompts, [rng.randint(10, 200) for _ in prompts], CHATS_AT_ONCE)}
    prompts = [prompt(rng.randint(10, 200)) for _ in range(16)]
    return found | {"mixed": Workload(prompts, [rng.randint(8, 64) for _ in prompts], CHATS_AT_ONCE)}


@torch.inference_mode()
def run_transformers(model: Any, workload: Workload) -> list[list[int]]:
    completions: list[list[int]] = []
    for start in range(0, len(workload.prompts), workload.at_once):
        prompts = workload.prompts[start : start + workload.at_once]
        lengths = workload.lengths[start : start + workload.at_once]
        width = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        settings = GenerationConfig(max_new_tokens=max(lengths), do_sample=False, pad_token_id=0, eos_token_id=None)
        rows = model.generate(input_ids, attention_mask=mask, generation_config=settings)[:, width:].tolist()
        completions += [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return completions


def run_nanovllm(llm: LLM, workload: Workload) -> list[list[int]]:
    llm.reset_prefix_cache()  # A pass must not find the keys of the pass before.
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=length) for length in workload.lengths]
    return [output["token_ids"] for output in llm.generate(workload.prompts, params, use_tqdm=False)]


def timed(run: Callable[[], Any]) -> tuple[Seconds, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu), result


def compare(model: Any, llm: LLM, workload: Workload, passes: int) -> tuple[dict[str, list[Seconds]], dict[str, int]]:
    """The times of each engine's passes, in turn, after a few tokens to warm up; and the number of prompts whose tokens
    are those of `generate`."""
    prompts, lengths = workload.prompts, workload.lengths
    times: dict[str, list[Seconds]] = {name: [] for name in ENGINES}
    tokens: dict[str, list[list[int]]] = {}
    # A pass must not find the keys of the pass before: so batching shares no prefixes.
    options = {"max_memory_percent": BATCHING_MEMORY, "allow_block_sharing": False}
    with continuous_batching(model, prompts, lengths, **options) as batching:
        runs = {
            "generate": lambda each: run_transformers(model, each),
            "batching": lambda each: batching.complete(each.prompts, each.lengths),
            "nanovllm": lambda each: run_nanovllm(llm, each),
        }
        short = Workload(prompts[:8], [2] * len(prompts[:8]), workload.at_once)
        for run in runs.values():
            run(short)
        for _ in range(passes):
            for name, run in runs.items():
                seconds, tokens[name] = timed(partial(run, workload))
                times[name].append(seconds)
    equal = {name: sum(map(list.__eq__, found, tokens["generate"])) for name, found in tokens.items()}
    return times, equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(make_workloads(1, 1))
    parser.add_argument("model", nargs="?", help="a checkpoint's directory; without it random weights")
    parser.add_argument("--threads", type=int, default=1, help="of torch, for both (default: 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--workload", choices=names, nargs="+", default=names)
    parser.add_argument("--new-tokens", type=int, default=64, help="of each prompt of batch-N (default: 64)")
    parser.add_argument("--passes", type=int, default=3, help="of each engine (default: 3)")
    parser.add_argument("--best", action="store_true", help="the fastest pass, not the median: beside other programs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None:
            args.model = str(Path(directory, "SmolLM2-135M-random"))
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(LlamaConfig(**SMOLLM2_135M)).save_pretrained(args.model)
        kind, of_passes = ("fastest", min) if args.best else ("medians", median)
        print(f"{args.model}, {args.threads} threads, {kind} of {args.passes} passes; seconds, then ratios")
        print("| dtype | workload | engine | wall | CPU | ratio: wall | CPU | same tokens |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for dtype in args.dtype:
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
            model.generation_config.eos_token_id = None  # It would stand in for a None of run_transformers.
            options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "skip_tokenizer_init": True, "use_tqdm": False}
            with LLM(args.model, **options) as llm:
                workloads = make_workloads(model.config.vocab_size, args.new_tokens)
                for name in args.workload:
                    times, equal = compare(model, llm, workloads[name], args.passes)
                    figures = {engine: Seconds(*map(of_passes, zip(*times[engine], strict=True))) for engine in ENGINES}
                    ours = figures["nanovllm"]
                    for engine in ENGINES:
                        seconds = figures[engine]
                        print(
                            f"| {dtype} | {name} | {engine} | {seconds.wall:.2f} | {seconds.cpu:.2f} "
                            f"| {seconds.wall / ours.wall:.2f} | {seconds.cpu / ours.cpu:.2f} "
                            f"| {equal[engine]} of {len(workloads[name].prompts)} |",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
