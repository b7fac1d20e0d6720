"""SamplingPipeline: from a step's logits to its tokens, where a request asks for more than a temperature."""

from collections.abc import Hashable, Mapping
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.features.logits.logprobs import LogprobRows
from nanovllm.engine.features.logits.proposed_row import ProposedRow, sampled_rows
from nanovllm.engine.features.logits.thinking import Thinking
from nanovllm.engine.runner.packed_arrays import send_arrays
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step, StepLogits
from nanovllm.kernels.sampling.sampling_thresholds import sampling_thresholds
from nanovllm.layers.sampler import Sampler
from nanovllm.layers.sampling.logprobs import token_logprobs
from nanovllm.layers.sampling.penalties import IN_PROMPT, apply_penalties
from nanovllm.layers.sampling.token_masks import allow, apply_bitmask, forbid, num_mask_words

if TYPE_CHECKING:
    from nanovllm.engine.features.logits.structured import Grammar

Sampled = Sequence | ProposedRow

_FEWEST_ROWS = 8  # of TokenCounts


class SamplingPipeline:
    """Samples a step's tokens. First come features, and then in transformers' order biases, penalties, masks,
    temperature, top-k, top-p, min-p.

    The sampler and its noise are those of plain steps, and a row's settings touch only that row: a sequence gets the
    same tokens whatever else is in the step. Nothing waits for the device.
    """

    def __init__(self, config: Config, device: torch.device):
        self.sampler = Sampler()
        self.vocab_size = config.hf_config.vocab_size
        self.eos = config.eos
        self.features = config.features
        self.reports_processed = config.logprobs_mode == "processed_logprobs"
        self.device = device
        self._counts = TokenCounts(self.vocab_size, config.max_decode_rows, self.device)

    def draw(self, step: Step) -> tuple[torch.Tensor, LogprobRows | None]:
        """Sample the step's tokens, int64 [num_sampled] on the device, and the log-probabilities that were asked for.
        NON_FINITE is the token of a row for which none is left (`Step.errors` says why). The host must know every
        token of a sequence with a grammar or bad words by now."""
        seqs = sampled_rows(step)
        arrays = self._host_arrays(step, seqs)
        device = send_arrays(arrays, self.device) if arrays else {}
        model_logits, temperatures, seeds, positions, fed_tokens, columns = cast(StepLogits, step.logits)
        logits, thresholds = model_logits, None
        for feature in self.features:
            if feature.is_used(step):
                own = {name: columns[name][: len(logits)] for name in feature.layout(len(logits))}
                logits = feature.edit_logits(logits, own)
        logits = self._edited(logits, fed_tokens, device)
        if "top_k" in device:
            truncation = (device[name] for name in ("top_k", "top_p", "min_p"))
            thresholds = sampling_thresholds(logits, temperatures, *truncation)
        tokens = self.sampler(logits, temperatures, seeds, positions, thresholds)
        if "reported" not in device:
            return tokens, None
        rows: torch.Tensor | slice = device["reported"]
        reported = arrays["reported"].tolist()
        wanted = [cast(int, seqs[row].request.params.logprobs) for row in reported]
        owners, num_top = dict(zip(reported, zip(repeat(1), wanted), strict=True)), max(wanted)
        if len(reported) == len(tokens):
            rows = slice(None)  # of all: a gather would copy all logits
        reported_logits = model_logits[rows]  # of the model's own distribution
        if self.reports_processed:
            reported_logits = logits[rows].float()
            if thresholds is not None:
                is_low = reported_logits < thresholds[rows].unsqueeze(1)
                reported_logits = reported_logits.masked_fill(is_low, -torch.inf)
            chosen = temperatures[rows].unsqueeze(1)
            reported_logits = reported_logits / torch.where(chosen > 0, chosen, 1.0)
        found = token_logprobs(reported_logits, tokens[rows], num_top, device.get("others"))
        num_others = {}
        if "others" in device:
            num_others = {row: len(ids) for row in reported if (ids := seqs[row].request.params.logprob_token_ids)}
        return tokens, LogprobRows(owners, *found, self.reports_processed, num_others)

    def _edited(
        self, logits: torch.Tensor, fed_tokens: torch.Tensor | None, device: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The logits after biases, penalties and masks; a float32 copy if there are any."""
        if not device.keys() & {"biases", "penalized", "masked", "forbidden"}:
            return logits
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if "biases" in device:
            logits.view(-1).index_add_(0, device["biased"], device["biases"])
        if "penalized" in device:
            if len(device["stale_rows"]):
                self._counts.write(device["stale_rows"], device["prompt_tokens"], device["completion_tokens"])
            if fed_tokens is not None and len(device["advanced"]):
                self._counts.advance(device["advanced_state_rows"], fed_tokens[device["advanced"]])
            state_rows, strengths = device["state_rows"], device["strengths"]
            apply_penalties(logits, device["penalized"], self._counts.state, state_rows, *strengths)
        if "masked" in device:
            apply_bitmask(logits, device["masked"], device["bitmask"])
        if "forbidden" in device:
            logits.view(-1).index_fill_(0, device["forbidden"], -torch.inf)
        return logits

    # -- what the device needs to know, as arrays of the host ----------------------------------------------------

    def _host_arrays(self, step: Step, seqs: list[Sampled]) -> dict[str, np.ndarray]:
        """seqs: `sampled_rows`. Rows are those of the step; biased and forbidden are places in the flat logits."""
        truncated, penalized, masked, reported = (list[int]() for _ in range(4))
        flat: dict[str, list[np.ndarray]] = {"biased": [], "biases": [], "forbidden": []}
        thoughts: dict[int, Thinking] = {}
        for row, seq in enumerate(seqs):
            # No token is sampled for a prefill that goes on, or for a sequence that has ended meanwhile.
            params, thinking = seq.request.params, seq.completion.thinking
            if params.is_plain and thinking is None:
                continue
            if seq.num_cached_tokens + seq.num_scheduled_tokens < seq.num_tokens:
                continue
            if params.logprobs is not None:
                reported.append(row)
            if thinking is not None:
                thinking = thoughts[row] = thinking.at(seq)
                if thinking.forced(seq) is not None:
                    masked.append(row)
                    continue
            if params.draws_plainly:
                continue
            edits, first = seq.request.logit_edits, row * self.vocab_size
            if params.truncates:
                truncated.append(row)
            if params.penalizes:
                penalized.append(row)
            if edits is not None and len(edits.biases):
                flat["biased"].append(edits.bias_tokens + first)
                flat["biases"].append(edits.biases)
            thinks = thinking is not None and thinking.is_on  # A form begins later.
            has_form = seq.completion.grammar is not None
            if (has_form and not thinks) or (edits is not None and edits.needs_mask):
                masked.append(row)
                continue
            forbidden = []
            if has_form and thinks:
                forbidden.append(np.array(self._before_form(thinking), np.int64))
            if edits is not None:
                forbidden.append(edits.banned)
                forbidden.append(np.array(edits.completing(seq.token_ids, seq.num_completion_tokens), np.int64))
            if params.min_tokens and _is_too_short(seq):
                forbidden.append(np.array(self._ends(seq), np.int64))
            if not forbidden:
                continue
            flat["forbidden"] += [tokens + first for tokens in forbidden]
            if sum(map(len, forbidden)) >= self.vocab_size and len(set(np.concatenate(forbidden))) == self.vocab_size:
                text = "no token is left to draw: bad_words and min_tokens, which keeps away the ends, exclude all"
                step.errors[row] = text
        arrays = {name: np.concatenate(values) for name, values in flat.items() if values}
        if reported:
            arrays["reported"] = np.array(reported, np.int64)
            others = [seqs[row].request.params.logprob_token_ids or () for row in reported]
            if any(others):
                arrays["others"] = np.zeros((len(reported), max(map(len, others))), np.int64)
                for entry, wanted in zip(arrays["others"], others, strict=True):
                    entry[: len(wanted)] = wanted
        if truncated:
            truncations = [seqs[row].request.params for row in truncated]
            for name, off, dtype in (("top_k", 0, np.int32), ("top_p", 1, np.float32), ("min_p", 0, np.float32)):
                arrays[name] = np.full(len(seqs), off, dtype)
                arrays[name][truncated] = list(map(attrgetter(name), truncations))
        if penalized:
            arrays |= self._penalty_arrays(seqs, penalized, step.is_prefill)
        if masked:
            arrays |= self._mask_arrays(seqs, masked, thoughts, step.errors)
        return arrays

    def _penalty_arrays(self, seqs: list[Sampled], rows: list[int], is_prefill: bool) -> dict[str, np.ndarray]:
        """Rows of the counts; for those that are written anew, each token's place in the flat counts."""
        penalized = [seqs[row] for row in rows]
        assigned, current = self._counts.assign({seq.seq_id: seq.num_tokens for seq in penalized})
        penalized_rows, state_rows = np.array(rows, np.int64), np.array(assigned, np.int64)
        # What a row of a proposed token had counted before may have been rejected.
        is_current = np.array(current) & (not is_prefill) & [not isinstance(seq, ProposedRow) for seq in penalized]
        prompt_tokens, completion_tokens = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for i in np.flatnonzero(~is_current).tolist():
            tokens = np.frombuffer(penalized[i].token_ids, np.int32) + state_rows[i] * self.vocab_size
            prompt_tokens.append(tokens[: penalized[i].num_prompt_tokens])
            completion_tokens.append(tokens[penalized[i].num_prompt_tokens :])
        params = [seq.request.params for seq in penalized]
        strengths = [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in params]
        return {
            "penalized": penalized_rows,
            "state_rows": state_rows,
            "stale_rows": state_rows[~is_current],
            "prompt_tokens": np.concatenate(prompt_tokens),
            "completion_tokens": np.concatenate(completion_tokens),
            "advanced": penalized_rows[is_current],
            "advanced_state_rows": state_rows[is_current],
            "strengths": np.array(strengths, np.float32).T,
        }

    def _mask_arrays(
        self, seqs: list[Sampled], rows: list[int], thoughts: dict[int, Thinking], errors: dict[int, str]
    ) -> dict[str, np.ndarray]:
        """thoughts: of the rows whose sequences have a `Thinking`."""
        bitmask = np.full((len(rows), num_mask_words(self.vocab_size)), -1, np.int32)
        grammars = []
        for i, row in enumerate(rows):
            seq, grammar, thinking = seqs[row], seqs[row].completion.grammar, thoughts.get(row)
            if thinking is not None and (thinking.is_on or thinking.forced(seq) is not None):
                continue
            if grammar is not None:
                length = seq.num_tokens - (seq.num_prompt_tokens if thinking is None else thinking.answer_start)
                fault = grammar.advance(seq.token_ids, length)
                if fault is not None:
                    errors[row] = f"structured_outputs: the form cannot be followed any further: {fault}"
                if isinstance(seq, ProposedRow):  # Its sequence goes on from before the proposed tokens.
                    _fill_masks([(grammar, i, row)], bitmask, errors)
                    grammar.rewind(min(seq.num_proposed, length))
                else:
                    grammars.append((grammar, i, row))
        if grammars:
            _fill_masks(grammars, bitmask, errors)
        for mask, row in zip(bitmask, rows, strict=True):
            if row in thoughts and self._follow(thoughts[row], seqs[row], mask):
                continue
            fault = self._narrow(mask, seqs[row])
            if fault is not None:
                errors.setdefault(row, fault)
            if row in errors:
                mask.fill(0)  # The sampler finds no token, which ends the sequence.
        return {"masked": np.array(rows, np.int64), "bitmask": bitmask}

    def _follow(self, thinking: Thinking, seq: Sampled, mask: np.ndarray) -> bool:
        """What the thinking makes of a mask. Returns whether its end is forced, so that nothing else counts."""
        token = thinking.forced(seq)
        if token is not None:
            mask.fill(0)
            allow(mask, token)
            return True
        if seq.completion.grammar is not None:
            if thinking.is_on:
                forbid(mask, self._before_form(thinking))
            elif thinking.opening_id is not None:
                allow(mask, thinking.opening_id)
        return False

    def _before_form(self, thinking: Thinking) -> list[int]:
        """What may not come while a model thinks whose answer has a form: an end, and a form's first text together with
        the end of the thinking."""
        return [token for token in self.eos if token < self.vocab_size] + thinking.before_form()

    def _narrow(self, mask: np.ndarray, seq: Sampled) -> str | None:
        """Remove from a mask what the request forbids. Returns why nothing is left, if so."""
        edits = seq.request.logit_edits
        if edits is not None:
            mask &= edits.mask
            forbid(mask, edits.completing(seq.token_ids, seq.num_completion_tokens))
        if mask.any() and _is_too_short(seq):
            forbid(mask, self._ends(seq))
            if not mask.any():
                limit, num_tokens = seq.request.params.min_tokens, seq.num_completion_tokens
                return f"min_tokens={limit}: after {num_tokens} tokens nothing but an end may follow"
        if mask.any():
            return None
        return "no token is left to draw: structured_outputs, allowed_token_ids and bad_words exclude all of them"

    def _ends(self, seq: Sampled) -> list[int]:
        return [token for token in {*self.eos, *seq.request.params.stop_token_ids} if token < self.vocab_size]


def _fill_masks(grammars: list[tuple["Grammar", int, int]], bitmask: np.ndarray, errors: dict[int, str]) -> None:
    """grammars: each with its place in the bitmask, and its row of the step."""
    grammars[0][0].grammars.fill_masks([(grammar, i) for grammar, i, _ in grammars], bitmask)
    for grammar, i, row in grammars:
        if grammar.is_stuck(bitmask[i]):
            errors.setdefault(row, "structured_outputs: no text that begins like this one has the form")


def _is_too_short(seq: Sampled) -> bool:
    return seq.num_completion_tokens < seq.request.params.min_tokens


class TokenCounts:
    """The state for `layers.sampling.penalties.apply_penalties`: int32 [rows, vocab_size], a row a penalized sequence.

    A sequence keeps its row from step to step until another one needs it. A lost row is written anew from the host's
    tokens. So nobody needs to say when a sequence ends, and there are never more rows than a step has sequences.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device):
        self.state = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._max_rows = max_rows
        self._free: list[int] = []
        self._rows: dict[Hashable, tuple[int, int]] = {}  # owner -> (row, tokens in it), least recently used first

    def assign(self, lengths: Mapping[Hashable, int]) -> tuple[list[int], list[bool]]:
        """Give each owner of a step a row, in order, and count its newest token as being in it. lengths: {owner: its
        number of tokens}. Returns the rows, and for each whether the newest token is all that it lacks: then call
        `advance`, else `write`."""
        known = {owner: self._rows.pop(owner) for owner in lengths if owner in self._rows}
        size, vocab_size = self.state.shape
        if len(lengths) > size:
            grown = min(self._max_rows, max(_FEWEST_ROWS, 1 << (len(lengths) - 1).bit_length()))
            self.state = torch.cat((self.state, self.state.new_zeros(grown - size, vocab_size)))
            self._free += range(size, grown)
        while len(self._free) < len(lengths) - len(known):
            row, _ = self._rows.pop(next(iter(self._rows)))
            self._free.append(row)
        rows, is_current = [], []
        for owner, length in lengths.items():
            row, num_counted = known[owner] if owner in known else (self._free.pop(), -1)
            rows.append(row)
            is_current.append(num_counted == length - 1)
            self._rows[owner] = row, length
        return rows, is_current

    def write(self, rows: torch.Tensor, prompt: torch.Tensor, completion: torch.Tensor) -> None:
        """Write rows anew. prompt, completion: int64, row * vocab_size + token for each of their tokens."""
        self.state.index_fill_(0, rows, 0)
        state = self.state.view(-1)
        state.index_fill_(0, prompt, IN_PROMPT)
        state.index_add_(0, completion, torch.ones_like(completion, dtype=torch.int32))

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one token in each of these distinct rows. Both int64 [owners]."""
        at = rows * self.state.shape[1] + tokens
        self.state.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
