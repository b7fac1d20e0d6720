"""What does a job cost beside LLM.generate on the same prompts? Throughput, and the host's peak memory.

    python benchmarks/jobs.py --model ~/huggingface/Qwen3-0.6B --lines 100000 --json out.json

Prompts are texts of random words, with the lengths of the workload `many`, and every answer has its workload's length.
Each pass runs in a process of its own, so that its peak memory is its own. The start of the engine is not counted.
"""

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.bench.workloads import WORKLOADS
from nanovllm.jobs import run_batch

OPTIONS = {"temperature": 0.6, "ignore_eos": True}


def write_prompts(file: Path, model: str, num_lines: int) -> None:
    """Lines of `many`'s lengths: a word is one token, nearly always."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = [text for i in range(500, 5000) if (text := tokenizer.decode([i])).isascii() and text.strip().isalpha()]
    rng, workload = Random(0), WORKLOADS["many"]
    with file.open("w") as lines:
        for i in range(num_lines):
            prompt = "".join(rng.choices(words, k=rng.randint(*workload.prompt)))
            lines.write(json.dumps({"id": i, "prompt": prompt, "max_tokens": rng.randint(*workload.output)}) + "\n")


def run_generate(model: str, file: Path) -> tuple[int, float]:
    with LLM(model, seed=0) as llm:
        start = time.perf_counter()  # Parsing belongs to the work, as it does in a job.
        rows = [json.loads(line) for line in file.open()]
        params = [SamplingParams(**OPTIONS, max_tokens=row["max_tokens"]) for row in rows]
        outputs = llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return sum(len(output["token_ids"]) for output in outputs), seconds


def run_job(model: str, file: Path) -> tuple[int, float]:
    folder = Path(tempfile.mkdtemp(dir=file.parent))
    summary = run_batch(file, folder, model, use_tqdm=False, **OPTIONS)
    shutil.rmtree(folder)
    return summary.num_completion_tokens, summary.seconds


def measure(way: str, model: str, file: Path) -> dict:
    tokens, seconds = {"generate": run_generate, "job": run_job}[way](model, file)
    peak, child = (resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{way}: {tokens} tokens, {seconds:.2f} s, {tokens / seconds:.0f} tok/s, peak {peak:.0f} MB", flush=True)
    return {"tokens_per_second": tokens / seconds, "seconds": seconds, "peak_mb": peak, "largest_child_mb": child}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path("~/huggingface/Qwen3-0.6B").expanduser()))
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--passes", type=int, default=2, help="of each way")
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    report = {"lines": args.lines, "model": args.model, "passes": {"generate": [], "job": []}}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prompts.jsonl")
        write_prompts(file, args.model, args.lines)
        for _ in range(args.passes):
            for way, passes in report["passes"].items():
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    passes.append(pool.submit(measure, way, args.model, file).result())
    best = {way: max(each["tokens_per_second"] for each in passes) for way, passes in report["passes"].items()}
    report["job_share_of_generate"] = best["job"] / best["generate"]
    print(f"a job reaches {100 * report['job_share_of_generate']:.1f} % of generate's throughput")
    largest = max(each["largest_child_mb"] for each in report["passes"]["job"])
    print(f"its reading process, or one that compiled kernels, took {largest:.0f} MB at most")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
