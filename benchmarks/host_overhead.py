"""Does the host time of a decode step, or the memory of a waiting request, grow with the queue? Needs no GPU.

    python benchmarks/host_overhead.py --json out.json

Runs the real Scheduler and DecodeInputs with made-up tokens instead of a model. The host's arrays are written, but not
sent to a device.
"""

import argparse
import json
import time
import tracemalloc
from pathlib import Path
from random import Random
from statistics import median

import torch

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.features.columns import AttentionColumns
from nanovllm.engine.inputs import DecodeInputs
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Rows
from nanovllm.layers.backends.backend import AttentionShape, StepSizes
from nanovllm.layers.backends.triton_backend import TritonBackend
from nanovllm.layers.matmul.table import load_table

BLOCK_SIZE, PROMPT_TOKENS = 256, 500
STEPS = 200


def measure(batch: int, waiting: int) -> dict:
    """Median milliseconds of each part of a decode step, with `waiting` more requests queued than there is room for."""
    rng = Random(0)
    options = {"load_format": "dummy", "device": "cpu", "skip_tokenizer_init": True, "kvcache_block_size": BLOCK_SIZE}
    config = Config("Qwen3-0.6B", max_num_seqs=batch, max_num_batched_tokens=1 << 20, max_model_len=4096, **options)
    config.num_kvcache_blocks = batch * 4
    scheduler = Scheduler(config)
    backend, device = TritonBackend(), torch.device("cpu")
    shape = AttentionShape(16, 8, 128, BLOCK_SIZE, config.dtype, device)
    backend.prepare(shape, [None], StepSizes(0, 4096, batch, num_layer_params=1), load_table(device))
    inputs = DecodeInputs(batch, 4096 // BLOCK_SIZE, BLOCK_SIZE, device, [AttentionColumns(backend)])
    params = SamplingParams(max_tokens=PROMPT_TOKENS, ignore_eos=True)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(batch + waiting):
        first = rng.randint(0, 100000)
        prompt = list(range(first, first + PROMPT_TOKENS))
        scheduler.add(Sequence(prompt, params, seed=i))
    bytes_each = (tracemalloc.get_traced_memory()[0] - before) / (batch + waiting)
    tracemalloc.stop()

    tokens = [1] * batch
    parts = {"schedule": [], "prepare": [], "advance": [], "collect": []}
    decoded = 0
    while decoded < STEPS:
        marks = [time.perf_counter()]
        step = scheduler.schedule()
        marks.append(time.perf_counter())
        if not step.is_prefill:
            inputs.write(step, Rows.of(step), len(step.seqs))
        marks.append(time.perf_counter())
        scheduler.advance(step)
        marks.append(time.perf_counter())
        scheduler.record(step, tokens[: len(step.seqs)])
        marks.append(time.perf_counter())
        if not step.is_prefill:
            decoded += 1
            for name, start, end in zip(parts, marks, marks[1:], strict=False):
                parts[name].append(1e3 * (end - start))
    row = {"batch": batch, "waiting": waiting, "bytes_a_request": bytes_each}
    row |= {f"{name}_ms": median(values) for name, values in parts.items()}
    row["step_ms"] = sum(row[f"{name}_ms"] for name in parts)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    print("batch  waiting  schedule  prepare  advance  collect   step, ms   bytes a request (500 tokens)")
    for batch, waiting in ((1, 0), (256, 0), (256, 1000), (256, 100_000), (512, 1000)):
        rows.append(r := measure(batch, waiting))
        print(
            f"{batch:5d} {waiting:8d} {r['schedule_ms']:9.3f} {r['prepare_ms']:8.3f} {r['advance_ms']:8.3f} "
            f"{r['collect_ms']:8.3f} {r['step_ms']:10.3f} {r['bytes_a_request']:10.0f}",
            flush=True,
        )
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
