"""Lance tables as numbered rows.

A `Source` is one or more tables at pinned versions, with a choice of columns and rows. It is
immutable and small.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_lance_stream import blobs as blob_columns
from hf_lance_stream.blobs import Blobs, blob_in_list, holds_blobs, is_blob
from hf_lance_stream.credentials import bare_uri
from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.pinning import check_storage_options, check_version_argument, pin
from hf_lance_stream.plain_types import plain_column, plain_type
from hf_lance_stream.processes import is_starting_child
from hf_lance_stream.refs import Version
from hf_lance_stream.selections import SelectionFile, SharedSelections
from hf_lance_stream.stored import StoredTable
from hf_lance_stream.table import remember

ROW_ID = "_rowid"
"""Column that `with_row_id` adds: Lance's id of the row, uint64."""

_SAMPLED_ROWS = 32
_UNKNOWN_ROW = 8 << 10  # bytes; taken for those of a row where the sample cannot be read
_LARGE_SAMPLE = 1 << 20  # bytes of a row that tell enough
_MIN_SCANNED = 256  # neighbouring rows that are scanned; fewer are taken


@dataclass(frozen=True, eq=False)
class Source:
    """Rows ``0 .. num_rows - 1`` of one or more tables, in the order given.

    Attributes:
        tables: the tables; their columns have the same names and types.
        columns: names of the columns to read, in this order.
        filter: SQL expression that selects rows, or None.
        with_row_id: whether to add the column `ROW_ID`.
        blobs: whether blob columns hold bytes or what names a blob, `blobs.NAME_TYPE`.
    """

    tables: tuple[StoredTable, ...]
    columns: tuple[str, ...]
    filter: str | None = None
    with_row_id: bool = False
    blobs: Blobs = "bytes"

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of what `read` returns: the types of the tables, made plain."""
        return self.schemas[0]

    @cached_property
    def schemas(self) -> list[pa.Schema]:
        """Arrow schema of what is read of each table; they differ in metadata at most."""
        return [self._project(table.schema) for table in self.tables]

    @cached_property
    def _selections(self) -> list[Int64Array] | None:
        """Offsets of the matching rows of each table: 8 bytes a row; None without a filter."""
        if self.filter is None:
            return None
        written: SelectionFile | None = self.__dict__.get("_selection_file")
        if written is not None and (found := written.open()) is not None:
            return found
        return [table.matching_offsets(self.filter) for table in self.tables]

    @cached_property
    def _shared_selections(self) -> SharedSelections | None:
        """The same for the workers of this process."""
        return None if self._selections is None else SharedSelections(self._selections)

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

    @property
    def files_digest(self) -> str | list[str]:
        """Hash of the names of the data files of the table, or of each table."""
        digests = [table.files_digest for table in self.tables]
        return digests[0] if len(digests) == 1 else digests

    @property
    def is_remote(self) -> bool:
        """Whether reads go over a network, so that many should be under way at once."""
        return any(table.is_remote for table in self.tables)

    def new_requests(self) -> int:
        """Reads of the storage since this was last asked, in this process."""
        return sum(table.new_requests() for table in self.tables)

    @cached_property
    def row_bytes(self) -> int:
        """About how many bytes a row takes in memory, at least 1.

        Exact without reading where all columns have a fixed width; else from a few rows spread
        over the table: their mean, or a quarter of the largest if that is more.
        """
        widths = [_fixed_width(f.type) for f in self.schema]
        fixed = sum(width for width in widths if width is not None)
        if None not in widths or self.num_rows == 0:
            return max(1, fixed)
        sizes: list[int] = []
        source = replace(self, blobs="lazy")  # the size of a blob is known without its bytes
        vars(source)["_selections"] = self._selections  # the filter is not applied again
        for most in (2, _SAMPLED_ROWS):  # large rows are not read in numbers to see that
            count = min(most, self.num_rows)
            try:
                sample = source.read(np.linspace(0, self.num_rows - 1, count).astype(np.int64))
            except OSError:  # raised at the row itself, if that is wanted
                return max([fixed + _UNKNOWN_ROW, *sizes])
            sizes = [sample.slice(i, 1).nbytes for i in range(count)]
            if self.blobs == "bytes":
                sizes = list(map(sum, zip(sizes, blob_columns.sizes_of_rows(sample), strict=True)))
            if max(sizes) >= _LARGE_SAMPLE:
                break
        return int(max(1, sum(sizes) // len(sizes), max(sizes) // 4))

    def read(self, rows: Int64Array) -> pa.Table:
        """Read rows by number, in the order given.

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

    def place_of(self, row: int) -> str:
        """Where a row is, in words: its number in its table, with Lance's id of it."""
        index = int(np.searchsorted(self._table_stops, row, side="right"))
        table = self.tables[index]
        offset = row - (int(self._table_stops[index - 1]) if index else 0)
        if self._selections is not None:
            offset = int(self._selections[index][offset])
        found = table.take(np.array([offset], dtype=np.int64), [ROW_ID])
        row_id = found.column(ROW_ID)[0].as_py()
        return f"row {offset} ({ROW_ID} {row_id}) of {table.name} at version {table.version}"

    def select(self, columns: Sequence[str]) -> "Source":
        """All rows of the tables, without the filter, with other columns."""
        return replace(self, columns=tuple(columns), filter=None, with_row_id=False)

    def with_tables(self, tables: Sequence[StoredTable]) -> "Source":
        """The same choice of columns and rows of other tables, or of other versions.

        Raises:
            ValueError: they do not have the columns, or the filter does not fit them.
        """
        source = replace(self, tables=tuple(tables))
        _check_columns(tables, self.columns)
        _ = source.num_rows  # applies the filter, so that its errors come here
        return source.remembered()

    def remembered(self) -> "Source":
        """This source; lazy blobs of it that come out of workers are read with its tables."""
        for table in self.tables if self.blobs == "lazy" else ():
            remember(table, table.files_digest)
        return self

    def _read_table(self, index: int, rows: Int64Array) -> pa.Table:
        table = self.tables[index]
        schema = table.schema  # which Lance makes anew each time
        offsets = rows if self._selections is None else self._selections[index][rows]
        columns: dict[str, Any] = {}
        if self.blobs == "bytes":  # no descriptors are needed of blobs that are columns
            whole = [name for name in self.columns if is_blob(_field(schema, name))]
            columns = {name: table.read_blobs(offsets, name) for name in whole}
        rest = [name for name in self.schema.names if name not in columns]
        if rest:
            is_range = offsets.size >= _MIN_SCANNED and (np.diff(offsets) == 1).all()
            read = table.scan(offsets, rest) if is_range else table.take(offsets, rest)
            columns |= {name: self._with_blobs(table, offsets, read, name) for name in rest}
        made = [plain_column(columns[f.name], f.type) for f in self.schema]
        return pa.table(made, schema=self.schema)

    def _with_blobs(
        self, table: StoredTable, offsets: Int64Array, read: pa.Table, name: str
    ) -> pa.ChunkedArray | pa.Array:
        """A column of what was read, with what is given out in the place of descriptors."""
        column, field = _column(read, name), _field(table.schema, name)
        if field is None or not holds_blobs(field):
            return column

        def made(path: str, descriptors: pa.Array) -> pa.Array:
            if self.blobs == "bytes":
                return table.read_blobs(offsets, path)
            owner = (bare_uri(table.uri), table.version, table.files_digest)
            return blob_columns.names(owner, path, offsets, descriptors)

        return blob_columns.replaced(pa.concat_arrays(column.chunks), field, name, made)

    def _project(self, schema: pa.Schema) -> pa.Schema:
        fields = [
            _plain(blob_columns.given_out(_field(schema, name), self.blobs)).with_name(name)
            for name in self.columns
        ]
        if self.with_row_id:
            fields.append(pa.field(ROW_ID, pa.uint64()))
        return pa.schema(fields, metadata=schema.metadata)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Source":
        return self  # immutable, and a copy would open and filter the tables again

    def __getstate__(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if is_starting_child() and self._shared_selections is not None:
            state["_selection_file"] = self._shared_selections.reference
        return state


def open_source(
    source: Any,
    *,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    version: Version | None = None,
    storage_options: dict[str, str] | None = None,
    with_row_id: bool = False,
    blobs: Blobs = "bytes",
    pickle_credentials: bool = False,
    argument: str = "source",
) -> Source:
    """Open tables, pin their versions and check the choice of columns and rows.

    Args:
        source: a path or URI, a `lance.LanceDataset`, a `lancedb` table, or a list
            of these, read one after the other.
        columns: columns to read; None for all.
        filter: SQL expression on the table's columns.
        version: version number, tag or branch; None for the latest.
        storage_options: passed to Lance when it opens a path or URI.
        with_row_id: add Lance's row id as the column ``"_rowid"``.
        blobs: what to read of blob columns.
        pickle_credentials: whether every pickle holds the secrets in URIs and `storage_options`.
        argument: the user's name for `source`, for errors.

    Raises:
        FileNotFoundError: there is nothing at the path, or no such version.
        OSError: the table, or what the filter needs of it, cannot be read.
        ValueError: anything else that does not fit, named.
    """
    items = source if isinstance(source, list | tuple) else [source]
    if not items:
        raise ValueError(f"`{argument}` must name at least one table: got an empty list")
    check_version_argument(version)
    check_storage_options(storage_options)
    if filter is not None and not (isinstance(filter, str) and filter.strip()):
        raise ValueError(f"`filter` must be an SQL expression or None: got filter={filter!r}")
    if blobs not in get_args(Blobs):
        raise ValueError(f"`blobs` must be one of {list(get_args(Blobs))}: got {blobs!r}")
    tables = tuple(
        replace(
            pin(item, version, storage_options, argument),
            pickle_credentials=bool(pickle_credentials),
        )
        for item in items
    )
    names = _check_columns(tables, columns)
    opened = Source(tables, names, filter, bool(with_row_id), blobs)
    for table, schema in zip(tables, opened.schemas, strict=True):
        if schema.types != opened.schema.types:
            raise ValueError(
                f"the tables of one split must have the same columns: {tables[0].name} has "
                f"{_describe(opened.schema)}, {table.name} has {_describe(schema)}; choose "
                "`columns` they share"
            )
    _ = opened.num_rows  # applies the filter, so that its errors come here
    return opened.remembered()


def _check_columns(tables: Sequence[StoredTable], columns: Any) -> tuple[str, ...]:
    names = _names_of_columns(tables, columns)
    for name in names:
        if "`" in name:
            raise ValueError(
                f"the column {name!r} has a backtick in its name, so that Lance 14 does not find "
                "it: choose `columns` without it, or rename it"
            )
        if blob_in_list(_field(tables[0].schema, name)):
            raise ValueError(
                f"column {name!r} of {tables[0].name} has blobs inside a list or map, which Lance "
                "cannot read by row: leave it out with `columns`"
            )
    return names


def _names_of_columns(tables: Sequence[StoredTable], columns: Any) -> tuple[str, ...]:
    if columns is None:
        names = tuple(tables[0].schema.names)
        for table in tables:
            other = set(names).symmetric_difference(table.schema.names)
            if other:
                raise ValueError(
                    f"the tables of one split must have the same columns: {tables[0].name} and "
                    f"{table.name} differ in {sorted(other)}; choose `columns` they share"
                )
        return names
    is_list = isinstance(columns, list | tuple) and columns
    if not is_list or not all(isinstance(c, str) for c in columns):
        raise ValueError(f"`columns` must be a list of column names or None: got {columns!r}")
    for table in tables:
        _check_names(table, columns)
    repeated = sorted({name for name in columns if columns.count(name) > 1})
    if repeated:
        raise ValueError(f"`columns` must not repeat a name: got {repeated} more than once")
    return tuple(columns)


def _check_names(table: StoredTable, columns: Iterable[str]) -> None:
    schema = table.schema
    for name in columns:
        if name == ROW_ID:
            raise ValueError(f"`columns` names {ROW_ID!r}: use with_row_id=True for row ids")
        if _field(schema, name) is None:
            _refuse_inside_of_list(schema, name)
            near = difflib.get_close_matches(name, _all_names(schema), n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"`columns` names {name!r}, which {table.name} does not have{hint} "
                f"(its columns: {schema.names})"
            )


def _refuse_inside_of_list(schema: pa.Schema, name: str) -> None:
    parts = name.split(".")
    for stop in range(1, len(parts)):
        found = _field(schema, whole := ".".join(parts[:stop]))
        if found is not None and found.type.num_fields and not pa.types.is_struct(found.type):
            raise ValueError(
                f"`columns` names {name!r}, but {whole!r} is a {found.type}: a field inside a list "
                f"or map cannot be read by itself; read {whole!r}"
            )


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


def _plain(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A column of what `take` returned, where ``a.b`` comes back inside the struct ``a``."""
    if name in table.column_names:
        return table.column(name)
    first, *rest = name.split(".")
    return pc.struct_field(table.column(first), rest)


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
