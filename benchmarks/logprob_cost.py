"""What do log-probabilities of the sampled tokens cost? A workload with and without `logprobs`, pass by pass in turn.

python benchmarks/logprob_cost.py --model Qwen3-0.6B --load-format dummy --workload many --passes 5
python benchmarks/logprob_cost.py --model MODEL --device cpu --workload laptop
"""

import argparse
import logging
from statistics import median

from nanovllm import LLM
from nanovllm.bench.run import run_pass
from nanovllm.bench.workloads import TEMPERATURE, WORKLOADS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="a directory, a hub id, or with dummy weights the name of a shape")
    add("--load-format", default="auto")
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--workload", choices=WORKLOADS, default="many")
    add("--passes", type=int, default=3, help="of each kind")
    add("--logprobs", type=int, nargs="+", default=[0], help="numbers of likeliest tokens besides the sampled one")
    add("--logprobs-mode", default="raw_logprobs")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    workload = WORKLOADS[options.workload]
    engine = {name: getattr(options, name) for name in ("load_format", "device", "dtype", "logprobs_mode")}
    with LLM(options.model, **engine, max_num_seqs=workload.max_num_seqs, seed=0, skip_tokenizer_init=True) as llm:
        kinds = [None, *options.logprobs]
        rates: dict[int | None, list[float]] = {kind: [] for kind in kinds}
        for index in range(-1, options.passes):  # The first round warms up.
            for kind in kinds:
                figures = run_pass(llm, workload, index, {"temperature": TEMPERATURE, "logprobs": kind})
                llm.reset_prefix_cache()  # The next kind has the same prompts.
                if index >= 0:
                    rates[kind].append(figures["throughput"])
        base = median(rates[None])
        for kind, found in rates.items():
            middle = median(found)
            shown = ", ".join(f"{rate:.0f}" for rate in found)
            print(f"logprobs={kind}: {middle:.0f} tokens/s, {middle / base - 1:+.1%} ({shown})")


if __name__ == "__main__":
    main()
