"""`LanceExamplesIterable`: the split-aware source under a Hugging Face `IterableDataset`.

Order, epoch, shards and state live here, because every transformation of `datasets` keeps the
examples iterable but not the class of the dataset.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch.utils.data
from datasets import Features
from datasets.iterable_dataset import _BaseExamplesIterable
from datasets.table import table_cast

from hf_lance_stream.chunks import LARGE_ROW, Chunk, read_chunk
from hf_lance_stream.convert import Converter
from hf_lance_stream.permutation import ORDER_VERSION
from hf_lance_stream.plan import Options, Plan, Reshard, Role, Shard, Step, check_int, make_plan
from hf_lance_stream.reader import MAX_ROWS, read_ahead
from hf_lance_stream.resume import start_from
from hf_lance_stream.shards import NumShards, seed_of
from hf_lance_stream.source import Source
from hf_lance_stream.splits import check_divisible
from hf_lance_stream.state import LiveState, fingerprint_text, new_state
from hf_lance_stream.stats import StatsBoard

logger = logging.getLogger(__name__)

DEFAULT_READ_BUDGET = 64 << 20
"""Bytes read ahead by default."""

_CHUNK_BYTES = 8 << 20  # read at a time; less if the budget does not hold four
_LARGE_CHUNK_BYTES = 16 << 20  # the same for large rows, so that runs of them are read
_CHUNK_ROWS = MAX_ROWS

_BLOCK_ROWS = 256  # converted at a time
_THREADS = {  # chunks read at the same time, by (is_remote, is_large); measured on two cores
    (False, False): 2,
    (False, True): 4,
    (True, False): 16,  # to hide the latency of an object store
    (True, True): 16,
}

_divided_as: ContextVar[str | None] = ContextVar("_divided_as", default=None)


@contextmanager
def dividing_among_ranks(name: str) -> Iterator[None]:
    """Take every ``shard_data_sources`` inside for a division among ranks, which must be even.

    Args:
        name: what the user calls the number of ranks, for the error.
    """
    token = _divided_as.set(name)
    try:
        yield
    finally:
        _divided_as.reset(token)


ArrowIterator = Iterator[tuple[Any, pa.Table]]


class LanceExamplesIterable(_BaseExamplesIterable):  # type: ignore[misc]
    """Rows of Lance tables in the order of an epoch.

    Like the iterable of a packaged builder it is untyped: it yields Arrow tables with the
    schema of `table_features`, or rows as python objects, and leaves decoding to `datasets`.

    `datasets` tells it of a user's shuffle, of an epoch and of a worker through two calls only
    (contract-tested in `tests/test_datasets_contract.py`). ``shuffle_data_sources`` directly
    followed by ``shift_rngs(e)`` is epoch `e`; a shuffle that anything else follows is the
    user's; a shift without a shuffle comes from a worker, or from a dataset whose order
    ``skip`` and ``take`` have frozen, and changes nothing.

    Args:
        source: the rows.
        options: how they are ordered and cut.
        table_features: features of the columns of `source`.
        steps: sharding and resharding done so far.
        read_budget: bytes read ahead.
    """

    def __init__(
        self,
        source: Source,
        options: Options,
        table_features: Features,
        steps: tuple[Step, ...] = (),
        read_budget: int = DEFAULT_READ_BUDGET,
    ) -> None:
        super().__init__()
        self.source = source
        self.table_features = table_features
        self.read_budget = read_budget
        self.stats = StatsBoard()
        self._options = options
        self._steps = steps
        self._shuffle: np.random.Generator | None = None
        self._plan: Plan | None = None
        self._sleep_on_threads_shutdown = False
        self.is_read_by_rows = False
        """Set just before `iter_arrow` by who keeps the position itself: it gets chunks of any
        size, not tables."""

    # What `datasets` asks for before it iterates.

    @property
    def options(self) -> Options:
        """The options, with a shuffle that turned out to be the user's."""
        if self._shuffle is not None:
            seed = seed_of(self._shuffle)
            self._options = replace(self._options, shuffle_seed=seed)
            self._shuffle = None
        return self._options

    @property
    def steps(self) -> tuple[Step, ...]:
        """Sharding and resharding done so far."""
        return self._steps

    @property
    def plan(self) -> Plan:
        """The rows this iterable yields; made once."""
        options = self.options
        if self._plan is None:
            self._plan = make_plan(
                options,
                rows=self.source.num_rows,
                shard_rows=self.source.shard_rows,
                steps=self._steps,
            )
        return self._plan

    @property
    def num_shards(self) -> int:
        """Splits, or natural shards, of this iterable.

        In a worker at least the number of workers, if they share batches: `datasets` gives
        nothing to those beyond the number of shards.
        """
        plan = self.plan
        shown = plan.num_shards
        worker = torch.utils.data.get_worker_info()
        if worker is not None and self.options.batch_size is not None:
            shown = max(shown, worker.num_workers)
        return NumShards(
            shown,
            divided=plan.num_shards,
            rows=plan.order.rows,
            is_natural=plan.layout is None,
        )

    def shuffle_data_sources(self, generator: np.random.Generator) -> "LanceExamplesIterable":
        """Take a shuffle that may yet turn out to be an epoch; see the class."""
        new = self._changed(self.options, self._steps)
        new._shuffle = generator
        return new

    def shift_rngs(self, value: int) -> "LanceExamplesIterable":
        """Make a shuffle just taken the epoch `value`; see the class."""
        if self._shuffle is None:
            return self
        return self.with_options(replace(self._options, epoch=value))

    def shard_data_sources(
        self, num_shards: int, index: int, contiguous: bool = True
    ) -> "LanceExamplesIterable":
        """Keep the `index`-th of `num_shards` groups of shards.

        Splits go out in contiguous groups whatever `contiguous` says. ``contiguous=False`` is
        how `datasets` splits among ranks and workers; these must get equally many splits.
        """
        check_int("index" if _divided_as.get() == "num_shards" else "rank", index, 0, num_shards)
        steps = self._steps
        role: Role = "piece"
        if (name := _divided_as.get()) is not None:
            role = "rank"
            if self.plan.layout is None and name == "world_size":
                _ = self.num_shards % num_shards  # refuses an uneven division
            elif self.plan.layout is not None:
                check_divisible(self.plan.num_shards, num_shards, name, self.plan.order.rows)
        elif not contiguous:
            # The worker's call is the last one in a worker; one before it was the rank's.
            steps = tuple(
                replace(s, role="rank") if isinstance(s, Shard) and s.role == "worker" else s
                for s in steps
            )
            role = "worker" if torch.utils.data.get_worker_info() is not None else "rank"
        step = Shard(num_parts=num_shards, index=index, contiguous=contiguous, role=role)
        return self.with_steps(*steps, step)

    def reshard_data_sources(self) -> "LanceExamplesIterable":
        """Cut the shards further: the same rows in more shards, where that is possible."""
        return self.with_steps(*self._steps, Reshard())

    def with_options(self, options: Options) -> "LanceExamplesIterable":
        """A copy with other options, nothing read yet."""
        return self._changed(options, self._steps)

    def with_source(self, source: Source) -> "LanceExamplesIterable":
        """A copy that reads `source`, nothing read yet."""
        new = self._changed(self.options, self._steps)
        new.source = source
        _ = new.plan  # so that an impossible split is refused here
        return new

    def with_steps(self, *steps: Step) -> "LanceExamplesIterable":
        """A copy with other steps, nothing read yet."""
        new = self._changed(self.options, steps)
        _ = new.plan  # so that an impossible split is refused here
        return new

    def _changed(self, options: Options, steps: tuple[Step, ...]) -> "LanceExamplesIterable":
        new = LanceExamplesIterable(
            self.source, options, self.table_features, steps, self.read_budget
        )
        new.stats = self.stats
        return new

    # State.

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What this iterable reads; a state of anything else is refused."""
        plan = self.plan
        values = {
            "table": self.source.name,
            "version": self.source.version,
            "files": self.source.files_digest,
            "filter": self.source.filter,
            "columns": list(self.source.columns),
            "rows": plan.order.rows,
            "num_splits": plan.layout.num_splits if plan.layout else None,
            "shuffle_seed": plan.order.seed,
            "shuffle_clump_size": plan.order.clump_size if plan.order.seed is not None else None,
            "tail": self.options.tail
            if plan.layout
            else None,  # not the default: ranks have theirs
            "epoch": self.options.epoch,
            "order_version": ORDER_VERSION,
        }
        return {name: fingerprint_text(value) for name, value in values.items()}

    def _init_state_dict(self) -> LiveState:
        self._state_dict = new_state(self.fingerprint, self.plan.part())
        return self._state_dict

    def _chunk_rows(self) -> int:
        rows = self._chunk_bytes() // self.source.row_bytes
        return self.plan.chunk_rows(min(max(rows, 1), _CHUNK_ROWS))

    def _chunk_bytes(self) -> int:
        is_large = self.source.row_bytes >= LARGE_ROW
        return min(_LARGE_CHUNK_BYTES if is_large else _CHUNK_BYTES, self.read_budget // 4)

    # Iteration.

    @property
    def iter_arrow(self) -> Callable[[], ArrowIterator]:
        """Iterate over tables of many rows."""
        return self._iter_arrow

    def _iter_arrow(self) -> ArrowIterator:
        # Before `datasets` takes the state that it replays chunks from.
        if self._state_dict is not None and self._state_dict["chunk_rows"] is None:
            self._state_dict["chunk_rows"] = self._chunk_rows()
        is_by_rows, self.is_read_by_rows = self.is_read_by_rows, False
        return self._tables(is_by_rows)

    def _tables(self, by_rows: bool) -> Iterator[tuple[int, Any]]:
        for stop, chunk in self._chunks(by_rows):
            if self._state_dict is not None:
                self._state_dict["position"] = stop
            yield stop, chunk if by_rows else chunk.to_table()

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        return rows_of(self._chunks(by_rows=True), Converter(None), self._state_dict)

    def _chunks(self, by_rows: bool) -> Iterator[tuple[int, Chunk]]:
        """Chunks from the current position on, each with the position after it."""
        plan, source = self.plan, self.source
        begin, chunk, state = 0, None, self._state_dict
        if state is not None:
            start = start_from(state, self.fingerprint, plan)
            start.write_to(state)  # it may have been that of a larger part
            plan, begin = start.plan, start.position
            chunk = state["chunk_rows"] = state["chunk_rows"] or self._chunk_rows()
        log_tail(plan, str(source.name))
        schema = self.table_features.arrow_schema

        counters = self.stats.counters()

        is_large = source.row_bytes >= LARGE_ROW

        def read(start: int, stop: int) -> Chunk:
            found = read_chunk(
                lambda rows: _cast(source.read(rows), schema),
                plan.rows(start, stop),
                in_runs=is_large,
            )
            counters.requested(source.new_requests())
            return found

        return read_ahead(
            read,
            begin,
            len(plan),
            chunk or self._chunk_rows(),
            budget=self.read_budget,
            chunk_bytes=self._chunk_bytes(),
            num_threads=_THREADS[source.is_remote, is_large],
            counters=counters,
            by_rows=by_rows,
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plan": None}  # which grows with the fragments

    def __copy__(self) -> "LanceExamplesIterable":
        new = object.__new__(LanceExamplesIterable)
        new.__dict__.update(self.__dict__)
        return new


def rows_of(
    chunks: Iterator[tuple[int, Chunk]], converter: Converter, state: dict[str, Any] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of the chunks of a source, each with the position after it, which `state` gets.

    They are converted a block at a time: then who keeps a row keeps no more than its block.
    """
    for stop, chunk in chunks:
        position = stop - chunk.num_rows
        for block in chunk.blocks(1 if chunk.is_large else _BLOCK_ROWS):
            for row in converter.rows(block):
                position += 1
                if state is not None:
                    state["position"] = position
                yield position, row


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
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


@functools.cache  # once for each table and layout
def _log_once(message: str) -> None:
    logger.warning(message)


def log_tail(plan: Plan, table: str) -> None:
    """Say, once and not in workers, how many rows of an epoch are left out or repeated."""
    if plan.layout is None or torch.utils.data.get_worker_info() is not None:
        return
    counts = {"left out": plan.layout.dropped, "repeated": plan.layout.padded}
    for what, count in counts.items():
        if count:
            _log_once(
                f"{table}: {count} of {plan.layout.rows} rows are {what} in each epoch "
                f"(num_splits={plan.layout.num_splits}, tail={plan.layout.tail!r})"
            )
