"""What speculation costs and gains: a model's shape with proposals of which a chosen share is right.

    python benchmarks/speculation.py --model Qwen3-8B --acceptance 0 0.5 0.9 --at-once 1 64 --max-speculative-tokens 4

Weights are random, and so are proposals. Which of them are right is drawn instead of looked up, so the text means
nothing, but every step does what it would do. A step tries all that is proposed and fits, unless --budget lets the
engine choose. Prints output tokens a second, tokens a step, and the gain over an engine without speculation.
"""

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median

from nanovllm import LLM, SamplingParams
from nanovllm.engine.features.speculation import speculative_scheduler
from nanovllm.engine.features.speculation.suffix_index import GRAM, Proposal

VOCAB_SIZE = 10_000


class RandomProposals:
    """Always as many tokens as may be tried."""

    def propose(self, seq, length: int, num_tokens: int) -> Proposal:
        return Proposal([random.randrange(VOCAB_SIZE) for _ in range(num_tokens)], GRAM, 0)

    def finish(self, seq) -> None:
        pass

    forget = finish


class NoProposals(RandomProposals):
    def propose(self, seq, length: int, num_tokens: int) -> None:
        return None


def draw_right(scheduler, acceptance: float) -> None:
    """Let each proposed token be right with this probability, if those before it are."""
    record = type(scheduler).record

    def drawn(step, token_ids):
        row = 0
        for tokens in step.proposed:
            num_right = 0
            while num_right < len(tokens) and random.random() < acceptance:
                num_right += 1
            token_ids[row : row + num_right] = tokens[:num_right]
            if num_right < len(tokens):
                token_ids[row + num_right] = (tokens[num_right] + 1) % VOCAB_SIZE
            row += 1 + len(tokens)
        return record(scheduler, step, token_ids)

    scheduler.record = drawn


def measure(llm: LLM, num_seqs: int, args: argparse.Namespace) -> dict[str, float]:
    """Of the median pass."""
    speeds, per_step = [], []
    params = SamplingParams(temperature=0.6, max_tokens=args.output_tokens, ignore_eos=True)
    for _ in range(args.passes + 1):
        prompts = [[random.randrange(VOCAB_SIZE) for _ in range(args.prompt_tokens)] for _ in range(num_seqs)]
        before, start = llm.stats(), time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds, after = time.perf_counter() - start, llm.stats()
        num_tokens = after["generated_tokens"] - before["generated_tokens"]
        speeds.append(num_tokens / seconds)
        per_step.append(num_tokens / num_seqs / (after["steps"] - before["steps"]))
    return {"tokens_per_second": median(speeds[1:]), "tokens_per_step": median(per_step[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-8B")
    parser.add_argument("--quantization")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.5, 0.9])
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--max-speculative-tokens", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--budget", action="store_true", help="let the engine choose how many tokens it tries")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    random.seed(0)
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "quantization": args.quantization}
    options |= {"max_num_seqs": max(args.at_once), "use_tqdm": False}
    found: dict[str, dict[str, float]] = {}

    def report(name: str, num_seqs: int, figures: dict[str, float]) -> None:
        found[f"{num_seqs} at a time, {name}"] = figures
        plain = found[f"{num_seqs} at a time, without"]
        gain = figures["tokens_per_second"] / plain["tokens_per_second"]
        speed, per_step = figures.values()
        print(
            f"{num_seqs:4} at a time, {name:16} {speed:9,.0f} tokens/s  {per_step:5.2f} a step  {gain:5.2f} x",
            flush=True,
        )

    with LLM(args.model, **options) as llm:
        for num_seqs in args.at_once:
            report("without", num_seqs, measure(llm, num_seqs, args))
    with LLM(args.model, speculation="suffix", max_speculative_tokens=args.max_speculative_tokens, **options) as llm:
        print(llm.model_runner.step_times)
        device, scheduler = llm.model_runner.device_name, llm.scheduler
        assert isinstance(scheduler, speculative_scheduler.SpeculativeScheduler)
        scheduler.proposer = NoProposals()  # type: ignore[assignment]
        for num_seqs in args.at_once:
            report("nothing proposed", num_seqs, measure(llm, num_seqs, args))
        scheduler.proposer = RandomProposals()  # type: ignore[assignment]
        if not args.budget:
            most_rows = llm.config.max_decode_rows
            speculative_scheduler.choose_counts = lambda chances, num_seqs, pace: [
                min(len(each), most_rows // num_seqs - 1) for each in chances
            ]
        for acceptance in args.acceptance:
            draw_right(scheduler, acceptance)
            for num_seqs in args.at_once:
                report(f"acceptance {acceptance}", num_seqs, measure(llm, num_seqs, args))
    if args.json:
        Path(args.json).write_text(json.dumps({"device": device, "arguments": vars(args), "figures": found}, indent=1))


if __name__ == "__main__":
    main()
