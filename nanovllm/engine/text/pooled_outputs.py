"""What callers get of a request that asks for a vector."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from nanovllm.engine.features.pooling.pooled_sequence import PooledSequence
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.text.outputs import ClassOutput, EmbeddingOutput, RankOutput, as_result
from nanovllm.engine.text.results import Results

_TINY = np.float32(1e-12)  # A vector of zeros stays one.
_NOT_FINITE = (
    "the model's hidden states for the prompt hold NaN or infinity: its weights are damaged, or overflow in this "
    "dtype; check the checkpoint's files, or try dtype='float32'"
)
# What each task's result has beside the counts.
_KEYS = {"embed": ("embedding",), "classify": ("logits", "probs", "label"), "rerank": ("relevance_score",)}


def pooled_output(seq: PooledSequence) -> EmbeddingOutput | ClassOutput | RankOutput:
    """The result of a sequence that has finished, or been aborted."""
    completion, request = seq.completion, seq.request
    values: dict[str, Any] = dict.fromkeys(_KEYS[request.task])
    if completion.finish_reason == "stop":
        values = _READERS[request.task](seq)
    values["num_prompt_tokens"] = seq.num_prompt_tokens
    values["num_cached_tokens"] = max(completion.num_shared_tokens, 0)
    if completion.finish_reason != "stop":
        values["error"] = "aborted" if completion.finish_reason == "abort" else _NOT_FINITE
    return cast(EmbeddingOutput, as_result(values))


def pooled_error(task: str, error: Exception) -> dict[str, Any]:
    """The result of a request that was not served."""
    counts = {"num_prompt_tokens": 0, "num_cached_tokens": 0, "error": str(error)}
    return as_result(dict.fromkeys(_KEYS[task]) | counts)


def _embedding(seq: PooledSequence) -> dict[str, Any]:
    asked = seq.request.pooling
    vector = seq.completion.vector[: asked.dimensions]
    if asked.normalize:
        vector = vector / max(np.linalg.norm(vector), _TINY)
    elif asked.dimensions is not None:
        vector = vector.copy()
    return {"embedding": vector}


def _classes(seq: PooledSequence) -> dict[str, Any]:
    logits = seq.completion.vector
    probs = _sigmoid(logits)
    if len(logits) > 1:
        powers = np.exp(logits - logits.max())
        probs = powers / powers.sum()
    return {"logits": logits, "probs": probs, "label": seq.request.labels[int(logits.argmax())]}


def _rank(seq: PooledSequence) -> dict[str, Any]:
    """The sigmoid of the one label, or the probability of "yes" beside "no": their softmax is a sigmoid too."""
    vector = seq.completion.vector
    logit = vector[0] if len(vector) == 1 else vector[1] - vector[0]
    return {"relevance_score": float(_sigmoid(logit))}


def _sigmoid(logits: Any) -> Any:
    """Without an overflow of exp."""
    powers = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1, powers) / (1 + powers)


_READERS: dict[str, Callable[[PooledSequence], dict[str, Any]]] = {
    "embed": _embedding,
    "classify": _classes,
    "rerank": _rank,
}


def first_output(samples: list[Sequence]) -> Any:
    return pooled_output(cast(PooledSequence, samples[0]))


class PooledResults(Results):
    """Results of requests that ask for vectors."""

    make_output = staticmethod(first_output)

    def __init__(self, task: str, requests: Any = ()):
        self.make_error = lambda error: pooled_error(task, error)
        super().__init__(requests)
