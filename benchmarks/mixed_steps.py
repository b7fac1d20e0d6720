"""What mixed steps gain: workloads with them and without, in turn, in one engine.

    python benchmarks/mixed_steps.py --model Qwen3-8B --workload bench --passes 2 --json out.json

Of a pass: seconds, output tokens a second, and how many steps were mixed and how many prompt tokens they computed.
Lengths are the workload's in every pass, prompts are fresh ones. Random weights.
"""

import argparse
import json
import time
from itertools import count
from pathlib import Path

from gpus import require_gpus
from workloads import TEMPERATURE, WORKLOADS

from nanovllm import LLM, SamplingParams


class Counter:
    """Counts the mixed steps of an engine, and what they compute of prompts."""

    def __init__(self, llm: LLM):
        self.steps = self.tokens = 0
        self._schedule = llm.scheduler.schedule
        llm.scheduler.schedule = self.schedule

    def schedule(self):
        seqs, is_prefill = self._schedule()
        if not is_prefill and seqs[-1].is_prefilling:
            self.steps += 1
            self.tokens += sum(seq.num_scheduled_tokens for seq in seqs if seq.is_prefilling)
        return seqs, is_prefill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-8B", help="published shape")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["bench"])
    parser.add_argument("--rows", type=int, help="of a mixed step; default: the engine's")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--json")
    args = parser.parse_args()
    require_gpus(parser)
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
    rows, index = [], count()
    with LLM(args.model, mixed_step_rows=args.rows, **options) as llm:
        num_rows, counter = llm.scheduler.mixed_step_rows, Counter(llm)
        if not num_rows:
            parser.error(f"{args.model} has no mixed steps unless --rows says how many")
        for name in (name for name in args.workload for _ in range(args.passes)):
            for llm.scheduler.mixed_step_rows in (num_rows, 0):
                prompts, outputs = WORKLOADS[name].draw(next(index))
                params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=n) for n in outputs]
                counter.steps = counter.tokens = 0
                start = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - start
                row = {"model": args.model, "workload": name, "rows": llm.scheduler.mixed_step_rows, "seconds": seconds}
                row |= {"tokens_per_second": sum(outputs) / seconds}
                rows.append(row | {"mixed_steps": counter.steps, "prompt_tokens_beside": counter.tokens})
                print(" ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
