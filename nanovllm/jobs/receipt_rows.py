"""The rows of a job's folder with their receipts."""

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from nanovllm.jobs.inputs import require_pyarrow
from nanovllm.jobs.lines import Row, from_json
from nanovllm.jobs.receipts import RECEIPT, check_receipt
from nanovllm.jobs.shown_rows import is_of_openai
from nanovllm.utils.file_errors import names_file
from nanovllm.utils.text_json import parse_json


def num_rows(part: Path) -> int:
    if part.suffix == ".parquet":
        with _open_parquet(part) as rows:
            return rows.metadata.num_rows
    with names_file(part), open(part, "rb") as file:
        return sum(raw.endswith(b"\n") for raw in file)


def rows_with_receipts(counts: dict[Path, int], wanted: Container[int]) -> Iterator[tuple[Row, Row]]:
    """The answers at these places of a job with their receipts. counts: rows of each part. Raises ValueError for one
    without a receipt, or with a damaged one."""
    first = 0
    for part, size in counts.items():
        places = {place for place in range(size) if first + place in wanted}
        for row in _parquet_rows(part, places) if part.suffix == ".parquet" else _json_rows(part, places):
            try:
                yield row, _receipt_of(row)
            except ValueError as error:
                raise ValueError(f"{part}: line {id_of(row)!r} {error}") from None
        first += size


def _receipt_of(row: Row) -> Row:
    """Raises ValueError, which says what is wrong with the row."""
    receipt = row.get(RECEIPT)
    if receipt is None:
        raise ValueError("has no receipt")
    try:
        if isinstance(receipt, str):
            receipt = parse_json(receipt)
        check_receipt(receipt)
    except (TypeError, ValueError) as error:
        raise ValueError(f"has a damaged receipt: it {error}") from None
    return receipt


def id_of(row: Row) -> Any:
    return row.get("custom_id" if is_of_openai(row) else "id")


def _json_rows(part: Path, places: set[int]) -> Iterator[Row]:
    with names_file(part), open(part, "rb") as file:
        for place, raw in enumerate(file):
            if place in places:
                try:
                    yield from_json(raw)
                except ValueError as error:
                    raise ValueError(f"{part}:{place + 1}: {error}") from None


def _open_parquet(part: Path) -> Any:
    """Raises ImportError without pyarrow."""
    require_pyarrow()
    from pyarrow.parquet import ParquetFile

    return ParquetFile(part)


def _parquet_rows(part: Path, places: set[int]) -> Iterator[Row]:
    first = 0
    with _open_parquet(part) as rows:
        for batch in rows.iter_batches():
            for place in range(batch.num_rows):
                if first + place in places:
                    yield batch.slice(place, 1).to_pylist()[0]
            first += batch.num_rows
