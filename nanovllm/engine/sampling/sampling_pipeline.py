"""SamplingPipeline: from a step's logits to its tokens, where a request asks for more than a temperature."""

from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.runner.packed_arrays import send_arrays
from nanovllm.engine.sampling.logprobs import LogprobRows, StepLogprobs
from nanovllm.engine.sampling.structured import fill_masks
from nanovllm.engine.sampling.token_counts import TokenCounts
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logprobs import token_logprobs
from nanovllm.layers.penalties import apply_penalties
from nanovllm.layers.sampler import Sampler
from nanovllm.layers.sampling_thresholds import sampling_thresholds
from nanovllm.layers.token_masks import apply_bitmask, forbid, num_mask_words


class Forward(NamedTuple):
    """A step whose logits are computed and whose tokens are still to be drawn. Tensors have a row a sequence.

    Attributes:
        seqs: its sequences.
        is_prefill: whether they are prefilled.
        logits: [num_seqs, vocab_size], any float dtype; read, as the others are, before the next step is launched.
        temperatures, seeds, positions: as Sampler takes them.
        fed_tokens: int64: each sequence's last token, wherever it comes from; None in a prefill.
        prompts: log-probabilities of prompt tokens, where a sequence asks for them.
    """

    seqs: list[Sequence]
    is_prefill: bool
    logits: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    fed_tokens: torch.Tensor | None = None
    prompts: LogprobRows | None = None


class _Wishes:
    """Which rows of a step ask for what; row numbers in order."""

    def __init__(self, seqs: list[Sequence]):
        self.truncated: list[int] = []
        self.biased: list[int] = []
        self.penalized: list[int] = []
        self.constrained: list[int] = []  # by a grammar
        self.masked: list[int] = []  # others of which few tokens are allowed
        self.limited: list[int] = []  # others of which few tokens are forbidden
        self.reported: list[int] = []
        for row, seq in enumerate(seqs):
            # Neither a prefill that goes on nor a sequence that has ended meanwhile draws a token.
            if seq.is_plain or seq.num_cached_tokens + seq.num_scheduled_tokens < seq.num_tokens:
                continue
            params = seq.params
            if params.truncates:
                self.truncated.append(row)
            if params.penalizes:
                self.penalized.append(row)
            edits = seq.logit_edits
            if edits is not None and len(edits.biases):
                self.biased.append(row)
            if seq.grammar is not None:
                self.constrained.append(row)
            elif edits is not None and edits.needs_mask:
                self.masked.append(row)
            elif edits is not None or _is_too_short(seq):
                self.limited.append(row)
            if params.logprobs is not None:
                self.reported.append(row)


def _is_too_short(seq: Sequence) -> bool:
    return seq.num_completion_tokens < seq.params.min_tokens


class SamplingPipeline:
    """Draws a step's tokens: biases, penalties, masks, then in transformers' order temperature, top-k, top-p and min-p,
    and the race.

    The race and its noise are the plain path's, and a row's settings touch that row alone: a sequence draws the same
    tokens whoever shares the step. All of it is launched without waiting for the device.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, eos: tuple[int, ...], device: torch.device):
        """eos: the tokens, besides a request's stop_token_ids, that min_tokens keeps away."""
        self.sampler = Sampler()
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.eos = eos
        self.device = device
        self._counts: TokenCounts | None = None

    def draw(self, forward: Forward) -> tuple[torch.Tensor, StepLogprobs | None]:
        """int64 [num_seqs] on the device, and the log-probabilities that were asked for. Every token of a constrained
        sequence must be known by now. One for which no token is left has NON_FINITE, and its `error` says why."""
        seqs = forward.seqs
        wishes = _Wishes(seqs)
        arrays: dict[str, np.ndarray] = {}
        if wishes.truncated:
            arrays |= self._truncation_arrays(seqs, wishes.truncated)
        if wishes.penalized:
            arrays |= self._penalty_arrays(seqs, wishes.penalized, forward.is_prefill)
        if wishes.biased:
            arrays |= self._bias_arrays(seqs, wishes.biased)
        if wishes.constrained or wishes.masked:
            arrays |= self._mask_arrays(seqs, wishes.constrained, wishes.masked)
        if wishes.limited:
            arrays["forbidden"] = self._forbidden_places(seqs, wishes.limited)
        if wishes.reported:
            arrays["reported"] = np.array(wishes.reported, np.int64)
        device = send_arrays(arrays, self.device) if arrays else {}

        logits, thresholds = self._edited(forward, device), None
        if wishes.truncated:
            truncation = (device[name] for name in ("top_k", "top_p", "min_p"))
            thresholds = sampling_thresholds(logits, forward.temperatures, *truncation)
        tokens = self.sampler(logits, forward.temperatures, forward.seeds, forward.positions, thresholds)
        return tokens, self._logprobs(forward, tokens, wishes.reported, device)

    def _edited(self, forward: Forward, device: dict[str, torch.Tensor]) -> torch.Tensor:
        """The logits with what biases, penalties and masks make of them; a float32 copy where there are any."""
        logits = forward.logits
        if not device.keys() & {"biases", "penalized", "masked", "forbidden"}:
            return logits
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if "biases" in device:
            logits.view(-1).index_add_(0, device["biased_places"], device["biases"])
        if "penalized" in device:
            rows, state_rows = device["penalized"], device["state_rows"]
            if len(device["stale_rows"]):
                self._counts.write(device["stale_rows"], device["prompt_tokens"], device["completion_tokens"])
            if len(device["advanced"]):
                advanced = device["advanced"]
                self._counts.advance(device["advanced_state_rows"], forward.fed_tokens[advanced])
            strengths = (device[name] for name in ("presence", "frequency", "repetition"))
            apply_penalties(logits, rows, self._counts.state, state_rows, *strengths)
        if "masked" in device:
            apply_bitmask(logits, device["masked"], device["bitmask"])
        if "forbidden" in device:
            logits.view(-1).index_fill_(0, device["forbidden"], -torch.inf)
        return logits

    def _logprobs(
        self, forward: Forward, tokens: torch.Tensor, reported: list[int], device: dict[str, torch.Tensor]
    ) -> StepLogprobs | None:
        """Those of the model's own distribution, whatever was done to the logits since."""
        if not reported:
            return StepLogprobs(prompts=forward.prompts) if forward.prompts else None
        rows = device["reported"]
        num_top = max(forward.seqs[row].params.logprobs for row in reported)
        owners = {row: (i, i + 1) for i, row in enumerate(reported)}
        sampled = LogprobRows(owners, *token_logprobs(forward.logits[rows], tokens[rows], num_top))
        return StepLogprobs(sampled, forward.prompts)

    # -- what the device needs to know, as arrays of the host ----------------------------------------------------

    @staticmethod
    def _truncation_arrays(seqs: list[Sequence], rows: list[int]) -> dict[str, np.ndarray]:
        top_k = np.zeros(len(seqs), np.int32)
        top_p = np.ones(len(seqs), np.float32)
        min_p = np.zeros(len(seqs), np.float32)
        params = [seqs[row].params for row in rows]
        top_k[rows] = [p.top_k for p in params]
        top_p[rows] = [p.top_p for p in params]
        min_p[rows] = [p.min_p for p in params]
        return {"top_k": top_k, "top_p": top_p, "min_p": min_p}

    def _penalty_arrays(self, seqs: list[Sequence], rows: list[int], is_prefill: bool) -> dict[str, np.ndarray]:
        """Rows of the counts; for those that are to be written anew, each token's place in them."""
        if self._counts is None:
            self._counts = TokenCounts(self.vocab_size, self.max_num_seqs, self.device)
        penalized = [seqs[row] for row in rows]
        state_rows, is_current = self._counts.assign({seq.seq_id: seq.num_tokens for seq in penalized})
        stale_rows, advanced, advanced_state_rows = [], [], []
        prompt_tokens, completion_tokens = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for row, seq, state_row, current in zip(rows, penalized, state_rows, is_current, strict=True):
            if current and not is_prefill:
                advanced.append(row)
                advanced_state_rows.append(state_row)
                continue
            tokens = np.frombuffer(seq.tokens, np.int32) + np.int64(state_row * self.vocab_size)
            stale_rows.append(state_row)
            prompt_tokens.append(tokens[: seq.num_prompt_tokens])
            completion_tokens.append(tokens[seq.num_prompt_tokens :])
        params = [seq.params for seq in penalized]
        return {
            "penalized": np.array(rows, np.int64),
            "state_rows": np.array(state_rows, np.int64),
            "stale_rows": np.array(stale_rows, np.int64),
            "prompt_tokens": np.concatenate(prompt_tokens),
            "completion_tokens": np.concatenate(completion_tokens),
            "advanced": np.array(advanced, np.int64),
            "advanced_state_rows": np.array(advanced_state_rows, np.int64),
            "presence": np.array([p.presence_penalty for p in params], np.float32),
            "frequency": np.array([p.frequency_penalty for p in params], np.float32),
            "repetition": np.array([p.repetition_penalty for p in params], np.float32),
        }

    def _bias_arrays(self, seqs: list[Sequence], rows: list[int]) -> dict[str, np.ndarray]:
        """What is added to the logits, and the places, in the flat logits, that it is added to."""
        places = [seqs[row].logit_edits.bias_tokens + row * self.vocab_size for row in rows]
        biases = [seqs[row].logit_edits.biases for row in rows]
        return {"biased_places": np.concatenate(places), "biases": np.concatenate(biases)}

    def _mask_arrays(self, seqs: list[Sequence], constrained: list[int], others: list[int]) -> dict[str, np.ndarray]:
        """Rows of the logits, and the tokens that each may draw."""
        rows = constrained + others
        bitmask = np.full((len(rows), num_mask_words(self.vocab_size)), -1, np.int32)
        for row in constrained:
            seq = seqs[row]
            fault = seq.grammar.advance(seq.tokens, seq.num_completion_tokens)
            if fault is not None:
                seq.error = f"structured_outputs: the form cannot be followed any further: {fault}"
        fill_masks([seqs[row].grammar for row in constrained], bitmask[: len(constrained)])
        for mask, row in zip(bitmask, rows, strict=True):
            self._narrow(mask, seqs[row])
            if seqs[row].error is not None:
                mask.fill(0)  # The sampler finds no token, and so the sequence ends.
        return {"masked": np.array(rows, np.int64), "bitmask": bitmask}

    def _narrow(self, mask: np.ndarray, seq: Sequence) -> None:
        """Take out of a mask what the request forbids. Where nothing is left, the sequence has an error."""
        edits = seq.logit_edits
        if edits is not None:
            mask &= edits.mask
            forbid(mask, edits.completing(seq.tokens, seq.num_completion_tokens))
        if mask.any() and _is_too_short(seq):
            forbid(mask, self._ends(seq))
            if not mask.any():
                seq.error = seq.error or (
                    f"min_tokens={seq.params.min_tokens}: after {seq.num_completion_tokens} tokens nothing but an end "
                    "may follow"
                )
        if not mask.any():
            seq.error = seq.error or (
                "no token is left to draw: structured_outputs, allowed_token_ids and bad_words exclude all of them"
            )

    def _forbidden_places(self, seqs: list[Sequence], rows: list[int]) -> np.ndarray:
        """The places, in the flat logits, of the tokens that bad words and min_tokens forbid."""
        places = []
        for row in rows:
            seq, first = seqs[row], row * self.vocab_size
            if _is_too_short(seq):
                places.append(np.array(self._ends(seq), np.int64) + first)
            if seq.logit_edits is not None:
                places.append(seq.logit_edits.banned + first)
                completing = seq.logit_edits.completing(seq.tokens, seq.num_completion_tokens)
                places.append(np.array(completing, np.int64) + first)
        return np.concatenate(places)

    def _ends(self, seq: Sequence) -> list[int]:
        """The tokens that could end the sequence, those that the model has."""
        return [token for token in {*self.eos, *seq.params.stop_token_ids} if token < self.vocab_size]
