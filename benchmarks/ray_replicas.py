"""How does a job scale over GPUs? The same prompts with one engine in this process, then with replicas on Ray.

    python benchmarks/ray_replicas.py --model ~/huggingface/Qwen3-0.6B --lines 60000 --replicas 1 2 --json out.json

Lines and their lengths are those of benchmarks/jobs.py. The start of the engines is not counted. No weights are needed
with `--model Qwen3-0.6B --load-format dummy --tokenizer DIRECTORY`, where the tokenizer may be any smaller one.
"""

import argparse
import json
import multiprocessing
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from jobs import OPTIONS, write_prompts

from nanovllm.jobs import run_batch


def measure(model: str, file: Path, replicas: int | None, engine: dict) -> dict:
    folder = Path(tempfile.mkdtemp(dir=file.parent))
    summary = run_batch(file, folder, model, replicas=replicas, **OPTIONS, **engine)
    shutil.rmtree(folder)
    tokens = summary.num_completion_tokens
    row = {"replicas": replicas, "lines": summary.num_answered, "seconds": round(summary.seconds, 2)}
    return row | {"tokens_per_second": round(tokens / summary.seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path("~/huggingface/Qwen3-0.6B").expanduser()))
    parser.add_argument("--tokenizer", metavar="DIRECTORY", help="default: the model's")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lines", type=int, default=60_000)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", metavar="FILE", type=Path)
    args = parser.parse_args()
    engine = {"tokenizer": args.tokenizer, "load_format": args.load_format, "device": args.device}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prompts.jsonl")
        write_prompts(file, args.tokenizer or args.model, args.lines)
        for replicas in (None, *args.replicas):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                rows.append(pool.submit(measure, args.model, file, replicas, engine).result())
            print(json.dumps(rows[-1]), flush=True)
    one = next(row for row in rows if row["replicas"] == min(args.replicas))
    for row in rows:
        row["times_one_replica"] = round(row["tokens_per_second"] / one["tokens_per_second"], 3)
    print(json.dumps(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
