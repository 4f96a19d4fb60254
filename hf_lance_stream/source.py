"""Lance tables as numbered rows; the only importer of lance and lancedb.

A `Source` is one or more tables at pinned versions, with a choice of columns and rows. It is
immutable and small: handles open lazily, in every process for itself, and are not pickled.
"""

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.processes import refuse_unsafe_fork

if TYPE_CHECKING:
    import lance

ROW_ID = "_rowid"
"""Column that `with_row_id` adds: Lance's id of the row, uint64."""

_OFFSET = "_rowoffset"  # Lance's number of a live row in scan order, which `take` counts in
_BLOB_EXTENSION = "lance.blob.v2"  # storage type of blob columns, as `take` describes them
_BLOB_METADATA = b"lance-encoding:blob"


@dataclass(frozen=True, eq=False)
class Table:
    """One Lance table at a pinned version.

    Attributes:
        uri: where it is, without credentials only if it had none.
        version: its version number.
        storage_options: passed to Lance.
    """

    uri: str
    version: int
    storage_options: dict[str, str] | None = None
    _handles: dict[int, "lance.LanceDataset"] = field(default_factory=dict, repr=False)

    @property
    def handle(self) -> "lance.LanceDataset":
        """The open table of this process."""
        pid = os.getpid()
        if pid not in self._handles:
            self._handles[pid] = _open(self.uri, self.version, self.storage_options)
        return self._handles[pid]

    @property
    def name(self) -> str:
        """The URI without user name and password."""
        parts = urlsplit(self.uri)
        if "@" not in parts.netloc:
            return self.uri
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    @cached_property
    def fragment_rows(self) -> Int64Array:
        """Live rows of each fragment, from the manifest."""
        counts = [
            # Old manifests lack the counts; then Lance reads them from the files.
            m.physical_rows - m.num_deletions
            if (m := f.metadata).physical_rows is not None and m.num_deletions is not None
            else f.count_rows()
            for f in self.handle.get_fragments()
        ]
        return np.asarray(counts, dtype=np.int64)

    @cached_property
    def data_bytes(self) -> int:
        """Bytes of the data files, as far as the manifest tells."""
        files = (d for f in self.handle.get_fragments() for d in f.metadata.files)
        return sum(d.file_size_bytes or 0 for d in files)

    def matching_offsets(self, filter: str) -> Int64Array:
        """Offsets of the live rows that match an SQL filter, in table order."""
        try:
            found = self.handle.scanner(columns=[_OFFSET], filter=filter).to_table()
        except (ValueError, OSError) as error:
            raise ValueError(
                f"`filter` cannot be applied to {self.name}: got filter={filter!r}; "
                f"Lance says: {_reason(error)}"
            ) from error
        offsets = found.column(0).to_numpy().astype(np.int64)
        return offsets if (np.diff(offsets) > 0).all() else np.sort(offsets)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "version": self.version,
            "storage_options": self.storage_options,
            "_handles": {},
        }


@dataclass(frozen=True, eq=False)
class Source:
    """Rows ``0 .. num_rows - 1`` of one or more tables, in the order given.

    Attributes:
        tables: the tables; their columns have the same names and types.
        columns: names of the columns to read, in this order.
        filter: SQL expression that selects rows, or None.
        with_row_id: whether to add the column `ROW_ID`.
    """

    tables: tuple[Table, ...]
    columns: tuple[str, ...]
    filter: str | None = None
    with_row_id: bool = False

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of what `read` returns."""
        return self._project(_user_schema(self.tables[0]))

    @cached_property
    def _selections(self) -> list[Int64Array] | None:
        """Offsets of the matching rows of each table: 8 bytes a row; None without a filter."""
        if self.filter is None:
            return None
        return [table.matching_offsets(self.filter) for table in self.tables]

    @cached_property
    def shard_rows(self) -> Int64Array:
        """Rows of each fragment of each table, after the filter."""
        counts = [table.fragment_rows for table in self.tables]
        if self._selections is not None:
            bounds = [np.concatenate([[0], np.cumsum(c)]) for c in counts]
            counts = [
                np.diff(np.searchsorted(selection, b))
                for selection, b in zip(self._selections, bounds, strict=True)
            ]
        return np.concatenate(counts) if counts else np.empty(0, dtype=np.int64)

    @cached_property
    def _table_stops(self) -> Int64Array:
        if self._selections is not None:
            sizes = [selection.size for selection in self._selections]
        else:
            sizes = [int(table.fragment_rows.sum()) for table in self.tables]
        return np.cumsum(np.asarray(sizes, dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """Rows after the filter."""
        return int(self._table_stops[-1])

    @property
    def name(self) -> str | list[str]:
        """URI of the table, or of all tables."""
        names = [table.name for table in self.tables]
        return names[0] if len(names) == 1 else names

    @property
    def version(self) -> int | list[int]:
        """Version of the table, or of all tables."""
        versions = [table.version for table in self.tables]
        return versions[0] if len(versions) == 1 else versions

    @cached_property
    def row_bytes(self) -> int:
        """About how many bytes a row takes in memory, at least 1; reads no data file."""
        schema = self.schema
        fixed = sum(width for f in schema if (width := _fixed_width(f.type)) is not None)
        if all(_fixed_width(f.type) is not None for f in schema):
            return max(1, fixed)
        rows = sum(int(table.fragment_rows.sum()) for table in self.tables)
        return max(1, fixed, sum(table.data_bytes for table in self.tables) // max(1, rows))

    def read(self, rows: Int64Array) -> pa.Table:
        """Read rows by number, in the order given, each column in one chunk.

        Args:
            rows: int64, shape ``(n,)``, in ``[0, num_rows)``; repeats are allowed.
        """
        if rows.size == 0:
            return self.schema.empty_table()
        if len(self.tables) == 1:
            return self._read_table(0, rows)
        owner = np.searchsorted(self._table_stops, rows, side="right")
        by_table = np.argsort(owner, kind="stable")
        pieces = []
        for i in np.unique(owner):
            first = self._table_stops[i - 1] if i else 0
            pieces.append(self._read_table(int(i), rows[owner == i] - first))
        together = pa.concat_tables(pieces)
        back = np.empty_like(by_table)
        back[by_table] = np.arange(by_table.size)
        return together.take(pa.array(back)).combine_chunks()

    def select(self, columns: Sequence[str]) -> "Source":
        """The same rows with other columns."""
        new = replace(self, columns=tuple(columns), with_row_id=False)
        new.__dict__["_selections"] = self._selections
        return new

    def _read_table(self, index: int, rows: Int64Array) -> pa.Table:
        table = self.tables[index]
        offsets = rows if self._selections is None else self._selections[index][rows]
        schema = _user_schema(table)
        blobs = [name for name in self.columns if _is_blob(schema, name)]
        plain = [name for name in self.columns if name not in blobs]
        try:
            extra = [ROW_ID] if self.with_row_id or not plain else []
            read = table.handle.take(offsets, columns=plain + extra)
            blob_arrays = {name: _read_blobs(table.handle, name, offsets) for name in blobs}
        except Exception as error:
            raise OSError(
                f"could not read {offsets.size} rows between {offsets.min()} and {offsets.max()} "
                f"of {table.name} at version {table.version}: {_reason(error)}"
            ) from error
        if read.num_rows != offsets.size:
            raise OSError(
                f"{table.name} at version {table.version} gave {read.num_rows} of "
                f"{offsets.size} rows"
            )
        read = read.combine_chunks()
        arrays = [
            blob_arrays[f.name] if f.name in blob_arrays else _column(read, f.name)
            for f in self.schema
        ]
        return pa.table(arrays, schema=self.schema)

    def _project(self, schema: pa.Schema) -> pa.Schema:
        fields = [
            pa.field(name, pa.large_binary(), metadata=_field(schema, name).metadata)
            if _is_blob(schema, name)
            else _field(schema, name).with_name(name)
            for name in self.columns
        ]
        if self.with_row_id:
            fields.append(pa.field(ROW_ID, pa.uint64()))
        return pa.schema(fields, metadata=schema.metadata)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Source":
        return self  # immutable, and a copy would open and filter the tables again

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def open_source(
    source: Any,
    *,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    version: int | str | None = None,
    storage_options: dict[str, str] | None = None,
    with_row_id: bool = False,
) -> Source:
    """Open tables, pin their versions and check the choice of columns and rows.

    Args:
        source: a path or URI, a `lance.LanceDataset`, an embedded `lancedb` table, or a list
            of these, read one after the other.
        columns: columns to read; None for all.
        filter: SQL expression on the table's columns.
        version: version number or tag; None for the latest.
        storage_options: passed to Lance when it opens a path or URI.
        with_row_id: add Lance's row id as the column ``"_rowid"``.

    Raises:
        FileNotFoundError: there is nothing at the path, or no such version.
        ValueError: anything else that does not fit, named.
    """
    items = source if isinstance(source, list | tuple) else [source]
    if not items:
        raise ValueError("`source` must name at least one table: got an empty list")
    tables = tuple(_pin(item, version, storage_options) for item in items)
    names = _check_columns(tables, columns)
    if filter is not None and not (isinstance(filter, str) and filter.strip()):
        raise ValueError(f"`filter` must be an SQL expression or None: got filter={filter!r}")
    opened = Source(tables=tables, columns=names, filter=filter, with_row_id=bool(with_row_id))
    for table in tables[1:]:
        other = opened._project(_user_schema(table))
        if not other.equals(opened.schema):
            raise ValueError(
                f"the tables of one split must have the same columns: {tables[0].name} has "
                f"{_describe(opened.schema)}, {table.name} has {_describe(other)}; choose "
                "`columns` they share"
            )
    _ = opened.num_rows  # applies the filter, so that its errors come here
    return opened


def _pin(item: Any, version: int | str | None, storage_options: dict[str, str] | None) -> Table:
    import lance

    if isinstance(item, str | os.PathLike):
        uri = os.fspath(item)
        if "://" not in uri:
            uri = os.path.realpath(Path(uri).expanduser())
        handle = _open(uri, version, storage_options)
        return Table(uri, handle.version, storage_options, {os.getpid(): handle})
    if hasattr(item, "to_lance") and type(item).__module__.startswith("lancedb."):
        try:
            item = item.to_lance()
        except Exception as error:
            raise ValueError(
                f"`source` is a LanceDB table that has no local Lance table behind it: "
                f"got {type(item).__name__}; Lance says: {_reason(error)}"
            ) from error
    if isinstance(item, lance.LanceDataset):
        if version is not None and version != item.version:
            item = item.checkout_version(version)
        options = storage_options or getattr(item, "_storage_options", None)
        uri = item.uri if "://" in item.uri else os.path.realpath(item.uri)
        return Table(uri, item.version, options, {os.getpid(): item})
    raise ValueError(
        "`source` must be a path or URI (str or Path), a lance.LanceDataset, an embedded lancedb "
        f"table, or a list of these: got {type(item).__name__}"
    )


def _open(
    uri: str, version: int | str | None, storage_options: dict[str, str] | None
) -> "lance.LanceDataset":
    import lance

    refuse_unsafe_fork()
    path = None if "://" in uri else Path(uri)
    if path is not None and not path.exists():
        near = difflib.get_close_matches(path.name, _tables_in(path.parent), n=1)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise FileNotFoundError(f"there is no table at {uri!r}{hint}")
    if path is not None and not (path / "_versions").is_dir():
        inside = _tables_in(path)
        hint = f"; it holds the tables {inside}: name one of them" if inside else ""
        raise ValueError(f"{uri!r} is not a Lance table: it has no _versions directory{hint}")
    try:
        return lance.dataset(uri, version=version, storage_options=storage_options)
    except (ValueError, OSError) as error:
        if version is None:
            if "not found" in str(error).lower():
                raise FileNotFoundError(
                    f"there is no Lance table at {uri!r}: {_reason(error)}"
                ) from error
            raise ValueError(f"{uri!r} cannot be opened: {_reason(error)}") from error
        raise FileNotFoundError(
            f"{uri!r} has no version {version!r}: {_reason(error)}; versions can be cleaned up "
            "unless they are tagged; pass a version or tag that exists, or leave `version` out"
        ) from error


def _tables_in(directory: Path) -> list[str]:
    try:
        return sorted(p.name for p in directory.iterdir() if (p / "_versions").is_dir())
    except OSError:
        return []


def _check_columns(tables: Iterable[Table], columns: Sequence[str] | None) -> tuple[str, ...]:
    if columns is not None and (
        isinstance(columns, str) or not columns or not all(isinstance(c, str) for c in columns)
    ):
        raise ValueError(f"`columns` must be a list of column names or None: got {columns!r}")
    names: tuple[str, ...] = ()
    for table in tables:
        schema = _user_schema(table)
        names = names or tuple(schema.names if columns is None else columns)
        for name in names:
            if name == ROW_ID:
                raise ValueError(f"`columns` names {ROW_ID!r}: use with_row_id=True for row ids")
            if _field(schema, name) is None:
                near = difflib.get_close_matches(name, _all_names(schema), n=1, cutoff=0.4)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"`columns` names {name!r}, which {table.name} does not have{hint} "
                    f"(its columns: {schema.names})"
                )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"`columns` must not repeat a name: got {repeated} more than once")
    return names


def _user_schema(table: Table) -> pa.Schema:
    return table.handle.schema


def _all_names(schema: pa.Schema) -> list[str]:
    nested = [f"{f.name}.{c.name}" for f in schema if pa.types.is_struct(f.type) for c in f.type]
    return [*schema.names, *nested]


def _field(schema: pa.Schema, name: str) -> Any:
    """The field of a column, or None; ``a.b`` is the child ``b`` of the struct ``a``."""
    if (index := schema.get_field_index(name)) >= 0:
        return schema.field(index)
    first, *rest = name.split(".")
    index = schema.get_field_index(first)
    found: Any = schema.field(index) if index >= 0 else None
    for part in rest:
        is_struct = found is not None and pa.types.is_struct(found.type)
        child = found.type.get_field_index(part) if is_struct else -1
        found = found.type.field(child) if child >= 0 else None
    return found


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column of what `take` returned, where ``a.b`` comes back inside the struct ``a``."""
    if name in table.column_names:
        return table.column(name)
    first, *rest = name.split(".")
    return pc.struct_field(table.column(first), rest)


def _is_blob(schema: pa.Schema, name: str) -> bool:
    found = _field(schema, name)
    if getattr(found.type, "extension_name", None) == _BLOB_EXTENSION:
        return True
    return (found.metadata or {}).get(_BLOB_METADATA) == b"true"


def _read_blobs(handle: "lance.LanceDataset", name: str, offsets: Int64Array) -> pa.Array:
    found = handle.read_blobs(name, indices=offsets.tolist(), preserve_order=True)
    return pa.array([data for _, data in found], type=pa.large_binary())


def _fixed_width(kind: pa.DataType) -> int | None:
    """Bytes of a value of a fixed-width type (at least 1), or None."""
    if isinstance(kind, pa.ExtensionType):
        kind = kind.storage_type
    if pa.types.is_fixed_size_list(kind):
        width = _fixed_width(kind.value_type)
        return None if width is None else width * kind.list_size
    if pa.types.is_struct(kind):
        widths = [_fixed_width(child.type) for child in kind]
        return None if None in widths else sum(w for w in widths if w is not None)
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return None


def _describe(schema: pa.Schema) -> str:
    return "{" + ", ".join(f"{f.name}: {f.type}" for f in schema) + "}"


def _reason(error: BaseException) -> str:
    """The first line of a Lance error, without the places in Lance's own source."""
    text = str(error).strip()
    return re.sub(r", \S+\.rs:\d+:\d+", "", text.splitlines()[0]) if text else repr(error)
