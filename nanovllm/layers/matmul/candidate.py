"""Candidate: one way to compute products. A file in `candidates` each."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.all_formats import format_of_table
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.matmul.table import Key


class Candidate(ABC):
    """One way to compute products."""

    name: ClassVar[str]  # in tables
    operations: ClassVar[tuple[str, ...]]  # of `problem.OPERATIONS`
    formats: ClassVar[tuple[str, ...]]  # the names of the weight formats that it multiplies
    is_default: ClassVar[bool] = False  # whether it computes what no row of the table names, without constants
    # Whether as a default it computes prefills that are too short to be measured. Else they take decode steps' choices.
    suits_short_prefills: ClassVar[bool] = True
    posts_sums: ClassVar[bool] = False  # whether it can write a linear_sum to the other ranks' memory itself
    is_batch_invariant: ClassVar[bool] = False  # whether no row's bits depend on the other rows
    adds_more: ClassVar[bool] = False  # whether it adds `more` of an `ExpertsProblem`; others are given none
    # Whether its linear_add is a product, and then a sum in a launch of its own.
    adds_apart: ClassVar[bool] = False
    # Whether its constants in decode steps are useless for other shapes of a weight.
    suits_one_shape: ClassVar[bool] = False

    @classmethod
    def is_for(cls, key: Key) -> bool:
        """Whether it has this operation and this format, on some machine."""
        return key.operation in cls.operations and format_of_table(key.format).name in cls.formats

    def supports(self, key: Key, weight: Weight) -> bool:
        """Whether it computes this product on this machine. Asked once for each layer and phase."""
        return self.is_for(key)

    @abstractmethod
    def launch(self, problem: Any, constants: tuple) -> Tensor | Gated | None:
        """The result of a product that it supports, of a linear_silu perhaps before its activation. None if it cannot
        compute it from these tensors, or failed, and another candidate must. constants: from the table."""

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        """The table's constants, cut to the shared memory of the weight's GPU, which may not be the one that they were
        measured on. None if they cannot be."""
        return constants

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        """Constants that are worth a trial for a product on a GPU of this size; none if the candidate does not
        compute the product. top_k: experts of a token, 1 without experts."""
        yield from ()
