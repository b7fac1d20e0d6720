"""Feature: what requests may ask for beside the engine's own options."""

from typing import Any

import numpy as np
from torch import Tensor

from nanovllm.engine.features.columns import Columns
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Rows, Step


class Feature(Columns):
    """Changes the logits from which the tokens of some requests are sampled, by what those requests say.

    Hand it to the engine, and ask for it in a request:

        class Warmer(Feature):
            option = "warmer"

            def layout(self, max_rows):
                return {"warmer": ((max_rows,), np.float32)}

            def write(self, step, rows, host, num_rows):
                return self.fill("warmer", rows, host, [self.value(seq, 1.0) for seq in step.seqs])

            def prefill(self, step, rows):
                return {"warmer": np.array([self.value(seq, 1.0) for seq in step.seqs], np.float32)}

            def edit_logits(self, logits, columns):
                return logits / columns["warmer"].unsqueeze(1)

        llm = LLM(model, features=[Warmer()])
        llm.generate(prompts, SamplingParams(extra_args={"warmer": 2.0}))

    Every rank gets a copy, pickled with the engine's options: so the class must be one that another process can
    import. Rank 0 samples, so its copy alone edits logits. Steps in which no request asks for the feature do not call
    it. The others end at their logits, in CUDA graphs of their own, which are captured when they are first needed.

    Attributes:
        option: the key of `SamplingParams.extra_args` that asks for it.
        is_batch_invariant: whether a row's bits depend neither on the other rows nor on their number; an engine with
            `deterministic=True` refuses other features.
    """

    option: str
    is_batch_invariant = False

    def check(self, value: object) -> None:
        """Raises ValueError or TypeError if a request cannot ask for this value of the option."""

    def value(self, seq: Sequence, default: object = None) -> Any:
        """What a sequence's request asks for; default if it does not ask. A worker that is given a step by hand knows
        no requests, and needs none."""
        request = getattr(seq, "request", None)
        return default if request is None else dict(request.params.extra_args).get(self.option, default)

    def is_used(self, step: Step) -> bool:
        return step.needs_logits and any(self.value(seq, self) is not self for seq in step.seqs)

    def fill(self, name: str, rows: Rows, host: dict[str, np.ndarray], values: list) -> dict[str, np.ndarray]:
        """Give each sampled row its sequence's value, for `write`. values: one for each sequence."""
        host[name][: rows.num_sampled] = rows.of_sequences(values)
        return {name: host[name][: rows.num_sampled]}

    def edit_logits(self, logits: Tensor, columns: dict[str, Tensor]) -> Tensor:
        """The logits to sample from.

        Args:
            logits: [num_sampled, vocab_size], any float dtype; not to be changed in place, because a graph owns them.
            columns: the first num_sampled rows of each of its arrays, on the device.
        """
        return logits
