"""From the batches of an input to the fragments of a table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from tqdm.auto import tqdm

from hf_lance_stream.inputs import Batch, IndexedInput, Position, StreamInput
from hf_lance_stream.table_writer import TableWriter


@dataclass(frozen=True)
class Limits:
    """Where a fragment ends.

    Attributes:
        bytes: bytes in memory after which it does.
        rows: rows after which it does at the latest, or None.
    """

    bytes: int
    rows: int | None


class Feed:
    """Hands the batches of an input to Lance, and knows how far that has come."""

    def __init__(
        self, source: IndexedInput | StreamInput, position: Position, bar: "tqdm[Any]"
    ) -> None:
        self.position = position
        self._schema = source.schema
        self._batches = source.batches(position)
        self._bar = bar
        self._error: BaseException | None = None
        self._next: Batch | None = None
        self._advance()

    @property
    def is_done(self) -> bool:
        """Whether all rows have been handed on."""
        return self._next is None

    def write_fragment(self, writer: TableWriter, limits: Limits, replacing: bool) -> Any:
        """Write the next rows as one fragment, and move on after them."""
        try:
            return writer.write(self._schema, self._fragment(limits), replacing=replacing)
        except Exception:
            if self._error is not None:  # Lance makes texts of errors in what it reads
                raise self._error from None
            raise

    def close(self) -> None:
        """End the reading."""
        self._batches.close()  # type: ignore[attr-defined]  # it is a generator

    def _fragment(self, limits: Limits) -> Iterator[pa.RecordBatch]:
        rows = size = 0
        try:
            while self._next is not None:
                batch = self._next
                table = batch.table
                if limits.rows is not None and rows + table.num_rows > limits.rows:
                    table = table.slice(0, limits.rows - rows)
                    self._next = Batch(
                        batch.table.slice(table.num_rows), batch.start.after(table.num_rows)
                    )
                    self.position = self._next.start
                else:
                    self._advance()
                yield from map(_unsliced, _cast(table, self._schema, batch.start).to_batches())
                rows, size = rows + table.num_rows, size + table.nbytes
                self._bar.update(table.num_rows)
                if rows == limits.rows or size >= limits.bytes:
                    return
        except BaseException as error:
            self._error = error
            raise

    def _advance(self) -> None:
        """Read the next batch, and put the position before it, or after the last one."""
        last = self._next
        self._next = next(self._batches, None)
        if self._next is not None:
            self.position = self._next.start
        elif last is not None:
            self.position = last.start.after(last.table.num_rows)


def _cast(table: pa.Table, schema: pa.Schema, start: Position) -> pa.Table:
    if table.schema.names != schema.names:
        table = table.select(schema.names)
    try:
        return table if table.schema.equals(schema) else table.cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(
            f"the rows of the source after row {start.rows} do not fit its features: {error}; give "
            "`features` that all rows fit"
        ) from error


def _unsliced(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without offsets in nested columns, at which Lance 14 panics in nested structs."""
    columns = [
        column.take(pa.array(range(len(column)), pa.int64()))
        if column.offset and column.type.num_fields
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)
