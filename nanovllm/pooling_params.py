"""PoolingParams: what a request asks for that wants a vector and no text."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nanovllm.utils.option_hints import HINTS, explains_unknown_options
from nanovllm.utils.rules import FLAG, Rule, check_rules, integer, one_of, option

Pooling = Literal["auto", "last", "mean", "cls"]
PoolingTask = Literal["auto", "embed", "classify", "rerank"]
MAX_DIMENSIONS = 2**31 - 1


def _as_python(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _converted(rule: Rule) -> Rule:
    return rule._replace(convert=_as_python)


@explains_unknown_options(HINTS["PoolingParams"])
@dataclass(frozen=True)
class PoolingParams:
    """What a request asks for that ends with its prompt: an embedding, scores of classes, or a rank. For
    `LLM.add_request`; `LLM.embed`, `classify` and `rerank` make them.

    Immutable, so that one object can serve many requests.

    Raises:
        ValueError: a value that no model has, with the field, the value and what is allowed. Whether the engine's model
            can do it is checked when the request is added.
        TypeError: an unknown keyword, with what to use instead.
    """

    # Of which tokens the hidden states make the vector: the last one, the mean of all, or the first one (cls). auto:
    # what the model's files say, else last.
    pooling: Pooling = option("auto", one_of("auto", "last", "mean", "cls"))
    normalize: bool = option(True, _converted(FLAG))  # scale an embedding to length 1
    # The first numbers of an embedding alone, which are normalized after the cut (Matryoshka, arXiv:2205.13147).
    dimensions: int | None = option(
        None, _converted(integer(1, MAX_DIMENSIONS, "an integer in 1..the model's hidden_size, or None", none=True))
    )
    # auto: what the engine is for: classes with a classification head, else an embedding.
    task: PoolingTask = option("auto", one_of("auto", "embed", "classify", "rerank"))

    def __post_init__(self) -> None:
        check_rules(self)
