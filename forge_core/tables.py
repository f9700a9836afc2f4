"""Rows of files at any fsspec URI, one after the other: a file is never in memory as a whole."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal

import fsspec

Row = dict[str, Any]
Format = Literal["auto", "jsonl", "csv", "parquet", "arrow"]

BATCH_ROWS = 1000
_SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def read_rows(path: str, format: Format = "auto") -> Iterator[tuple[str, Row]]:
    """Rows with their places ("data/a.csv:17"), of one file or of all that a pattern with * matches, sorted by name.

    JSON lines and CSV may be compressed (.gz, .bz2, .xz, .zst). Raises FileNotFoundError when nothing matches, and
    ValueError with the place of a row that cannot be read.
    """
    # Without this, a pattern that matches nothing opens a file of that name.
    files = fsspec.open_files(path, "rb", compression="infer", expand=True)
    if not files:
        raise FileNotFoundError(f"{path} matches no file; check the path")
    for opened in files:
        read = _READERS[_format_of(opened.path, format)]
        with opened as file:
            for number, row in enumerate(read(file, opened.path), start=1):
                if not isinstance(row, dict):
                    raise ValueError(f"{opened.path}:{number} is {type(row).__name__}; a row must be an object")
                yield f"{opened.path}:{number}", row


def pick(row: Row, field: str, place: str) -> Any:
    """The value at a dotted path ("extra.solution.text", "choices.0"); raises ValueError naming place and fields."""
    value: Any = row
    for part in field.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = None
            break
    if value is None or value == "":
        raise ValueError(f"{place} has no {field!r}; its fields are {', '.join(row)}")
    return value


def _format_of(path: str, format: Format) -> str:
    if format != "auto":
        return format
    name = PurePosixPath(path)
    suffix = PurePosixPath(name.stem).suffix if name.suffix in _COMPRESSED else name.suffix
    if suffix not in _SUFFIXES:
        raise ValueError(f"{path} has no known ending ({', '.join(_SUFFIXES)}); set format")
    return _SUFFIXES[suffix]


def _json_lines(file: BinaryIO, path: str) -> Iterator[Row]:
    for number, line in enumerate(io.TextIOWrapper(file, "utf-8"), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number} is not JSON: {error}") from error


def _csv(file: BinaryIO, path: str) -> Iterator[Row]:
    yield from csv.DictReader(io.TextIOWrapper(file, "utf-8", newline=""))


def _parquet(file: BinaryIO, path: str) -> Iterator[Row]:
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(file).iter_batches(batch_size=BATCH_ROWS):
        yield from batch.to_pylist()


def _arrow(file: BinaryIO, path: str) -> Iterator[Row]:
    import pyarrow as pa

    try:
        batches = pa.ipc.open_stream(file)  # what the datasets library writes
    except pa.ArrowInvalid:
        file.seek(0)
        stored = pa.ipc.open_file(file)
        batches = (stored.get_batch(index) for index in range(stored.num_record_batches))
    for batch in batches:
        yield from batch.to_pylist()


_READERS: dict[str, Callable[[BinaryIO, str], Iterator[Row]]] = {
    "jsonl": _json_lines,
    "csv": _csv,
    "parquet": _parquet,
    "arrow": _arrow,
}
