"""Script: a feature that makes the engine write given tokens, so that a random checkpoint holds a conversation."""

import numpy as np
import torch

from nanovllm.engine.features.feature import Feature


class Script(Feature):
    """SamplingParams(extra_args={"script": token ids}): they are the only ones with a probability, each in its turn.
    The last one comes again and again."""

    option = "script"

    def check(self, value):
        if not isinstance(value, list) or not all(isinstance(token, int) for token in value) or not value:
            raise ValueError(f"script={value!r}: must be a list of token ids")

    def layout(self, max_rows):
        return {"script": ((max_rows,), np.int64)}

    def write(self, step, rows, host, num_rows):
        n = rows.num_sampled
        host["script"][:n] = self._tokens(step, rows.owners[:n], rows.positions[:n])
        return {"script": host["script"][:n]}

    def prefill(self, step, rows):
        return {"script": self._tokens(step, rows.owners[rows.heads], rows.positions[rows.heads])}

    def _tokens(self, step, owners, positions):
        tokens = []
        for owner, position in zip(owners, positions, strict=True):
            seq = step.seqs[owner]
            script = self.value(seq, [-1])
            tokens.append(script[min(max(position + 1 - seq.num_prompt_tokens, 0), len(script) - 1)])
        return np.array(tokens, np.int64)

    def edit_logits(self, logits, columns):
        tokens = columns["script"][: len(logits)].unsqueeze(1)
        ids = torch.arange(logits.shape[1], device=logits.device)
        return logits.masked_fill((tokens >= 0) & (ids != tokens), -torch.inf)
