"""PooledSteps: prefills whose hidden states make vectors, beside those whose logits make tokens."""

from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from nanovllm.engine.features.logits.logit_steps import LogitSteps
from nanovllm.engine.features.pooling.pooled_sequence import Pool, PooledSequence
from nanovllm.engine.runner.sampled_tokens import send_tokens, start_copy
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.kernels.sampling.sampler import NON_FINITE
from nanovllm.utils.context import Context


class _PooledRows(NamedTuple):
    """What all ranks know of a step with pooled sequences: how their vectors are made, and whether there are other
    sequences beside them."""

    pools: tuple[Pool, ...]
    has_others: bool


class PooledSteps(LogitSteps):
    """LogitSteps that also make vectors.

    A vector is of the hidden states after the final norm. Of a prompt that is computed in chunks, a sequence keeps on
    the device what its vector needs of the earlier ones: so chunks change nothing. A step in which all sequences are
    pooled has no logits, and draws nothing.
    """

    _is_finite: Tensor | None = None  # bool [num_seqs], of such a step, between its two halves

    def rows_of_prompts(self, step):
        rows = super().rows_of_prompts(step)
        if not step.is_prefill:
            return rows
        pooled = [seq for seq in step.seqs if isinstance(seq, PooledSequence)]
        if not pooled:
            return rows
        pools = tuple(sorted({seq.request.pool for seq in pooled}))
        rows["pooled rows"] = _PooledRows(pools, len(pooled) < len(step.seqs))
        # They have no log-probabilities, though their hidden states must be computed.
        rows["prompt rows"] = [row for row in rows["prompt rows"] if not isinstance(step.seqs[row[0]], PooledSequence)]
        return rows

    def take(self, step, inputs):
        self._is_finite = None
        rows = step.extras.get("pooled rows")
        if rows is None:
            super().take(step, inputs)
            return
        context = inputs.context
        needs_all = bool(step.extras["prompt rows"]) or any(pool.pooling != "last" for pool in rows.pools)
        if needs_all:
            hidden_states = self._hidden_states(inputs._replace(context=replace(context, last_tokens=None)))
            last = hidden_states[context.last_tokens]
        else:
            hidden_states = last = self._hidden_states(inputs)
        vectors = {pool: self._pool(pool, step, hidden_states, last, context) for pool in rows.pools}
        if rows.has_others:
            self.take_logits(step, inputs, hidden_states, last)
        if self._draws:
            self._hand_out(step, vectors, is_alone=not rows.has_others)
        self._num_sampled = step.num_sampled

    def _pool(self, pool: Pool, step: Step, hidden_states: Tensor, last: Tensor, context: Context) -> Tensor:
        """A float32 row for each of the step's sequences, of its tokens in this step. For a mean it is a sum, of the
        tokens so far, to which `hidden_scale` is yet to come."""
        model = self._model
        if pool.token_ids:
            logits = self._full_logits(last)
            # Not by a list of indices, which would be copied to the device, and waited for.
            return torch.stack([logits[:, token] for token in pool.token_ids], dim=1).float()
        if model.lm_head is None:
            last = model.compute_logits(last)  # Of a model without any head, these are the hidden states themselves.
        if pool.pooling == "last":
            return last.float() * model.hidden_scale
        starts = cast(Tensor, context.cu_seqlens_q).long()
        if pool.pooling == "cls":
            return hidden_states[starts[:-1]].float() * model.hidden_scale
        # A sum goes on with the next token. So its order, and its bits, do not depend on where chunks end.
        begun = self._begun(pool, step) if self._draws else []
        rows = hidden_states.to(torch.float32, copy=bool(begun))
        for first, sum_so_far in begun:
            rows[first] += sum_so_far
        # Its checks would wait for the device.
        return torch.segment_reduce(rows, "sum", offsets=starts, axis=0, unsafe=True)

    @staticmethod
    def _begun(pool: Pool, step: Step) -> list[tuple[int, Tensor]]:
        """The first rows of sequences with earlier chunks, and what they kept."""
        firsts = zip(step.arrays["cu_seqlens_q"].tolist(), step.seqs, strict=False)  # one more for the end of the last
        found = [(first, _kept(seq)) for first, seq in firsts if getattr(seq.request, "pool", None) == pool]
        return [(first, kept) for first, kept in found if kept is not None]

    def _hand_out(self, step: Step, vectors: dict[Pool, Tensor], is_alone: bool) -> None:
        """Let the sequences that end have their vectors, and the others keep what they need of them."""
        ending = []
        for i, seq in enumerate(step.seqs):
            if not isinstance(seq, PooledSequence):
                continue
            pool, own = seq.request.pool, vectors[seq.request.pool][i]
            if pool.pooling == "cls" and (kept := _kept(seq)) is not None:
                own.copy_(kept)
            if seq.num_cached_tokens + seq.num_scheduled_tokens < seq.num_tokens:
                seq.kept = own.clone() if pool.pooling != "last" else None
            else:
                ending.append((i, seq))
        if is_alone:
            finite = torch.stack([each.isfinite().all(dim=1) for each in vectors.values()])
            self._is_finite = finite.all(dim=0)
        for pool, each in vectors.items():
            if pool.pooling == "mean":
                each *= self._model.hidden_scale
        on_host = {pool: start_copy(each) for pool, each in vectors.items()}
        for i, seq in ending:
            seq.on_its_way = on_host[seq.request.pool], i

    def sample(self, step):
        """A step of pooled sequences alone has no tokens, except to say of which the vector cannot be used."""
        rows = None if step is None else step.extras.get("pooled rows")
        if rows is None or rows.has_others:
            super().sample(step)
            return
        if self._is_finite is not None:
            tokens = torch.where(self._is_finite, 0, NON_FINITE)
            send_tokens(step, tokens, self._inputs.tokens_on_host(self._num_sampled))
            self._is_finite = None


def _kept(seq: Sequence) -> Tensor | None:
    """What a sequence has kept of earlier chunks; None before the first one. A preempted one begins again."""
    return seq.kept if isinstance(seq, PooledSequence) and seq.num_cached_tokens else None
