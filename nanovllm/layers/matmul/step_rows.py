"""How many rows a mixed step has: a setting of the table, by the shape and format of a layer's gate and up projection.

"mixed_step_rows": {`Key.shape_name`: rows of a mixed step}; 0 where mixed steps gain nothing.
"""

from nanovllm.layers.matmul.table import Key, Table, nearest


def mixed_step_rows(table: Table, key: Key) -> int:
    """The rows for this shape, otherwise for the nearest shape of its format; 0 if there is none."""
    settings = table.settings.get("mixed_step_rows", {})
    found = nearest(key, [key.with_shape(name) for name in settings])
    return 0 if found is None else settings[found.shape_name]
