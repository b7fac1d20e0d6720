"""How many rows a step has: two settings of the table, by the shape and format of a layer's gate and up projection.

- "mixed_step_rows": {`Key.shape_name`: rows of a mixed step}; 0 where mixed steps gain nothing.
- "padding": {`Key.shape_name`: {most sequences: [rows, candidate]}}. A decode step of up to so many sequences is padded
  to these rows. A candidate is named where it alone gains by it; then it has to compute the products. [] pads nothing.
"""

from collections.abc import Callable

from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Key, Table, nearest


def mixed_step_rows(table: Table, key: Key) -> int:
    """That of this shape, otherwise of the nearest one in the same format; 0 if there is none."""
    settings = table.settings.get("mixed_step_rows", {})
    found = nearest(key, [key.with_shape(name) for name in settings])
    return 0 if found is None else settings[found.shape_name]


def padded_rows(table: Table, key: Key, num_seqs: int, serves: Callable[[str], bool]) -> int:
    """The rows of a decode step of num_seqs, padding included. A shape without a setting pads nothing. serves: of a
    candidate's name, whether it computes the products."""
    buckets = table.settings.get("padding", {}).get(key.shape_name)
    if not buckets:
        return num_seqs
    row = Row({int(bound): [padding] for bound, padding in buckets.items()})
    ((num_rows, *candidates),) = row[num_seqs] if row[num_seqs][0] else ((num_seqs,),)
    return max(num_rows, num_seqs) if all(map(serves, candidates)) else num_seqs
