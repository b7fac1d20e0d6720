"""The launch constants of decode attention."""

import torch

from nanovllm.kernels.attention.decode_plan import DecodeConfig, num_lanes
from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Table, speed_name

_DEFAULT_GROUP, _DEFAULT_KEY_BYTES = "128 bfloat16", 256
_SMALLEST_TILE = 16
_MOST_WARPS = 4  # of a program that computes a group of rows


class DecodeConstants:
    """Constants for keys of one kind on one GPU, by the number of rows x KV heads.

    The table's setting "decode_attention" has a group of them for a head_dim and a dtype of the cache, measured with
    models of 16 bits. Others share the group of head_dim 128 in bfloat16, with smaller tiles if their keys, in the
    model's dtype, have more bytes. `benchmarks/attention_decode.py --sweep` measures a group.
    """

    def __init__(self, table: Table, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype):
        """dtype: of the model; cache_dtype: also that, or float8_e4m3fn."""
        groups = table.settings["decode_attention"]
        group, shrink = groups.get(f"{head_dim} {speed_name(cache_dtype)}"), 1
        if group is None or dtype == torch.float32:
            group = groups[_DEFAULT_GROUP]
            padded_dim = 1 << (head_dim - 1).bit_length()
            shrink = max(1, padded_dim * dtype.itemsize // _DEFAULT_KEY_BYTES)
        self._configs = Row({int(rows): [_config(x, shrink)] for rows, x in group["configs"].items()})
        self._tma_configs = Row({int(rows): [DecodeConfig(*x)] for rows, x in group["tma_configs"].items()})
        self._spare_programs = Row({int(rows): [spare] for rows, spare in group["spare_programs"].items()})

    def config(self, num_rows: int, num_kv_heads: int, tma: bool) -> DecodeConfig:
        """tma: whether the kernel may use the tensor memory accelerator."""
        return (self._tma_configs if tma else self._configs)[num_rows * num_kv_heads][0]

    def group_config(
        self, num_rows: int, num_heads: int, num_kv_heads: int, tma: bool, group_rows: int
    ) -> DecodeConfig:
        """`config` of a speculative step of num_rows rows in groups of group_rows: that of one row for each group.
        A warp gets no more lanes than it has there, where possible: with more, registers spill."""
        config, group = self.config(-(-num_rows // group_rows), num_kv_heads, tma), num_heads // num_kv_heads
        more = num_lanes(group * group_rows, config.tma) // num_lanes(group, config.tma)
        return config._replace(num_warps=max(config.num_warps, min(config.num_warps * more, _MOST_WARPS)))

    def spare_programs(self, num_rows: int, num_kv_heads: int) -> int:
        """Programs beyond one a row and KV head. More balance the load better, but each costs its start and a partial
        result."""
        return self._spare_programs[num_rows * num_kv_heads][0]

    def num_pieces(self, num_rows: int, num_kv_heads: int) -> int:
        """Pieces of a step's plan; never fewer for a larger batch."""
        return num_rows + -(-self.spare_programs(num_rows, num_kv_heads) // num_kv_heads)


def _config(constants: list, shrink: int) -> DecodeConfig:
    config = DecodeConfig(*constants)
    return config._replace(tile=max(_SMALLEST_TILE, config.tile // shrink))
