"""Blob columns in Arrow terms: where they are in a schema, and what stands in their place.

Lance reads a blob column as descriptors, which say where the bytes are. Here each blob, alone or
inside a struct, is replaced by its bytes, or by a struct that names it so that it can be opened
later. Both encodings are known: large binary with a mark in the field's metadata, and the
extension type of Lance.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_lance_stream.permutation import Int64Array

if TYPE_CHECKING:
    import lance

Blobs = Literal["bytes", "lazy"]
"""What is read of a blob: all of it, or only where it is."""

NAME_TYPE = pa.struct(
    [
        ("table", pa.string()),
        ("version", pa.int64()),
        ("files", pa.string()),
        ("column", pa.string()),
        ("row", pa.int64()),
        ("size", pa.int64()),
    ]
)
"""What names one blob: URI and version of the table and a hash of the names of its files, path of
the column, number of the row among the live rows, and bytes, null where only opening the blob
tells (a whole external file)."""

_EXTENSION = "lance.blob.v2"  # type of blob columns since storage version 2.2
_MARK = b"lance-encoding:blob"  # metadata of those before
_EXTERNAL = 3  # kind of a blob that is, or is part of, a file outside of the table


def is_blob(field: pa.Field) -> bool:
    """Whether the values of a field of a Lance schema are blobs."""
    if getattr(field.type, "extension_name", None) == _EXTENSION:
        return True
    return (field.metadata or {}).get(_MARK) == b"true"


def holds_blobs(field: pa.Field) -> bool:
    """Whether a field is a blob or a struct with one in it, at any depth."""
    if is_blob(field) or not pa.types.is_struct(field.type):
        return is_blob(field)
    return any(holds_blobs(child) for child in field.type)


def blob_in_list(field: pa.Field) -> bool:
    """Whether a field has blobs inside a list or map, which Lance cannot read by row."""
    if is_blob(field) or field.type.num_fields == 0:
        return False
    children = [field.type.field(i) for i in range(field.type.num_fields)]
    if pa.types.is_struct(field.type):
        return any(blob_in_list(child) for child in children)
    return any(holds_blobs(child) or blob_in_list(child) for child in children)


def given_out(field: pa.Field, blobs: Blobs) -> pa.Field:
    """A field of a Lance schema with the types that its blobs are given out as."""
    if is_blob(field):
        return field.with_type(pa.large_binary() if blobs == "bytes" else NAME_TYPE)
    if not holds_blobs(field):
        return field
    return field.with_type(pa.struct([given_out(child, blobs) for child in field.type]))


def replaced(
    column: pa.Array, field: pa.Field, path: str, make: Callable[[str, pa.Array], pa.Array]
) -> pa.Array:
    """A column as Lance takes it, with other values for its blobs.

    Args:
        column: values of `field`, blobs as descriptors.
        field: a field of the table.
        path: its name; that of a field in a struct is ``"struct.field"``.
        make: makes an array of the same length of a path and the descriptors there.
    """
    if is_blob(field):
        return make(path, column)
    if not holds_blobs(field):
        return column
    children = [
        replaced(column.field(i), child, f"{path}.{child.name}", make)
        for i, child in enumerate(field.type)
    ]
    fields = [child.with_type(a.type) for child, a in zip(field.type, children, strict=True)]
    return pa.StructArray.from_arrays(children, fields=fields, mask=pc.is_null(column))


def names(
    table: tuple[str, int, str], column: str, rows: Int64Array, descriptors: pa.StructArray
) -> pa.StructArray:
    """What names the blobs of some rows: an array of `NAME_TYPE`, null where the blob is null.

    Args:
        table: URI, version and hash of the files of the table.
        column: path of the blob column.
        rows: numbers of the rows among the live rows, int64, shape ``(n,)``.
        descriptors: what Lance takes of these rows.
    """
    size = descriptors.field("size").cast(pa.int64())
    is_null = pc.is_null(descriptors)
    if descriptors.type.get_field_index("kind") < 0:
        # Storage version 2.0 has no nulls in structs: a null blob is "0 bytes at position 1".
        marks = pc.and_(pc.equal(descriptors.field("position"), 1), pc.equal(size, 0))
        is_null = pc.or_(is_null, pc.fill_null(marks, False))
    else:
        is_whole_file = pc.and_(pc.equal(descriptors.field("kind"), _EXTERNAL), pc.equal(size, 0))
        size = pc.if_else(is_whole_file, pa.scalar(None, pa.int64()), size)
    same = [pa.repeat(value, len(rows)) for value in (*table, column)]
    children = [*same, pa.array(rows), size]
    return pa.StructArray.from_arrays(children, fields=list(NAME_TYPE), mask=is_null)


def must_be_scanned(table: "lance.LanceDataset") -> bool:
    """Whether only a scan finds the blobs of an open table.

    Lance 14 looks for the bytes of the first encoding in the table itself, even where a branch or
    a clone shares the files of another one, unless it scans.
    """
    files = (file for fragment in table.get_fragments() for file in fragment.metadata.files)
    return any(
        file.base_id is not None and (file.file_major_version, file.file_minor_version) < (2, 2)
        for file in files
    )


def scanned(table: "lance.LanceDataset", column: str, offsets: Int64Array) -> pa.Array:
    """Blobs by offset, in the order given, as large binary, by a scan of each run of them."""
    rows, back = np.unique(offsets, return_inverse=True)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    parts = [
        table.scanner(
            columns=[column], offset=int(run[0]), limit=run.size, blob_handling="all_binary"
        ).to_table()
        for run in runs
    ]
    found = pa.concat_tables(parts).column(0).combine_chunks()
    return found.take(pa.array(back)).cast(pa.large_binary())


def large_binary(values: Sequence[bytes | None]) -> pa.Array:
    """An array of these values; a single one, which may be very large, is not copied."""
    data = b"".join([value or b"" for value in values])
    ends = np.cumsum([0, *(len(value or b"") for value in values)], dtype=np.int64)
    is_valid = pa.array([value is not None for value in values], pa.bool_())
    buffers = [is_valid.buffers()[1], pa.py_buffer(ends), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def sizes_of_rows(rows: pa.Table) -> list[int]:
    """Bytes of the blobs that each row of a table names; unknown ones count as none."""
    total = np.zeros(rows.num_rows, dtype=np.int64)
    for column in rows.combine_chunks().columns:
        for chunk in column.chunks:
            total += _sizes(chunk)
    return total.tolist()  # type: ignore[no-any-return]


def _sizes(column: pa.Array) -> Int64Array:
    if column.type == NAME_TYPE:
        known = pc.if_else(column.is_valid(), column.field("size"), None)
        found: Int64Array = pc.fill_null(known, 0).to_numpy(zero_copy_only=False)
        return found
    total = np.zeros(len(column), dtype=np.int64)
    if pa.types.is_struct(column.type):
        for i in range(column.type.num_fields):
            total += _sizes(column.field(i))
    return total
