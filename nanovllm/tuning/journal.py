"""What a run of `nanovllm tune` has measured so far, on the disk: a run that was stopped goes on from there."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from xxhash import xxh64_hexdigest

from nanovllm.layers.matmul.table import choice_of, listed
from nanovllm.tuning.tuner import Result
from nanovllm.utils.optional_packages import kernel_cache


class Journal:
    """A file of JSON lines, one for each number of tokens. It belongs to a model's products on one GPU, with versions
    and candidates as they are: another run finds nothing of it."""

    def __init__(self, facts: Any):
        """facts: all that measurements depend on, with a `repr` that says it."""
        self.path = Path(kernel_cache("tuning"), f"{xxh64_hexdigest(repr(facts).encode())}.jsonl")

    def read(self) -> dict[tuple[str, int], Result]:
        """(phase, number of tokens) -> result. A line that a kill cut off is left out."""
        results = {}
        with suppress(FileNotFoundError):
            for line in self.path.read_text().splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    choices = [[choice_of(choice) for choice in each] for each in entry["choices"]]
                    key = entry["phase"], entry["tokens"]
                    results[key] = Result(choices, float(entry["micros"]), bool(entry["is_new"]))
        return results

    def add(self, phase: str, num_tokens: int, result: Result) -> None:
        """It is on the disk when this returns. Raises OSError."""
        choices = [[listed(choice) for choice in each] for each in result.choices]
        entry = {"phase": phase, "tokens": num_tokens, **result._asdict(), "choices": choices}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            # A line of its own, also after one that was cut off.
            file.write(("\n" if file.tell() else "") + json.dumps(entry))
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
