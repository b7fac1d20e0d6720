"""SamplingParams: everything a request may ask for, checked where it is made."""

import sys
from dataclasses import dataclass

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Immutable, so that one object can serve many requests; `dataclasses.replace` makes a changed copy.

    Attributes:
        temperature: divides the logits before the softmax; 0 is greedy. Finite and >= 0.
        max_tokens: completion tokens at most, >= 1. The engine's longest sequence may end it earlier.
        ignore_eos: go on past end-of-sequence tokens (benchmarks use this).
        seed: makes this request's draws reproducible, whatever else is in the batch, in 0..2**63 - 1;
            None draws from the engine's own seed.

    Raises:
        ValueError: a value out of range, with the field, the value and what is allowed.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self):
        number = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if not number or not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature={self.temperature!r}: must be a finite number >= 0 (0 is greedy)")
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens!r}: must be an integer >= 1")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos={self.ignore_eos!r}: must be True or False")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED):
            raise ValueError(f"seed={self.seed!r}: must be None or an integer in 0..2**63 - 1")


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
