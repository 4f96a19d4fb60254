"""Iterables of ours that stand in a chain of `datasets`: the same rows faster, an exact state.

`wrappers` says where they stand.
"""

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, Self

import numpy as np
import pyarrow as pa
from datasets import Features
from datasets.iterable_dataset import _BaseExamplesIterable

from hf_lance_stream.bad_rows import Transform
from hf_lance_stream.chunks import Chunk
from hf_lance_stream.convert import Converter
from hf_lance_stream.examples import LanceExamplesIterable

_BLOCK_ROWS = 256  # put in order at a time


class _Transparent(_BaseExamplesIterable):  # type: ignore[misc]
    """A wrapper that has the state, the shards and the order of the iterable below."""

    def __init__(self, ex_iterable: _BaseExamplesIterable) -> None:
        super().__init__()
        self.ex_iterable = ex_iterable

    @property
    def num_shards(self) -> int:
        """Shards of the iterable below."""
        shards: int = self.ex_iterable.num_shards
        return shards

    def _init_state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.ex_iterable._init_state_dict()
        self._state_dict = state
        return state

    @property
    def source(self) -> LanceExamplesIterable:
        """The source at the end of the chain."""
        source = self.ex_iterable
        while not isinstance(source, LanceExamplesIterable):
            source = source.ex_iterable
        return source

    def _over(self, ex_iterable: _BaseExamplesIterable) -> Self:
        new = copy(self)
        new.ex_iterable = ex_iterable
        return new

    def shuffle_data_sources(self, generator: np.random.Generator) -> Self:
        """Pass it on."""
        return self._over(self.ex_iterable.shuffle_data_sources(generator))

    def shard_data_sources(self, num_shards: int, index: int, contiguous: bool = True) -> Self:
        """Pass it on."""
        return self._over(
            self.ex_iterable.shard_data_sources(num_shards, index, contiguous=contiguous)
        )

    def reshard_data_sources(self) -> Self:
        """Pass it on."""
        return self._over(self.ex_iterable.reshard_data_sources())


class RowsIterable(_Transparent):
    """Rows of an iterable in the format asked for, read in chunks, with an exact state.

    It stands where `datasets` puts a one-row table per row: same rows, many times faster.

    Args:
        ex_iterable: an iterable that `rows_below` returned.
        row_features: the features its rows have.
        converter: makes rows of its tables; None where it yields python rows that shall stay.
    """

    def __init__(
        self,
        ex_iterable: _BaseExamplesIterable,
        row_features: Features,
        converter: Converter | None = None,
    ) -> None:
        super().__init__(ex_iterable)
        self._row_features = row_features
        self._converter = converter

    @property
    def is_typed(self) -> bool:
        """Its rows need no cast."""
        return True

    @property
    def features(self) -> Features:
        """Features of the rows."""
        return self._row_features

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        if self._converter is None:
            yield from self.ex_iterable
            return
        yield from self.source.rows(self._converter, through=self.ex_iterable)

    @property
    def can_collate(self) -> bool:
        """Whether batches can be made of its tables."""
        if self._converter is None:
            return False
        return self.source.on_bad_rows == "raise" or not self._converter.decodes

    def collated(self, batch_size: int, drop_last: bool) -> "CollatedIterable":
        """The same rows in batches, collated as torch would."""
        assert self._converter is not None
        tables = BatchesIterable(self.ex_iterable, batch_size, drop_last)
        return CollatedIterable(tables, self._converter)


class TransformedIterable(_Transparent):
    """The rows of a source, decoded and given to a function, an exact state, nothing left out.

    Args:
        ex_iterable: a `LanceExamplesIterable`.
        transform: makes a row of a row.
    """

    def __init__(self, ex_iterable: LanceExamplesIterable, transform: Transform) -> None:
        super().__init__(ex_iterable)
        self._transform = transform

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        source = self.source
        converter, bad = Converter(None, source.table_features), source.bad_rows()
        for position, row in source.rows(converter):
            try:
                made = self._made(row)
            except Exception as error:
                made = bad.replaced(
                    source.row_at(position - 1),
                    error,
                    lambda other: self._made(converter.one(other)),
                )
            if not isinstance(made, dict):
                raise ValueError(
                    f"`transform` must return a dict, a row: got {type(made).__name__} for the row "
                    f"{list(row)}"
                )
            yield position, made

    def _made(self, row: dict[str, Any]) -> dict[str, Any]:
        return self._transform(row)


class ConvertedIterable(_Transparent):
    """Rows of an iterable that yields tables, converted as `datasets` does it, but faster.

    Args:
        ex_iterable: an iterable as `datasets` prepares it: it yields tables of one row.
        converter: makes rows of them.
    """

    def __init__(self, ex_iterable: _BaseExamplesIterable, converter: Converter) -> None:
        super().__init__(ex_iterable)
        self._converter = converter

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for key, table in self.ex_iterable.iter_arrow():
            for row in self._converter.rows(table):
                yield key, row


class CollatedIterable(_Transparent):
    """Batches of a loader, made at once from a table each, with an exact state.

    Args:
        ex_iterable: a `BatchesIterable`.
        converter: makes batches of its tables.
    """

    def __init__(self, ex_iterable: "BatchesIterable", converter: Converter) -> None:
        super().__init__(ex_iterable)
        self._converter = converter

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        for stop, table in self.ex_iterable.iter_arrow():
            yield (
                stop,
                converted(self.source, self._converter, self._converter.collated, stop, table),
            )


def converted(
    source: LanceExamplesIterable,
    converter: Converter,
    convert: Callable[[pa.Table], dict[str, Any]],
    stop: int,
    table: pa.Table,
) -> dict[str, Any]:
    """What a method of `converter` makes of a batch; an error names a row that it cannot decode.

    Args:
        source: where the rows are from.
        converter: makes batches of tables.
        convert: its method.
        stop: position after the batch.
        table: the rows of the batch.
    """
    try:
        return convert(table)
    except Exception:
        if converter.decodes:
            for i in range(table.num_rows):
                try:
                    converter.one(table.slice(i, 1))
                except Exception as error:
                    row = source.row_at(stop - table.num_rows + i)
                    raise source.bad_rows().error(row, error) from error
        raise


class BatchesIterable(_Transparent):
    """Tables of `batch_size` rows of a source, with an exact state between any two of them.

    The state of the wrapper of `datasets` that it stands for counts batches from the last chunk
    on, so that it can only be continued with the same batch size; this one counts rows.

    Args:
        ex_iterable: a `LanceExamplesIterable`, maybe under select_columns.
        batch_size: rows per table, at least 1.
        drop_last_batch: leave out a short last table.
    """

    def __init__(
        self, ex_iterable: _BaseExamplesIterable, batch_size: int, drop_last_batch: bool
    ) -> None:
        super().__init__(ex_iterable)
        self.batch_size = batch_size
        self.drop_last_batch = drop_last_batch

    @property
    def iter_arrow(self) -> Callable[[], Iterator[tuple[Any, pa.Table]]]:
        """Iterate over the tables."""
        return self._iter_arrow

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        yield from self.ex_iterable

    def _iter_arrow(self) -> Iterator[tuple[Any, pa.Table]]:
        self.source.consumer = "batches"
        rest: list[pa.Table] = []  # of a batch that goes on in the next chunk
        stop = held = 0
        for stop, chunk in self.ex_iterable.iter_arrow():
            first = -held
            position = stop - chunk.num_rows
            self._set_position(position - held)  # the source is a chunk ahead
            if rest and chunk.num_rows - first >= self.batch_size:
                first += self.batch_size
                batch = pa.concat_tables([*rest, chunk.slice(0, first)])
                rest, held = [], 0
                self._set_position(position + first)
                yield position + first, batch
            while not rest and chunk.num_rows - first >= self.batch_size:
                for batch in self._cut(chunk, first):
                    first += self.batch_size
                    self._set_position(position + first)
                    yield position + first, batch
            begin = max(0, first)
            if begin < chunk.num_rows:
                rest.append(chunk.slice(begin, chunk.num_rows - begin))
                held = chunk.num_rows - first
        if stop:
            self._set_position(stop)
        if rest and not self.drop_last_batch:
            yield stop, pa.concat_tables(rest)

    def _cut(self, chunk: Chunk, first: int) -> Iterator[pa.Table]:
        """Whole batches from row `first` on; the rows of several are put in order at once."""
        size = self.batch_size
        count = min(max(1, _BLOCK_ROWS // size), (chunk.num_rows - first) // size)
        if chunk.is_large:
            count = 1
        block = chunk.slice(first, count * size)
        for n in range(count):
            yield block.slice(n * size, size)

    def _set_position(self, position: int) -> None:
        if self._state_dict is not None:
            self._state_dict["position"] = position
