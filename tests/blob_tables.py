"""Tables with blob columns in every encoding, for the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

ENCODINGS = ("2.0", "2.1", "2.2")
"""Storage versions: the first two mark large binary as a blob, the last has a type for it."""

CASE_26 = [b"foo", b"", None, b"\x00\x01", b"m" * (1 << 20)]
VALUES = [*CASE_26, b"inline", None, b"p" * 100_000, b"", b"\x00", b"d" * (5 << 20), b"last"]
"""Small, empty, null and large: storage version 2.2 has its own place for each size."""


def blob_field(name: str, encoding: str) -> pa.Field:
    if encoding == "2.2":
        return lance.blob_field(name)
    return pa.field(name, pa.large_binary(), metadata={"lance-encoding:blob": "true"})


def blob_array(values: Sequence[Any], encoding: str) -> pa.Array:
    return lance.blob_array(list(values)) if encoding == "2.2" else pa.array(values, "large_binary")


def blob_data(encoding: str, start: int = 0, **columns: Sequence[Any]) -> pa.Table:
    """A table of `id`, from `start` on, and blob columns."""
    rows = len(next(iter(columns.values())))
    fields = [pa.field("id", pa.int64()), *(blob_field(name, encoding) for name in columns)]
    arrays = [blob_array(values, encoding) for values in columns.values()]
    ids = pa.array(range(start, start + rows), pa.int64())
    return pa.table([ids, *arrays], schema=pa.schema(fields))


def blob_table(path: Path, encoding: str, rows_per_file: int = 4, **columns: Any) -> str:
    """Write `blob_data` and return the path; a value of bool goes to `write_dataset`."""
    options = {name: columns.pop(name) for name in list(columns) if columns[name] in (True, False)}
    data = blob_data(encoding, **columns)
    lance.write_dataset(
        data,
        str(path),
        data_storage_version=encoding,
        max_rows_per_file=rows_per_file,
        **options,
    )
    return str(path)


def struct_table(path: Path, encoding: str) -> tuple[str, list[Any]]:
    """A table of `id` and a struct `s` of a blob and a number, and the values of `s`."""
    blobs, numbers = [b"a", None, b"", b"dd", b"e" * 70_000], [1, 2, 3, 4, None]
    fields = [blob_field("blob", encoding), pa.field("n", pa.int64())]
    mask = pa.array([False, False, False, encoding != "2.0", False])  # 2.0 has no null structs
    arrays = [blob_array(blobs, encoding), pa.array(numbers)]
    structs = pa.StructArray.from_arrays(arrays, fields=fields, mask=mask)
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("s", structs.type)])
    data = pa.table([pa.array(range(5)), structs], schema=schema)
    lance.write_dataset(data, str(path), data_storage_version=encoding, max_rows_per_file=3)
    values: list[Any] = [{"blob": b, "n": n} for b, n in zip(blobs, numbers, strict=True)]
    if encoding != "2.0":
        values[3] = None
    return str(path), values
