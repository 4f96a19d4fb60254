"""What Lance knows of a table without reading its rows: fragments, sizes, tags, indices."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_lance_stream.lance_errors import reason_of
from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.stored import StoredTable
from hf_lance_stream.table import Table

_BLOBS = b"lance-encoding:blob"  # of which the data files count descriptors only


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """An index of a table.

    Attributes:
        name: its name.
        kind: its type, such as "BTree".
        columns: the columns it is on.
        rows: rows that it covers.
    """

    name: str
    kind: str
    columns: tuple[str, ...]
    rows: int


@dataclass(frozen=True, kw_only=True)
class TableFacts:
    """A version of a table.

    Attributes:
        fragment_rows: live rows of each fragment, int64, shape ``(fragments,)``.
        deleted_rows: rows that are deleted but still in the files.
        data_files: number of data files.
        data_bytes: bytes of all data files; None if the manifest does not say.
        column_bytes: bytes of each column in the data files, deleted rows included; None where
            the files do not say, as for blobs and in files of Lance's first format.
        storage_version: version of the file format.
        has_stable_row_ids: whether row ids outlive a compaction.
        latest_version: the latest version of the table.
        tags: the version of each tag, after its branch and a colon if it is on one.
        branches: names of the branches.
        indices: the indices.
    """

    fragment_rows: Int64Array
    deleted_rows: int
    data_files: int
    data_bytes: int | None
    column_bytes: dict[str, int | None]
    storage_version: str
    has_stable_row_ids: bool
    latest_version: int
    tags: dict[str, str]
    branches: tuple[str, ...]
    indices: tuple[Index, ...]


def facts_of(table: StoredTable) -> TableFacts:
    """Gather them: from manifests, the footers of the data files and descriptions of indices.

    Raises:
        ValueError: a server has the table, and does not show its files.
        OSError: one of these cannot be read.
    """
    if not isinstance(table, Table):
        raise ValueError(
            f"{table.name} is read by LanceDB, which does not show the files of a table: use "
            "`plan` for its rows, or inspect the table where its files are"
        )
    try:
        return _facts_of(table)
    except (ValueError, OSError) as error:
        raise OSError(f"could not inspect {table.name}: {reason_of(error)}") from error


def _facts_of(table: Table) -> TableFacts:
    handle = table.handle
    fragments = [fragment.metadata for fragment in handle.get_fragments()]
    sizes = [file.file_size_bytes for fragment in fragments for file in fragment.files]
    return TableFacts(
        fragment_rows=table.fragment_rows,
        deleted_rows=int(handle.stats.dataset_stats()["num_deleted_rows"]),
        data_files=len(sizes),
        data_bytes=None if None in sizes else sum(sizes),
        column_bytes=_column_bytes(handle),
        storage_version=str(handle.data_storage_version),
        has_stable_row_ids=bool(handle.has_stable_row_ids),
        latest_version=int(handle.latest_version),
        tags={name: _place(tag) for name, tag in sorted(handle.tags.list().items())},
        branches=tuple(sorted(handle.branches.list())),
        indices=tuple(_index(found) for found in handle.describe_indices()),
    )


def _column_bytes(handle: Any) -> dict[str, int | None]:
    if str(handle.data_storage_version).startswith("0."):
        return dict.fromkeys(handle.schema.names)
    by_id = {field.id: field.bytes_on_disk for field in handle.stats.data_stats().fields}
    return {
        field.name(): None
        if _has_blobs(handle.schema.field(field.name()))
        else sum(by_id.get(number, 0) for number in _ids(field))
        for field in handle.lance_schema.fields()
    }


def _ids(field: Any) -> Iterator[int]:
    """Ids of a field of Lance's schema and of all below it."""
    yield field.id()
    for child in field.children():
        yield from _ids(child)


def _has_blobs(field: Any) -> bool:
    """Whether an Arrow field, or one below it, holds blobs."""
    if _BLOBS in (field.metadata or {}):
        return True
    if getattr(field.type, "extension_name", "").startswith("lance.blob"):
        return True
    return any(_has_blobs(field.type.field(i)) for i in range(field.type.num_fields))


def _place(tag: dict[str, Any]) -> str:
    branch = tag.get("branch")
    return f"{branch}:{tag['version']}" if branch else str(tag["version"])


def _index(found: Any) -> Index:
    return Index(
        name=found.name,
        kind=found.index_type,
        columns=tuple(found.field_names),
        rows=int(found.num_rows_indexed),
    )
