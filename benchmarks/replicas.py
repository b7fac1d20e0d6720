"""How do engines behind one LLM scale? One engine, then data_parallel_size=N, in one run.

    python benchmarks/replicas.py --model Qwen3-8B --load-format dummy --replicas 1 4 --workload bench throughput \\
        --passes 3 --json out.json
    python benchmarks/replicas.py --model ~/huggingface/Qwen3-0.6B --replicas 1 4 --workload many --lines 60000 --ray

N engines get N times a workload's requests, each time with other prompts, so that each has as much to do as one alone
(--same-requests: they divide what one has). Each number of engines runs in a process of its own. The host's share is
the processor time of the caller's process beside the seconds of a pass: what limits small models. `--lines` adds a job
of so many lines with each number of engines, and `--ray` the same job with as many engines on Ray (lengths and words
are those of benchmarks/jobs.py).
"""

import argparse
import json
import multiprocessing
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from jobs import OPTIONS, write_prompts

from nanovllm import LLM, SamplingParams
from nanovllm.bench.workloads import TEMPERATURE, WORKLOADS
from nanovllm.jobs import run_batch


def measure(model: str, engine: dict, num: int, workloads: list[str], passes: int, num_draws: int) -> dict:
    """All workloads with `num` engines. num_draws: how many times a workload's requests."""
    start = time.perf_counter()
    max_num_seqs = max(WORKLOADS[name].max_num_seqs for name in workloads)
    options: Any = engine | {"data_parallel_size": num, "max_num_seqs": max_num_seqs, "skip_tokenizer_init": True}
    with LLM(model, seed=0, **options) as llm:
        row = {"replicas": num, "device": llm.model_runner.device_name, "start": round(time.perf_counter() - start, 2)}
        vocab_size = llm.config.hf_config.vocab_size
        warm_up = [[1 + i, 2, 3] for i in range(8 * num)]
        llm.generate(warm_up, SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        for name in workloads:
            seconds, shares, tokens = [], [], 0
            for index in range(passes):
                drawn = [WORKLOADS[name].draw(index * num_draws + i, vocab_size) for i in range(num_draws)]
                prompts = [prompt for each, _ in drawn for prompt in each]
                lengths = [length for _, each in drawn for length in each]
                params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in lengths]
                begin, busy = time.perf_counter(), time.process_time()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds.append(time.perf_counter() - begin)
                shares.append((time.process_time() - busy) / seconds[-1])
                tokens = sum(len(output["token_ids"]) for output in outputs)
                if tokens != sum(lengths):
                    raise RuntimeError(f"{name}: {tokens} tokens where {sum(lengths)} are asked for")
            middle = median(seconds)
            row[name] = {
                "tokens": tokens,
                "seconds": round(middle, 3),
                "tokens_per_second": round(tokens / middle, 1),
                "host_share": round(median(shares), 3),
            }
            print(json.dumps({"replicas": num, "workload": name} | row[name]), flush=True)
        begin = time.perf_counter()
    return row | {"exit": round(time.perf_counter() - begin, 2)}


def measure_job(model: str, engine: dict, file: Path, num: int, on_ray: bool) -> dict:
    folder = Path(tempfile.mkdtemp(dir=file.parent))
    how: Any = {"replicas": num} if on_ray else {"data_parallel_size": num}
    summary = run_batch(file, folder, model, use_tqdm=False, **how, **OPTIONS, **engine)
    shutil.rmtree(folder)
    row = {"replicas": num, "job": "Ray" if on_ray else "data_parallel_size", "lines": summary.num_answered}
    row |= {"seconds": round(summary.seconds, 2)}
    return row | {"tokens_per_second": round(summary.num_completion_tokens / summary.seconds, 1)}


def in_a_process(function: Any, *arguments: Any) -> dict:
    """Whatever it leaves on a GPU goes with it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def compare(rows: list[dict], jobs: list[dict], workloads: list[str]) -> None:
    """Add how many times as fast as the first row each is."""
    for row in rows:
        row["times_start"] = round(row["start"] / rows[0]["start"], 3)
        for name in workloads:
            row[name]["times"] = round(row[name]["tokens_per_second"] / rows[0][name]["tokens_per_second"], 3)
    for job in jobs:
        job["times"] = round(job["tokens_per_second"] / jobs[0]["tokens_per_second"], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(Path("~/huggingface/Qwen3-0.6B").expanduser()))
    add("--load-format", default="auto")
    add("--device", default="auto")
    add("--tensor-parallel-size", type=int, default=1, metavar="T", help="GPUs of each engine")
    add("--replicas", type=int, nargs="+", default=[1, 2], metavar="N")
    add("--workload", nargs="+", default=["bench"], choices=WORKLOADS)
    add("--passes", type=int, default=1)
    add("--same-requests", action="store_true", help="N engines divide what one has")
    add("--lines", type=int, default=0, metavar="N", help="of a job; needs a tokenizer")
    add("--tokenizer", metavar="DIRECTORY", help="of the job; default: the model's")
    add("--ray", action="store_true", help="run the job on Ray too")
    add("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    engine = {"load_format": args.load_format, "device": args.device, "tensor_parallel_size": args.tensor_parallel_size}
    rows, jobs = [], []
    for num in args.replicas:
        draws = 1 if args.same_requests else num
        rows.append(in_a_process(measure, args.model, engine, num, args.workload, args.passes, draws))
        print(json.dumps({key: rows[-1][key] for key in ("replicas", "device", "start", "exit")}), flush=True)
    if args.lines:
        of_job = engine | {"tokenizer": args.tokenizer}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "prompts.jsonl")
            write_prompts(file, args.tokenizer or args.model, args.lines)
            for on_ray in (False, True)[: 1 + args.ray]:
                for num in args.replicas:
                    jobs.append(in_a_process(measure_job, args.model, of_job, file, num, on_ray))
                    print(json.dumps(jobs[-1]), flush=True)
    compare(rows, jobs, args.workload)
    report = {"model": args.model, "same_requests": args.same_requests, "rows": rows, "jobs": jobs}
    print(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
