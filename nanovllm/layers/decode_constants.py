"""The launch constants of decode attention."""

from collections.abc import Callable
from typing import Any

from nanovllm.kernels.decode_plan import DecodeConfig
from nanovllm.tuning.table import Row, Table

_TABLE_KEY_BYTES = 256  # of the keys that the table is for; larger ones get smaller tiles
_SMALLEST_TILE = 16


class DecodeConstants:
    """A GPU's constants, from its table's setting "decode_attention". All depend on the number of rows x KV heads.

    `benchmarks/attention_decode.py --sweep` finds them.
    """

    def __init__(self, table: Table):
        def row(name: str, make: Callable[[Any], Any]) -> Row:
            values = table.setting("decode_attention", name)
            return Row({int(bound): [make(value)] for bound, value in values.items()})

        self._configs = row("configs", lambda constants: DecodeConfig(*constants))
        self._tma_configs = row("tma_configs", lambda constants: DecodeConfig(*constants))
        self._spare_programs = row("spare_programs", int)

    def config(self, num_rows: int, num_kv_heads: int, head_dim: int, itemsize: int, tma: bool) -> DecodeConfig:
        """Launch constants for keys of `head_dim` elements, multiplied as numbers of `itemsize` bytes (also where the
        cache has fewer). tma: whether the kernel may use the tensor memory accelerator."""
        if tma:
            return self._tma_configs[num_rows * num_kv_heads][0]
        config = self._configs[num_rows * num_kv_heads][0]
        padded_dim = 1 << (head_dim - 1).bit_length()
        tile = config.tile * _TABLE_KEY_BYTES // max(padded_dim * itemsize, _TABLE_KEY_BYTES)
        return config._replace(tile=max(_SMALLEST_TILE, tile))

    def num_pieces(self, num_rows: int, num_kv_heads: int) -> int:
        """Pieces of a step's plan; never fewer for a larger batch."""
        # Programs beyond one a row and KV head. More balance the load better, but each costs its start and a partial
        # result.
        spare = self._spare_programs[num_rows * num_kv_heads][0]
        return num_rows + -(-spare // num_kv_heads)
