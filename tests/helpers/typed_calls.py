"""Calls that mypy reads and nobody runs: a wrong option of LLM is an error before the script starts.

Each `type: ignore` is needed: mypy complains of one that ignores nothing (warn_unused_ignores in pyproject.toml).
"""

from pathlib import Path

from nanovllm import LLM


def right() -> None:
    LLM("model", max_num_seqs=8, dtype="float32", eos=[1, 2])
    with LLM(Path("model"), max_model_len=None, tokenizer=Path("tokenizer")) as llm:
        llm.generate("a")


def wrong() -> None:
    LLM("model", max_num_sqs=8)  # type: ignore[call-arg]
    LLM("model", max_num_seqs="8")  # type: ignore[arg-type]
