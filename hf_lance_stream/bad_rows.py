"""Rows that cannot be cast, decoded or transformed: which they are, and what takes their place.

Where a bad row shall not end the training, another row of the same tables takes its place, so
that every rank has as many rows and steps as without it. Which one is a function of the order
and of the bad row alone: a resumed run, or one on other ranks and workers, has the same.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import pyarrow as pa
from datasets.table import table_cast

from hf_lance_stream.chunks import Chunk
from hf_lance_stream.convert import Converter
from hf_lance_stream.permutation import Int64Array, derive_key
from hf_lance_stream.source import Source
from hf_lance_stream.stats import Counters

logger = logging.getLogger(__name__)

OnBadRows = Literal["raise", "skip", "warn"]
"""What is done about a bad row."""

_MAX_DRAWS = 64  # rows drawn in the place of a bad one before giving up
_MAX_WARNINGS = 20  # of one pass in one process

T = TypeVar("T")
Transform = Callable[[dict[str, Any]], dict[str, Any]]


class BadRowError(ValueError):
    """A row cannot be cast, decoded or transformed; the cause is the error it met."""


def check_on_bad_rows(value: Any) -> OnBadRows:
    """The policy a user gave, or a ValueError."""
    if value not in get_args(OnBadRows):
        raise ValueError(f"`on_bad_rows` must be one of {list(get_args(OnBadRows))}: got {value!r}")
    return value  # type: ignore[no-any-return]


class BadRows:
    """What is done about the bad rows of one pass.

    Args:
        source: the rows.
        schema: what they are cast to.
        on_bad_rows: "raise" names the row; "skip" puts another row in its place; "warn" does so
            and logs it.
        key: integers in ``[0, 2**64)`` that the rows drawn depend on.
        counters: where bad rows are counted.
    """

    def __init__(
        self,
        source: Source,
        schema: pa.Schema,
        on_bad_rows: OnBadRows,
        key: tuple[int, ...],
        counters: Counters,
    ) -> None:
        self.on_bad_rows = on_bad_rows
        self._source = source
        self._schema = schema
        self._key = key
        self._counters = counters
        self._warnings = 0

    def error(self, row: int, error: Exception) -> BadRowError:
        """An error that names a row of the source."""
        return BadRowError(
            f"{self._source.place_of(row)} cannot be used: {_in_words(error)}; mend or delete it, "
            'or pass on_bad_rows="skip" or "warn" to have another row in its place'
        )

    def replaced(self, row: int, error: Exception, make: Callable[[pa.Table], T]) -> T:
        """What `make` makes of another row, cast, in the place of row `row` of the source.

        Raises:
            BadRowError: bad rows shall not be replaced, or the rows drawn are bad too.
        """
        if isinstance(error, MemoryError):  # no fault of the row
            raise error
        if self.on_bad_rows == "raise":
            raise self.error(row, error) from error
        self._counters.bad_row()
        for draw in range(_MAX_DRAWS):
            other = derive_key(*self._key, row, draw) % self._source.num_rows
            table = self._source.read(np.array([other], dtype=np.int64))
            try:
                made = make(cast(table, self._schema))
            except Exception:
                continue
            self._warn(row, other, error)
            return made
        raise BadRowError(
            f"{self._source.place_of(row)} cannot be used ({_in_words(error)}), nor can any of "
            f"{_MAX_DRAWS} rows drawn in its place: most of the table seems to be bad"
        ) from error

    def _warn(self, row: int, other: int, error: Exception) -> None:
        if self.on_bad_rows != "warn" or self._warnings >= _MAX_WARNINGS:
            return
        self._warnings += 1
        last = self._warnings == _MAX_WARNINGS
        logger.warning(
            "%s cannot be used (%s): row %d is in its place%s",
            self._source.place_of(row),
            _in_words(error),
            other,
            "; further ones are only counted, see stats().bad_rows" if last else "",
        )

    def cast(self, table: pa.Table, rows: Int64Array) -> pa.Table:
        """`table`, with the rows `rows` of the source, cast to the schema."""
        try:
            return cast(table, self._schema)
        except ValueError:
            return pa.concat_tables(self._each(_rows_of_table(table), rows, self._cast_one))

    def decodable(self, chunk: Chunk, rows: Int64Array, decoder: Converter) -> Chunk:
        """`chunk`, with the rows `rows` of the source, where all rows can be decoded."""
        given = list(chunk.blocks(1))
        found = list(self._each(iter(given), rows, lambda row: _decoded(decoder, row)))
        if all(new is old for new, old in zip(found, given, strict=True)):
            return chunk
        return Chunk(pieces=(pa.concat_tables(found).combine_chunks(),))

    def _each(
        self, tables: Iterator[pa.Table], rows: Int64Array, make: Callable[[pa.Table], pa.Table]
    ) -> Iterator[pa.Table]:
        """What `make` makes of tables of one row, or of others in the place of bad ones."""
        for table, row in zip(tables, rows.tolist(), strict=True):
            try:
                made = make(table)
            except Exception as error:
                made = self.replaced(row, error, make)
            yield made

    def _cast_one(self, row: pa.Table) -> pa.Table:
        return cast(row, self._schema)


def _rows_of_table(table: pa.Table) -> Iterator[pa.Table]:
    return (table.slice(i, 1) for i in range(table.num_rows))


def _decoded(decoder: Converter, row: pa.Table) -> pa.Table:
    """`row`, if it can be decoded."""
    decoder.one(row)
    return row


def _in_words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with the types of `schema`; an error names the column."""
    try:
        return table_cast(table, schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError, ValueError) as error:
        for name in schema.names:
            try:
                table_cast(table.select([name]), pa.schema([schema.field(name)]))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError, ValueError) as why:
                raise ValueError(
                    f"column {name!r} has a value that cannot be cast from "
                    f"{table.schema.field(name).type} to {schema.field(name).type}: {why}; give it "
                    "another feature"
                ) from error
        raise
