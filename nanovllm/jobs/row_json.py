"""Rows of output as lines of JSON. Their vectors are written by themselves: of a row's time they take nearly all."""

import numpy as np

from nanovllm.jobs.lines import Row
from nanovllm.utils.text_json import to_json
from nanovllm.utils.vector_json import numbers_json, packed


def row_json(row: Row, packs_vectors: bool = False) -> str:
    """
    Args:
        row: its values may be vectors, float16 or float32 [size], which come last.
        packs_vectors: write each as the base64 of its bytes, for a part that will be Parquet.

    Raises ValueError for a vector with NaN or infinity.
    """
    vectors = {name: value for name, value in row.items() if isinstance(value, np.ndarray)}
    if not vectors:
        return to_json(row)
    for name, vector in vectors.items():
        if not np.isfinite(vector).all():
            raise ValueError(f"{name}: holds NaN or infinity, or numbers that are too large for {vector.dtype}")
    if packs_vectors:
        return to_json({name: packed(value) if name in vectors else value for name, value in row.items()})
    text = to_json({name: value for name, value in row.items() if name not in vectors})
    ends = "".join(f', "{name}": {numbers_json(vector)}' for name, vector in vectors.items())
    return f"{text[:-1]}{ends}}}"
