"""What the command line says of a job: at its end, of its state, and of what it would take."""

import sys
from typing import TYPE_CHECKING

from nanovllm.jobs.folder import ERRORS, JobFolder, Status
from nanovllm.jobs.time_and_price import price_in_words, time_in_words

if TYPE_CHECKING:  # `nanovllm status` needs no engine.
    from nanovllm.jobs.check import Check, Estimate
    from nanovllm.jobs.run import Summary

_MAX_ERRORS = 10


def print_summary(summary: "Summary", output: str) -> None:
    print(f"{summary.num_answered:,} of {summary.num_lines:,} lines answered in {output}")
    generated = f", {summary.num_completion_tokens:,} completion tokens" if summary.task == "generate" else ""
    print(f"{summary.num_prompt_tokens:,} prompt tokens{generated}")
    has_earlier = summary.total_seconds > summary.seconds + 0.1
    print(
        f"this call took {summary.seconds:.1f} s",
        *([f"all calls {summary.total_seconds:.1f} s"] if has_earlier else []),
        *_speed_and_price(summary.tokens_per_second, summary.price),
        sep=", ",
    )
    if summary.num_failed:
        failed = f"{summary.num_failed:,} line{'s' * (summary.num_failed > 1)} failed"
        print(f"{failed}: {JobFolder(output).path / ERRORS} says why", file=sys.stderr)


def print_status(status: Status) -> None:
    answered, failed, num_prompt_tokens, num_completion_tokens = status.counts
    left = status.num_lines - answered - failed
    state = "running" if status.is_running else "complete" if left == 0 else "interrupted"
    print(f"{state}: {answered} of {status.num_lines} lines answered, {failed} failed, {left} left")
    generates = status.job.get("task", "generate") == "generate"
    print(
        f"{num_prompt_tokens} prompt tokens{f', {num_completion_tokens} completion tokens' * generates}",
        f"{status.seconds:.1f} s so far",
        *_speed_and_price(status.tokens_per_second, status.price),
        sep=", ",
    )
    print(", ".join(f"{name}={value!r}" for name, value in status.job.items()))


def _speed_and_price(tokens_per_second: float | None, price: float | None) -> list[str]:
    speed = [f"{tokens_per_second:,.0f} tokens a second"] if tokens_per_second else []
    return speed if price is None else [*speed, f"price {price_in_words(price)}"]


def print_check(check: "Check") -> None:
    for row in check.errors[:_MAX_ERRORS]:
        print(f"{row['file']}:{row['line']}: {row['error']}", file=sys.stderr)
    if check.num_failed > _MAX_ERRORS:
        print(f"and {check.num_failed - _MAX_ERRORS:,} more", file=sys.stderr)
    print(f"{check.num_lines - check.num_failed:,} of {check.num_lines:,} lines can be answered")
    generates = check.task == "generate"
    generated = f", at most {check.max_completion_tokens:,} completion tokens" if generates else ""
    images = f"{check.num_images:,} image{'s' * (check.num_images != 1)}, " if check.num_images else ""
    print(f"{images}{check.num_prompt_tokens:,} prompt tokens{generated}")
    if check.parameters:
        names = ", ".join(check.parameters)
        print(f"columns that are parameters of their lines: {names} (--no-line-parameters makes them data)")
    if check.data:
        print(f"columns that answers repeat: {', '.join(check.data)}")
    if check.estimate is not None:
        tokens = "completion tokens" if generates else "prompt tokens"
        _print_estimate(check.estimate, check.num_lines - check.num_failed, tokens)


def _print_estimate(estimate: "Estimate", num_lines: int, tokens: str) -> None:
    """tokens: what the task counts."""
    sample = estimate.sample
    each = sample.num_completion_tokens / sample.num_lines
    speed = f"{sample.tokens_per_second:,.0f} tokens a second"
    lines = f"{sample.num_lines:,} line{'s' * (sample.num_lines > 1)}"
    print(f"a sample of {lines}: {each:,.1f} {tokens} each, {speed}")
    at_once = min(num_lines, sample.max_num_seqs)
    if sample.num_lines < at_once:
        option = " (--max-num-seqs)" if at_once == sample.max_num_seqs else ""
        print(f"    The job runs {at_once:,} lines at once{option}, which is faster than {sample.num_lines:,}.")
    price = "" if estimate.price is None else f", price {price_in_words(estimate.price)}"
    num_tokens = f"{estimate.num_completion_tokens:,.0f} {tokens}"
    print(f"the whole job: about {num_tokens}, {time_in_words(estimate.seconds)}{price}")
