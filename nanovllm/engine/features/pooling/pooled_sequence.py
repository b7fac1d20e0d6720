"""PooledSequence: a prompt from which a vector is wanted and no token."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.request import Completion, Request
from nanovllm.engine.sequence import Sequence
from nanovllm.pooling_params import PoolingParams
from nanovllm.sampling_params import SamplingParams

# What the scheduler and the sampler read of such a request, which ends before its first token.
_NO_TOKENS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=0)


class Pool(NamedTuple):
    """How a vector is made of a prompt's hidden states; one tensor for all sequences of a step that have the same.

    Attributes:
        pooling: "last", "mean" or "cls".
        token_ids: the vector is the logits of these tokens; empty: what the model's head gives, or the hidden state
            itself where it has none, or one of the vocabulary.
    """

    pooling: str
    token_ids: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class PooledRequest(Request):
    """
    Attributes:
        pooling: as given.
        task: "embed", "classify" or "rerank".
        pool: how the vector is made.
        labels: the names of a classification head's logits.
    """

    params: SamplingParams = _NO_TOKENS
    pooling: PoolingParams = field(default_factory=PoolingParams)
    task: str = "embed"
    pool: Pool = Pool("last")  # noqa: RUF009 (immutable)
    labels: tuple[str, ...] = ()

    @property
    def asked(self) -> PoolingParams:
        return self.pooling


class PooledSequence(Sequence):
    """A sequence that ends with its prefill. Its answer is `completion.vector`, float32 [size], in place of tokens.

    Attributes:
        kept: of a prompt that is computed in chunks, what its vector needs of the tokens so far: float32 [hidden_size]
            on the device; None before the first chunk.
        on_its_way: the tensor on the host, and its row there, in which the vector arrives with its step.
    """

    request: PooledRequest

    def __init__(self, token_ids: Any, request: PooledRequest):
        num_tokens = len(token_ids)
        # The prefix cache may supply what precedes the first hidden state that is needed.
        first = num_tokens - 1 if request.pool.pooling == "last" else 0
        completion = Completion(first_needed_logits=first)
        super().__init__(token_ids, request.params, request, completion, 0)
        self.max_tokens = 0  # No block is reserved for a completion.
        self.is_plain = False
        self.kept: torch.Tensor | None = None
        self.on_its_way: tuple[torch.Tensor, int] | None = None

    @property
    def num_known_tokens(self) -> int:
        return self.num_tokens

    def append_pending(self, row: int) -> None:
        """No placeholder: the step in flight gives a vector and no token."""
        self.pending_row = row

    def resolve_pending(self, token_id: int) -> int:
        """Take the vector, which has arrived."""
        if self.on_its_way is None:
            raise RuntimeError("a step by hand gives no vectors: use add_request() and step_deltas()")
        vectors, row = self.on_its_way
        vector = vectors[row].numpy().astype(np.float32, copy=True)  # Not a view, which would keep the whole step's.
        if self.request.pool.pooling == "mean":
            vector /= np.float32(self.num_prompt_tokens)
        self.completion.vector = vector
        self.completion.finish_reason = "stop"
        self.drop_pending()
        return 0

    def drop_pending(self) -> None:
        self.pending_row, self.kept, self.on_its_way = -1, None, None

    def __reduce__(self) -> tuple[Any, ...]:
        return Sequence.__new__, (Sequence,), self.__getstate__()
