"""What `write_lance` reads: rows in a fixed order, in batches, from any position on."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset
from datasets.features.features import require_storage_embed
from datasets.table import embed_table_storage

from hf_lance_stream.chunks import LARGE_ROW, Chunk, read_chunk
from hf_lance_stream.permutation import Int64Array
from hf_lance_stream.reader import MAX_ROWS, read_ahead
from hf_lance_stream.source import Source
from hf_lance_stream.splits import Order

BATCH_BYTES = 8 << 20
"""About how much is read and handed on at a time."""

_READ_BUDGET = 64 << 20  # bytes read ahead of the writer
_FIRST_ROWS = 8  # read to see how large rows are
_INFERRED_ROWS = 128  # read to find features that the source does not say

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far an input has been read.

    Attributes:
        rows: rows before it.
        state: a state of the stream before that; None at its start, and without states.
        skip: rows between that state and the position.
    """

    rows: int = 0
    state: Record | None = None
    skip: int = 0

    def after(self, rows: int) -> "Position":
        """The position so many rows later."""
        return replace(self, rows=self.rows + rows, skip=self.skip + rows)


@dataclass(frozen=True)
class Batch:
    """Some rows, at least one, and the position before the first of them."""

    table: pa.Table
    start: Position


class Input(Protocol):
    """Rows in a fixed order.

    Attributes:
        schema: Arrow schema of the rows, with the metadata of `datasets`.
        num_rows: number of rows, or None where that is not known before.
        identity: what must be the same for an interrupted run to go on, in JSON types.
        settings: how it is read, which a run that goes on takes over, in JSON types.
    """

    @property
    def schema(self) -> pa.Schema: ...  # noqa: D102
    @property
    def num_rows(self) -> int | None: ...  # noqa: D102
    @property
    def identity(self) -> Record: ...  # noqa: D102
    @property
    def settings(self) -> Record: ...  # noqa: D102

    def with_settings(self, settings: Record) -> "Input":
        """The same rows, read as an earlier run did."""

    def batches(self, position: Position) -> Iterator[Batch]:
        """The batches from `position` on."""


@dataclass(frozen=True, kw_only=True)
class IndexedInput:
    """Rows that can be read by number, in the order of a permutation.

    Attributes:
        schema: as of `Input`.
        order: which row comes at which place.
        identity: as of `Input`.
        read: reads rows by number, int64, shape ``(n,)``, in the order given.
        in_runs: whether rows are so large that each run of neighbours is read by itself.
        num_threads: batches read at the same time.
    """

    schema: pa.Schema
    order: Order
    identity: Record
    read: Callable[[Int64Array], pa.Table]
    in_runs: bool = False
    num_threads: int = 2
    settings: Record = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.order.rows

    def shuffled(self, seed: int, clump_size: int) -> "IndexedInput":
        """The same rows in the order of a seed."""
        return replace(self, order=Order(rows=self.num_rows, clump_size=clump_size, seed=seed))

    def with_settings(self, settings: Record) -> "IndexedInput":
        """Itself: it may be cut anywhere."""
        return self

    def batches(self, position: Position) -> Iterator[Batch]:
        """The batches from `position` on, read ahead, of about `BATCH_BYTES`."""

        def read(start: int, stop: int) -> Chunk:
            rows = self.order.rows_at(np.arange(start, stop, dtype=np.int64))
            return read_chunk(self.read, rows, in_runs=self.in_runs)

        chunks = read_ahead(
            read,
            position.rows,
            self.num_rows,
            _FIRST_ROWS,
            budget=_READ_BUDGET,
            chunk_bytes=BATCH_BYTES,
            num_threads=self.num_threads,
        )
        with closing(chunks):  # type: ignore[type-var]  # it is a generator
            for stop, chunk in chunks:
                yield Batch(chunk.to_table(), Position(rows=stop - chunk.num_rows))


@dataclass(frozen=True, kw_only=True)
class StreamInput:
    """Rows that come one after the other.

    Attributes:
        dataset: the stream; its features are known.
        identity: as of `Input`.
        num_rows: number of rows, if known.
        batch_rows: rows read at a time.
        has_states: whether the stream goes on from its states exactly; else all that was
            written is read again and passed over.
    """

    dataset: IterableDataset
    identity: Record
    num_rows: int | None
    batch_rows: int
    has_states: bool

    @property
    def schema(self) -> pa.Schema:
        """As of `Input`."""
        return self.dataset.features.arrow_schema

    @property
    def settings(self) -> Record:
        """The size of its batches, at whose ends it has states."""
        return {"batch_rows": self.batch_rows}

    def with_settings(self, settings: Record) -> "StreamInput":
        """The same rows in the batches of an earlier run."""
        return replace(self, batch_rows=int(settings["batch_rows"]))

    def batches(self, position: Position) -> Iterator[Batch]:
        """The batches from `position` on."""
        stream = self.dataset.with_format("arrow")
        embed = Embedder(self.dataset.features)
        state = position.state
        if state is not None:
            stream.load_state_dict(state)
        before, since = position.rows - position.skip, 0  # rows before the state, and since it
        tables = stream.iter(self.batch_rows)
        with closing(tables):
            for table in tables:
                passed = min(max(0, position.rows - before - since), table.num_rows)
                start = Position(rows=before + since, state=state, skip=since).after(passed)
                for part in embed.parts(table.slice(passed)):
                    yield Batch(part, start)
                    start = start.after(part.num_rows)
                since += table.num_rows
                if self.has_states:
                    before, since, state = before + since, 0, stream.state_dict()


# Making them.


def input_of_source(source: Source) -> IndexedInput:
    """The rows of Lance tables, in table order."""
    is_large = source.row_bytes >= LARGE_ROW
    return IndexedInput(
        schema=source.schema,
        order=Order(rows=source.num_rows),
        identity={
            "kind": "lance",
            "table": source.name,
            "version": source.version,
            "files": source.files_digest,
            "filter": source.filter,
            "columns": list(source.columns),
        },
        read=source.read,
        in_runs=is_large,
        num_threads=16 if source.is_remote else 2,
    )


def input_of_dataset(dataset: Dataset, identity: Record | None = None) -> IndexedInput:
    """The rows of a map-style dataset."""
    tables = dataset.with_format("arrow")
    embed = Embedder(dataset.features)

    def read(rows: Int64Array) -> pa.Table:
        is_run = rows.size and rows[-1] - rows[0] == rows.size - 1
        key = slice(int(rows[0]), int(rows[-1]) + 1) if is_run else rows.tolist()
        return embed(tables[key])

    return IndexedInput(
        schema=dataset.features.arrow_schema,
        order=Order(rows=len(dataset)),
        identity=identity
        or {
            "kind": "Dataset",
            "fingerprint": dataset._fingerprint,  # what `datasets` itself knows a dataset by
            "rows": len(dataset),
            "columns": list(dataset.column_names),
        },
        read=read,
    )


def input_of_stream(
    dataset: IterableDataset,
    *,
    identity: Record | None = None,
    num_rows: int | None = None,
    has_states: bool = False,
) -> StreamInput:
    """The rows of a stream; some are read to find its features and how large rows are.

    Raises:
        ValueError: the stream has no row, and does not say its features.
    """
    features = dataset.features
    first = _first_rows(dataset, _INFERRED_ROWS if features is None else _FIRST_ROWS)
    if features is None:
        if first is None:
            raise ValueError(
                "`source` has no rows, and does not say its features; give them with `features`"
            )
        features = Features.from_arrow_schema(first.schema)
        dataset = dataset.cast(features)
        first = first.slice(0, _FIRST_ROWS)
    size = 1.0
    if first is not None:
        table = Embedder(features)(first)
        size = max(1.0, table.nbytes / table.num_rows)
    shown = hashlib.sha256(repr(features).encode()).hexdigest()[:16]
    return StreamInput(
        dataset=dataset,
        identity=identity or {"kind": "IterableDataset", "features": shown},
        num_rows=num_rows,
        batch_rows=int(max(1, min(MAX_ROWS, BATCH_BYTES / size))),
        has_states=has_states,
    )


def _first_rows(dataset: IterableDataset, count: int) -> pa.Table | None:
    tables = dataset.with_format("arrow").iter(count)
    with closing(tables):
        return next(iter(islice(tables, 1)), None)


class Embedder:
    """Reads files that a table only names into it, as `datasets` does when it saves Parquet.

    Args:
        features: features of the tables.
    """

    def __init__(self, features: Features) -> None:
        self._schema = features.arrow_schema
        self._has_files = any(require_storage_embed(feature) for feature in features.values())

    def __call__(self, table: pa.Table) -> pa.Table:
        """The table with the bytes of all its files."""
        if not self._has_files:
            return table
        return embed_table_storage(table.replace_schema_metadata(self._schema.metadata))

    def parts(self, table: pa.Table) -> Iterator[pa.Table]:
        """The same in parts of about `BATCH_BYTES`, as files can be of any size."""
        start, count = 0, 1 if self._has_files else max(1, table.num_rows)
        while start < table.num_rows:
            part = self(table.slice(start, count))
            yield part
            start += part.num_rows
            row = max(1, part.nbytes // part.num_rows)
            count = int(max(1, min(2 * count, BATCH_BYTES // row)))


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What differs between two records, in words."""
    names: Sequence[str] = sorted({*saved, *current})
    return [
        f"{name} was {saved.get(name)!r} and is {current.get(name)!r}"
        for name in names
        if saved.get(name) != current.get(name)
    ]
