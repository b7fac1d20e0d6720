"""AddedNumber: a feature made outside the package, in a module of its own, so that other ranks' processes find it."""

import numpy as np

from nanovllm.engine.features.feature import Feature


class AddedNumber(Feature):
    """Adds a number to the logits of all even tokens: SamplingParams(extra_args={"added": 3.0})."""

    option = "added"

    def __init__(self):
        self.num_steps = 0  # that it has edited

    def check(self, value):
        if not isinstance(value, float):
            raise ValueError(f"added={value!r}: must be a float")

    def layout(self, max_rows):
        return {"added": ((max_rows,), np.float32)}

    def write(self, step, rows, host, num_rows):
        return self.fill("added", rows, host, self._numbers(step))

    def prefill(self, step, rows):
        return {"added": np.array(self._numbers(step), np.float32)}

    def _numbers(self, step):
        return [self.value(seq, 0.0) for seq in step.seqs]

    def edit_logits(self, logits, columns):
        self.num_steps += 1
        edited = logits.clone()
        edited[:, ::2] += columns["added"].unsqueeze(1).to(logits.dtype)
        return edited
