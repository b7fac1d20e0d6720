"""Which part of a mixture's experts a tensor-parallel rank holds."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nanovllm.layers.formats.format import WeightFormat
from nanovllm.layers.parallel.tensor_parallel import TensorParallel

# The table's setting for which experts whole ones are the faster division: {the `Key.shape_name` of all experts' gate
# and up projection: the smallest number of ranks}. Without an entry they are divided by columns where that is possible.
WHOLE_EXPERTS = "whole_experts"


class ExpertShards(NamedTuple):
    """A rank's part of a layer's experts: some columns of every expert, or some experts with all of their columns.

    All ranks route all tokens. Each adds up what its part gives, and the sum over the ranks is the layer's output. So
    nothing else asks which of the two it is: a rank multiplies the experts that it holds, by the columns that it holds.

    Attributes:
        experts: those that the rank holds.
        columns: those of the intermediate size that it holds, of each.
        num_experts, num_columns: on all ranks together.
    """

    experts: range
    columns: range
    num_experts: int
    num_columns: int

    @property
    def mine(self) -> range | None:
        """The experts, or None for all."""
        return self.experts if len(self.experts) < self.num_experts else None

    @property
    def adds_down_bias(self) -> bool:
        """Whether the rank adds its experts' bias of the down projection: one rank does for each expert, or the sum
        would contain it several times."""
        return self.columns.start == 0

    def columns_of(self, num_columns: int) -> slice:
        """The rank's columns of a tensor of the checkpoint, in which one may stand for several, or for all."""
        first, end = (edge * num_columns // self.num_columns for edge in (self.columns.start, self.columns.stop))
        return slice(first, max(end, first + 1))

    @classmethod
    def by_columns(cls, num_experts: int, num_columns: int, tp: TensorParallel) -> "ExpertShards":
        """num_columns: a multiple of the number of ranks."""
        size = num_columns // tp.size
        return cls(range(num_experts), range(tp.rank * size, (tp.rank + 1) * size), num_experts, num_columns)

    @classmethod
    def by_experts(cls, num_experts: int, num_columns: int, tp: TensorParallel) -> "ExpertShards":
        """num_experts: a multiple of the number of ranks."""
        number = num_experts // tp.size
        return cls(range(tp.rank * number, (tp.rank + 1) * number), range(num_columns), num_experts, num_columns)


def divide_experts(
    num_experts: int,
    num_columns: int,
    size_name: str,
    tp: TensorParallel,
    format: WeightFormat,
    settings: Mapping[str, Mapping[str, Any]],
    shape_name: str,
) -> ExpertShards:
    """A rank's part: by whole experts where the columns cannot be divided, or where the table says so.

    Args:
        num_columns: the intermediate size of an expert, which config.json calls size_name.
        settings: the table's, of which WHOLE_EXPERTS is read.
        shape_name: see there.

    Raises:
        ValueError: the format cannot store such experts, or neither way works out. It names the size and the remedy.
    """
    format.check_sizes((), (size_name, num_columns), 1)
    sizes = num_experts, num_columns, tp
    can_be_whole = num_experts % tp.size == 0
    if can_be_whole and tp.size >= settings.get(WHOLE_EXPERTS, {}).get(shape_name, tp.size + 1):
        return ExpertShards.by_experts(*sizes)
    try:
        # Both are rows of one weight and columns of the other, whose multiple is the larger one.
        format.check_sizes((), (size_name, tp.shard(num_columns, size_name)), tp.size)
    except ValueError as error:
        if can_be_whole:
            return ExpertShards.by_experts(*sizes)
        raise ValueError(
            f"{error}; or use a tensor_parallel_size that divides the number of experts ({num_experts}): then each "
            "rank holds whole ones"
        ) from None
    return ExpertShards.by_columns(*sizes)
