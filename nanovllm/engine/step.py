"""Step: one forward pass, from `Scheduler.schedule` to `Scheduler.record`."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nanovllm.engine.runner.cuda_graphs import PLAIN_STEP, StepKind
from nanovllm.engine.sequence import Sequence

_POLL_SECONDS = 50e-6


@dataclass(eq=False)
class Step:
    """What a forward pass computes, its inputs, and what comes of it.

    The scheduler fills the first group, `ModelRunner.prepare` the second, `ModelRunner.launch` and `sample` the last. A
    worker gets it pickled, without the sequences. It unpacks into (seqs, is_prefill), as in nano-vLLM.
    """

    seqs: list[Sequence]  # in the order of their rows; empty on a worker
    is_prefill: bool  # otherwise one token for each sequence, in a mixed step also prompts
    num_prefilled: int = 0  # how many of seqs are prefilled: all in a prefill, the last ones in a mixed step
    num_tokens: int = 0  # as `LLMEngine.step` returns it

    num_sampled: int = 0  # A token is drawn for each of the first rows: of each sequence, or of a speculative step all.
    num_rows: int = 0  # rows that the layers compute, padding included
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # on the host, named as in `DecodeInputs`
    # Of a speculative step: what may follow each of seqs (speculation.suffix_index.Proposal) or None, and what its rows
    # are: each sequence, and after it a speculation.proposed_row.ProposedRow for each proposed token.
    proposals: list[Any] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    kind: StepKind = PLAIN_STEP  # of a decode step
    needs_logits: bool = False  # A request asks for more than a temperature: rank 0 samples from gathered logits.
    waits_for_tokens: bool = False  # The tokens that a request allows depend on the step before.
    # Of a decode step:
    graph_size: int = 0  # batch size of the CUDA graph that computes it; 0 for none
    buffer: int = -1  # rank 0: which host buffer of `DecodeInputs` holds the arrays
    # Of a mixed step: prompts begin with copies of snapshots, (slot, the sequence's own slot).
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    # Of a prefill:
    max_seqlen_q: int = 0  # most new tokens of a sequence
    max_seqlen_k: int = 0  # most keys of a sequence
    reads_cache: bool = False  # A sequence has a cached prefix.
    prompt_rows: list[tuple[int, int, int, int]] = field(default_factory=list)  # for `prompt_logprobs`

    # With needs_logits, on the device until the next step is launched: a row for each sequence, as the sampler wants.
    logits: torch.Tensor | None = None  # [num_sampled, vocab_size], any float dtype
    temperatures: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    fed_tokens: torch.Tensor | None = None  # int64, last tokens, which the host may not know yet; None in a prefill
    # On the way to the host; meaningful after `wait`.
    tokens: torch.Tensor = field(init=False)  # int64 [num_sampled]; meaningless where a prefill goes on
    event: torch.cuda.Event | None = None  # recorded behind them; None on a CPU
    logprobs: Any = None  # engine.sampling.logprobs.LogprobRows of the sampled tokens that ask for them
    prompt_logprobs: Any = None  # likewise, of prompt tokens

    def __iter__(self) -> Iterator[Any]:
        return iter((self.seqs, self.is_prefill))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"seqs": [], "proposals": [], "rows": [], "buffer": -1}

    def wait(self, check_workers: Callable[[], None] | None = None) -> list[int]:
        """The sampled tokens, once the device has computed them. check_workers: with several ranks, raises if one of
        them has died, for which the device would wait in vain."""
        if self.event is not None:
            while check_workers is not None and not self.event.query():
                check_workers()
                time.sleep(_POLL_SECONDS)  # The next step is under way already, so sleeping too long costs nothing.
            self.event.synchronize()
        return self.tokens.tolist()
