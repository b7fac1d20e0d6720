"""What speculation gains on real text: a chat model edits, rephrases, extracts and answers, with and without it.

    python scripts/real_model.py
    python benchmarks/speculation_texts.py ~/.cache/nanovllm/models/SmolLM2-135M-Instruct --at-once 1 16 64 256

The texts are Python's own: sources of its library, and its language reference (pydoc's topics). Prints for each task
and number of requests at a time: output tokens a second without and with speculation, the gain, the mean number of
tokens that a step gave a sequence, and how many of the answers were the same (on a GPU, rounding depends on the rows of
a step).
"""

import argparse
import inspect
import json
import textwrap
import time
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

from nanovllm import LLM, SamplingParams
from nanovllm.engine.features.speculation.speculative_scheduler import SpeculativeScheduler
from nanovllm.engine.features.speculation.suffix_index import SuffixProposer

MODULES = "bisect", "heapq", "textwrap", "shlex", "sched", "queue", "fnmatch", "colorsys", "string", "stat"
MAX_CHARACTERS = 1800  # of a text


def sources() -> list[str]:
    """Functions and classes of the library."""
    found = []
    for name in MODULES:
        for _, value in inspect.getmembers(import_module(name)):
            if inspect.isfunction(value) or inspect.isclass(value):
                try:
                    source = textwrap.dedent(inspect.getsource(value))
                except (OSError, TypeError):
                    continue
                if len(source) > 300 and source not in found:
                    found.append(source[:MAX_CHARACTERS])
    return found


def articles() -> list[str]:
    return [text[:MAX_CHARACTERS] for text in topics.values() if len(text) > 600]


# The request, and the texts that it is made for.
TASKS = {
    "edit": ("Add a comment before the return statement of this code. Answer with the whole code.\n\n{}", sources),
    "rephrase": ("Correct the spelling of this text, and change nothing else.\n\n{}", articles),
    "extract": ('Write the key terms of this text as a JSON list of {{"term": ..., "meaning": ...}}.\n\n{}', articles),
    "answer": ("{}\n\nWhat does this text say? Quote the sentences that matter most.", articles),
}


def conversations(task: str, number: int) -> list[list[dict[str, str]]]:
    request, texts = TASKS[task]
    found = texts()
    return [[{"role": "user", "content": request.format(found[i % len(found)])}] for i in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--few", type=int, default=8, help="requests of each task, if fewer are at once")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--max-speculative-tokens", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    answers: dict[tuple, list] = {}
    speeds: dict[tuple, float] = {}
    rows = []
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=0)
    for speculation in (None, "suffix"):
        for at_once in args.at_once:
            options = {"speculation": speculation, "max_speculative_tokens": args.max_speculative_tokens}
            options |= {"max_num_seqs": at_once, "dtype": args.dtype, "use_tqdm": False, "max_model_len": 2048}
            with LLM(args.model, **options) as llm:
                device = llm.model_runner.device_name
                for task in args.tasks:
                    requests = conversations(task, max(at_once, args.few))
                    seconds = []
                    for _ in range(args.passes + 1):
                        llm.reset_prefix_cache()
                        if isinstance(llm.scheduler, SpeculativeScheduler):  # It would know the answers.
                            llm.scheduler.proposer = SuffixProposer()
                        before, start = llm.stats(), time.perf_counter()
                        results = llm.chat(requests, params, use_tqdm=False)
                        seconds.append(time.perf_counter() - start)
                        after = llm.stats()
                    num_tokens = after["generated_tokens"] - before["generated_tokens"]
                    accepted = after["accepted_tokens"] - before["accepted_tokens"]
                    speed = num_tokens / median(seconds[1:])
                    texts = [result["token_ids"] for result in results]
                    if speculation is None:
                        answers[task, at_once], speeds[task, at_once] = texts, speed
                        continue
                    plain, same = speeds[task, at_once], sum(map(list.__eq__, texts, answers[task, at_once]))
                    rows.append(
                        {
                            "task": task,
                            "at_once": at_once,
                            "without": plain,
                            "with": speed,
                            "gain": speed / plain,
                            "tokens_a_step": num_tokens / (num_tokens - accepted),
                            "same": same / len(texts),
                        }
                    )
                    row = rows[-1]
                    print(
                        f"{task:9} {at_once:4} at once  {plain:9,.0f} -> {speed:9,.0f} tokens/s  {row['gain']:5.2f} x  "
                        f"{row['tokens_a_step']:5.2f} tokens a step  {row['same']:4.0%} the same",
                        flush=True,
                    )
    if args.json:
        Path(args.json).write_text(json.dumps({"device": device, "arguments": vars(args), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
