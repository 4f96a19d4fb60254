"""`LanceExamplesIterable`: the split-aware source under a Hugging Face `IterableDataset`.

Order, epoch, shards and state live here, because every transformation of `datasets` keeps the
examples iterable but not the class of the dataset.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch.utils.data
from datasets import Features
from datasets.iterable_dataset import _BaseExamplesIterable

from hf_lance_stream.bad_rows import BadRows, OnBadRows
from hf_lance_stream.chunks import LARGE_ROW, Chunk, read_chunk
from hf_lance_stream.convert import Converter
from hf_lance_stream.permutation import ORDER_VERSION
from hf_lance_stream.plan import Options, Plan, Reshard, Role, Shard, Step, check_int, make_plan
from hf_lance_stream.reader import MAX_ROWS, read_ahead
from hf_lance_stream.resume import start_from
from hf_lance_stream.shards import NumShards, divided_as, seed_of
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

Consumer = Literal["tables", "batches", "rows"]
"""Who iterates over the tables of a source: whom the whole tables of chunks of equal size suit,
or who gets `Chunk`s of any size and cuts them into batches, or into rows."""

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
        on_bad_rows: what is done about rows that cannot be cast or decoded.
    """

    def __init__(
        self,
        source: Source,
        options: Options,
        table_features: Features,
        steps: tuple[Step, ...] = (),
        read_budget: int = DEFAULT_READ_BUDGET,
        on_bad_rows: OnBadRows = "raise",
    ) -> None:
        super().__init__()
        self.source = source
        self.table_features = table_features
        self.read_budget = read_budget
        self.on_bad_rows = on_bad_rows
        self.stats = StatsBoard()
        self._options = options
        self._steps = steps
        self._shuffle: np.random.Generator | None = None
        self._plan: Plan | None = None
        self._sleep_on_threads_shutdown = False
        self.consumer: Consumer = "tables"
        """Set just before `iter_arrow` by who keeps the position itself."""

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
        check_int("index" if divided_as() == "num_shards" else "rank", index, 0, num_shards)
        steps = self._steps
        role: Role = "piece"
        if (name := divided_as()) is not None:
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
            self.source,
            options,
            self.table_features,
            steps,
            self.read_budget,
            self.on_bad_rows,
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
        consumer, self.consumer = self.consumer, "tables"
        return self._tables(consumer)

    def _tables(self, consumer: Consumer) -> Iterator[tuple[int, Any]]:
        for stop, chunk in self._chunks(consumer):
            if self._state_dict is not None:
                self._state_dict["position"] = stop
            yield stop, chunk.to_table() if consumer == "tables" else chunk

    def __iter__(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        return self.rows(Converter(None))

    def rows(
        self, converter: Converter, through: _BaseExamplesIterable | None = None
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows from the current position on, each with the position after it.

        They are converted a block at a time: then who keeps a row keeps no more than its block.

        Args:
            converter: makes the rows.
            through: what stands over this iterable and selects columns of its tables.
        """
        state, bad = self._state_dict, self.bad_rows()
        self.consumer = "rows"
        for stop, chunk in (through or self).iter_arrow():
            position = stop - chunk.num_rows
            for block in chunk.blocks(1 if chunk.is_large else _BLOCK_ROWS):
                done = 0
                try:
                    for row in converter.rows(block):
                        done += 1
                        if state is not None:
                            state["position"] = position + done
                        yield position + done, row
                except Exception:
                    if not converter.decodes:
                        raise
                # A row that cannot be decoded ends the conversion of its block.
                for i in range(done, block.num_rows):
                    row = self._one_row(block.slice(i, 1), position + i, converter, bad)
                    if state is not None:
                        state["position"] = position + i + 1
                    yield position + i + 1, row
                position += block.num_rows

    def _one_row(
        self, row: pa.Table, position: int, converter: Converter, bad: BadRows
    ) -> dict[str, Any]:
        try:
            return converter.one(row)
        except Exception as error:
            names = row.column_names
            return bad.replaced(
                self.row_at(position), error, lambda other: converter.one(other.select(names))
            )

    def bad_rows(self) -> BadRows:
        """What is done about the bad rows of a pass."""
        options = self.options
        return BadRows(
            self.source,
            self.table_features.arrow_schema,
            self.on_bad_rows,
            (options.shuffle_seed or 0, options.epoch),
            self.stats.counters(),
        )

    def row_at(self, position: int) -> int:
        """Number in the source of the row at a position of the pass that is running."""
        plan, state = self.plan, self._state_dict
        if state is not None:
            plan = start_from(state, self.fingerprint, plan).plan
        return int(plan.rows(position, position + 1)[0])

    def _chunks(self, consumer: Consumer) -> Iterator[tuple[int, Chunk]]:
        """Chunks from the current position on, each with the position after it."""
        plan, source = self.plan, self.source
        begin, chunk, state = 0, None, self._state_dict
        if state is not None:
            start = start_from(state, self.fingerprint, plan)
            start.write_to(state)  # it may have been that of a larger part
            plan, begin = start.plan, start.position
            chunk = state["chunk_rows"] = state["chunk_rows"] or self._chunk_rows()
        log_tail(plan, str(source.name))
        counters, bad = self.stats.counters(), self.bad_rows()
        is_large = source.row_bytes >= LARGE_ROW
        decoder = Converter(None, self.table_features)
        # Who goes by rows replaces one that cannot be decoded when it decodes it. Others get
        # tables, so that all rows are decoded here to see whether they can be.
        is_checked = consumer != "rows" and self.on_bad_rows != "raise" and decoder.decodes

        def read(start: int, stop: int) -> Chunk:
            rows = plan.rows(start, stop)
            found = read_chunk(
                lambda rows: bad.cast(source.read(rows), rows), rows, in_runs=is_large
            )
            counters.requested(source.new_requests())
            return bad.decodable(found, rows, decoder) if is_checked else found

        return read_ahead(
            read,
            begin,
            len(plan),
            chunk or self._chunk_rows(),
            budget=self.read_budget,
            chunk_bytes=self._chunk_bytes(),
            num_threads=_THREADS[source.is_remote, is_large],
            counters=counters,
            by_rows=consumer != "tables",
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_plan": None}  # which grows with the fragments

    def __copy__(self) -> "LanceExamplesIterable":
        new = object.__new__(LanceExamplesIterable)
        new.__dict__.update(self.__dict__)
        return new


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
