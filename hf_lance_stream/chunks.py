"""Chunks of rows as they lie in storage, and the order in which the consumer gets them.

Rows are read in the order of the table, which is what reads fastest, and put in order a few at a
time, when they are in the processor's caches anyway.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from hf_lance_stream.permutation import Int64Array

LARGE_ROW = 16 << 10
"""Bytes of a row from which each run of neighbours is read by itself, and no row is copied."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows, in order.

    Attributes:
        pieces: tables with the same columns, each column of each in one array unless there is
            only one piece and no order.
        order: for each row its number in the pieces, one after the other, int64; None: as they
            are.
    """

    pieces: tuple[pa.Table, ...]
    order: Int64Array | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        if self.order is not None:
            return self.order.size
        return sum(piece.num_rows for piece in self.pieces)

    def __len__(self) -> int:
        return self.num_rows

    @property
    def nbytes(self) -> int:
        """Bytes of the tables in memory."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def is_large(self) -> bool:
        """Whether its rows are so large that they should not be copied."""
        return self.nbytes >= LARGE_ROW * max(1, self.num_rows)

    def select(self, columns: Sequence[str]) -> "Chunk":
        """The same rows with these columns only."""
        return replace(self, pieces=tuple(piece.select(columns) for piece in self.pieces))

    def blocks(self, size: int) -> Iterator[pa.Table]:
        """All rows in tables of `size`; those of one row are not copied."""
        if size > 1 or self.order is None:
            for start in range(0, self.num_rows, size):
                yield self.slice(start, size)
            return
        starts, owner = self._owners(self.order)
        local = self.order - starts[owner]
        for i, row in zip(owner.tolist(), local.tolist(), strict=True):
            yield self.pieces[i].slice(row, 1)

    def slice(self, start: int, length: int) -> pa.Table:
        """Rows ``[start, start + length)`` as a table."""
        if self.order is None:
            whole = self.pieces[0] if len(self.pieces) == 1 else pa.concat_tables(self.pieces)
            return whole.slice(start, length)
        order = self.order[start : start + length]
        if len(self.pieces) == 1 or order.size == 0:
            return _take(self.pieces[0], order)
        starts, owner = self._owners(order)
        parts, shifts, size = [], np.zeros(len(self.pieces), dtype=np.int64), 0
        for i in np.unique(owner):  # of each piece only what is needed, so that little is copied
            local = order[owner == i] - starts[i]
            first, last = int(local.min()), int(local.max())
            parts.append(self.pieces[i].slice(first, last + 1 - first))
            shifts[i] = size - first - starts[i]
            size += last + 1 - first
        return _take(pa.concat_tables(parts), order + shifts[owner])

    def _owners(self, order: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Where each piece starts, and the piece of each row."""
        starts = np.cumsum([0, *(piece.num_rows for piece in self.pieces)])
        return starts, np.searchsorted(starts, order, side="right") - 1

    def to_table(self) -> pa.Table:
        """All rows as a table."""
        return self.slice(0, self.num_rows)


def _take(table: pa.Table, order: Int64Array) -> pa.Table:
    first = int(order[0]) if order.size else 0
    if (order == np.arange(first, first + order.size)).all():
        return table.slice(first, order.size)
    return table.take(pa.array(order))


def read_chunk(read: Callable[[Int64Array], pa.Table], rows: Int64Array, *, in_runs: bool) -> Chunk:
    """Read rows in the order of the table.

    Args:
        read: reads rows by number, int64, shape ``(n,)``, in the order given.
        rows: the rows wanted, in this order, int64; repeats are allowed.
        in_runs: read every run of neighbours by itself.
    """
    steps = np.diff(rows)
    if (steps > 0).all():
        return Chunk(pieces=(read(rows),))
    by_row = np.argsort(rows, kind="stable")
    ordered = rows[by_row]
    order = np.empty_like(by_row)
    order[by_row] = np.arange(by_row.size)
    runs = [ordered]
    if in_runs:
        runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    pieces = tuple(read(run).combine_chunks() for run in runs)
    return Chunk(pieces=pieces, order=order)
