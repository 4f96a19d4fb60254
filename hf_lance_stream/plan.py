"""From a user's options to the rows one reader yields: the pure half of `examples`."""

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from hf_lance_stream.permutation import MAX_LENGTH, SEED_LIMIT, Int64Array
from hf_lance_stream.splits import (
    TAILS,
    BatchDeal,
    Layout,
    NaturalStream,
    Order,
    Resume,
    SplitStream,
    Tail,
    check_divisible,
    halve_ranges,
    part_of,
    ranges_from_lengths,
    smallest_factor,
)

DEFAULT_NUM_SPLITS = 64
"""Splits of a shuffled epoch when `num_splits` is not given (fewer for fewer rows)."""


def check_int(name: str, value: Any, low: int, high: int, why: str = "") -> int:
    """Return `value` as an int in ``[low, high)``, or raise a ValueError that names it."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"`{name}` must be an integer: got {name}={value!r}{why}") from None
    if not low <= number < high:
        top = {SEED_LIMIT: "2**64", MAX_LENGTH: "2**62"}.get(high, str(high))
        raise ValueError(f"`{name}` must be an integer in [{low}, {top}): got {name}={number}{why}")
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How an epoch is ordered and cut; checked when made.

    Attributes:
        num_splits: number of splits, or None: natural shards when not shuffled, else 64.
        shuffle_seed: seed of the shuffle in ``[0, 2**64)``, or None for the table order.
        shuffle_clump_size: contiguous rows moved as one, or None to shuffle single rows.
        tail: ``"drop"``, ``"pad"`` or ``"keep"``; None chooses by `Plan`.
        epoch: the pass, in ``[0, 2**64)``.
        batch_size: rows per batch of a rank, to deal whole batches to DataLoader workers; None
            to deal splits.
    """

    num_splits: int | None = None
    shuffle_seed: int | None = None
    shuffle_clump_size: int | None = None
    tail: Tail | None = None
    epoch: int = 0
    batch_size: int | None = None

    def __post_init__(self) -> None:
        def set_int(name: str, low: int, high: int = SEED_LIMIT, why: str = "") -> None:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_int(name, value, low, high, why))

        set_int("num_splits", 1, why="; leave it out to let the package choose")
        set_int("shuffle_seed", 0)
        set_int("shuffle_clump_size", 1, MAX_LENGTH, why="; use None to shuffle single rows")
        set_int("epoch", 0)
        set_int("batch_size", 1)
        if self.tail is not None and self.tail not in TAILS:
            raise ValueError(f"`tail` must be one of {list(TAILS)} or None: got {self.tail!r}")

    @property
    def is_natural(self) -> bool:
        """Whether the shards are the table's fragments, in table order."""
        return self.num_splits is None and self.shuffle_seed is None


Role = Literal["rank", "worker", "piece"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Keep one of `num_parts` parts of the shards.

    Attributes:
        num_parts: number of parts.
        index: which one, in ``[0, num_parts)``.
        contiguous: whether natural shards are dealt in blocks (or else round-robin).
        role: ``"rank"`` and ``"worker"`` need equal parts; a ``"piece"`` need not be equal.
    """

    num_parts: int
    index: int
    contiguous: bool = True
    role: Role = "piece"


@dataclass(frozen=True, slots=True)
class Reshard:
    """Cut every shard further, without changing which rows there are."""


Step = Shard | Reshard


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The rows one reader yields in one epoch.

    Attributes:
        order: the sequence of the epoch.
        stream: which positions of it this reader yields, in which order.
        layout: the splits of the whole epoch; None for natural shards.
        resume: where the stream goes on; None at its start.
        deal: the batches of the stream that this worker yields; None for all.
        batch_size: rows of the batches that workers share; None if they share splits.
    """

    order: Order
    stream: SplitStream | NaturalStream
    layout: Layout | None
    resume: Resume | None = None
    deal: BatchDeal | None = None
    batch_size: int | None = None

    def __len__(self) -> int:
        return self.deal.count(self.stream_rows) if self.deal else self.stream_rows

    @property
    def stream_rows(self) -> int:
        """Rows left of the stream, for all its workers together."""
        length = len(self.stream)
        return self.resume.remaining(length) if self.resume else length

    @property
    def num_shards(self) -> int:
        """Shards of this reader, at least 1."""
        return max(1, self.stream.num_shards)

    def rows(self, begin: int, end: int) -> Int64Array:
        """Row numbers of the rows ``[begin, end)`` of this reader, int64."""
        index = np.arange(begin, min(end, len(self)), dtype=np.int64)
        if self.deal:
            index = self.deal.at(index)
        if self.resume:
            index = self.resume.at(index)
        return self.order.rows_at(self.stream.at(index))

    def resumed(self, consumed: Int64Array | None) -> "Plan":
        """The same reader after `consumed` rows of each of its splits, int64.

        Natural shards are one after the other: for them it is the one number of rows.
        """
        if consumed is None or not consumed.any():
            return replace(self, resume=None)
        if isinstance(self.stream, SplitStream):
            return replace(self, resume=Resume.of(self.stream, consumed))
        start = min(int(consumed[0]), len(self.stream))
        return replace(self, resume=Resume(late=np.empty(0, dtype=np.int64), start=start))

    def consumed_after(self, consumed: Int64Array | None, delivered: int) -> Int64Array:
        """`consumed` of `resumed` when the stream has gone on by `delivered` rows."""
        if isinstance(self.stream, SplitStream):
            return self.stream.consumed_after(consumed, delivered)
        before = 0 if consumed is None else int(consumed[0])
        return np.array([before + delivered], dtype=np.int64)

    def part(self) -> dict[str, Any]:
        """Which part of the epoch this reader has, in JSON types."""
        start, stop, ranges = 0, self.stream.num_shards, None
        if isinstance(self.stream, SplitStream):
            start, stop = self.stream.start, self.stream.stop
        else:
            data = self.stream.starts.tobytes() + self.stream.stops.tobytes()
            ranges = hashlib.sha256(data).hexdigest()[:16]
        deal = self.deal
        return {
            "start": start,
            "stop": stop,
            "ranges": ranges,
            "worker": deal.worker if deal else None,
            "num_workers": deal.num_workers if deal else None,
            "batch_size": self.batch_size,
        }

    def chunk_rows(self, target: int) -> int:
        """Rows to read at a time: near `target`, whole cycles and whole clumps if they fit."""
        unit = self.num_shards if isinstance(self.stream, SplitStream) else 1
        for size in (unit * self.order.clump_size, unit):
            if size <= target:
                return target // size * size
        return target


def make_plan(
    options: Options, *, rows: int, shard_rows: Int64Array, steps: tuple[Step, ...] = ()
) -> Plan:
    """Lay out an epoch and keep what `steps` leave to this reader.

    Args:
        options: the user's choices.
        rows: rows of the epoch.
        shard_rows: rows of each natural shard, int64; adds up to `rows`.
        steps: sharding and resharding, applied in this order.

    Raises:
        ValueError: for more splits than rows, or splits that ranks or workers do not divide.
    """
    order = Order(
        rows=rows,
        clump_size=options.shuffle_clump_size or 1,
        seed=options.shuffle_seed,
        epoch=options.epoch if options.shuffle_seed is not None else 0,
    )
    deal = None
    if options.batch_size is not None:
        workers = [s for s in steps if isinstance(s, Shard) and s.role == "worker"]
        steps = tuple(step for step in steps if step not in workers)
        deal = _batch_deal(workers, options.batch_size)
    if options.is_natural or (options.num_splits is None and rows == 0):
        natural = _natural_stream(shard_rows, steps)
        return Plan(
            order=order, stream=natural, layout=None, deal=deal, batch_size=options.batch_size
        )
    stream = _split_stream(_make_layout(options, rows, steps), steps)
    return Plan(
        order=order, stream=stream, layout=stream.layout, deal=deal, batch_size=options.batch_size
    )


def unlike_steps(layout: Layout, world_size: int, batch_size: int) -> str | None:
    """What is said where another world size would have other rows in a step; None if not.

    Args:
        layout: the splits of the epoch.
        world_size: number of ranks.
        batch_size: rows per batch of each.
    """
    global_batch = batch_size * world_size
    if global_batch % layout.num_splits == 0:
        return None
    return (
        f"the global batch of {global_batch} rows (world_size={world_size}, "
        f"batch_size={batch_size}) is not a multiple of num_splits={layout.num_splits}: another "
        "world size would form other global batches"
    )


def unequal_lengths(lengths: Sequence[int | None]) -> str | None:
    """What is said where ranks have unequal numbers of batches; None if they have not.

    Args:
        lengths: batches per epoch of each rank; None where they are unknown.
    """
    found = list(dict.fromkeys(lengths))
    if len(found) < 2:
        return None
    return (
        f"the ranks have unequal numbers of batches, {found}, and would wait for each other: give "
        'the dataset a `num_splits` that world_size divides, and tail="drop" or "pad"'
    )


def _batch_deal(workers: list[Shard], batch_size: int) -> BatchDeal | None:
    if not workers:
        return None
    last = workers[-1]
    return BatchDeal(worker=last.index, num_workers=last.num_parts, batch_size=batch_size)


def _make_layout(options: Options, rows: int, steps: tuple[Step, ...]) -> Layout:
    num_splits = options.num_splits or min(DEFAULT_NUM_SPLITS, rows)
    if num_splits > rows:
        raise ValueError(
            f"`num_splits` must not be larger than the number of rows: got "
            f"num_splits={num_splits}, rows={rows}; use at most {rows} splits"
            if rows
            else f"`num_splits` needs at least one row: got num_splits={num_splits}, rows=0; "
            "leave it out to stream an empty table or selection"
        )
    has_ranks = any(
        isinstance(step, Shard) and step.role == "rank" and step.num_parts > 1 for step in steps
    )
    default: Tail = "drop" if options.num_splits is not None or has_ranks else "keep"
    return Layout(rows=rows, num_splits=num_splits, tail=options.tail or default)


def _split_stream(layout: Layout, steps: tuple[Step, ...]) -> SplitStream:
    start, stop = 0, layout.num_splits
    for step in steps:
        if isinstance(step, Shard):
            if step.role != "piece":
                what = "world_size" if step.role == "rank" else "num_workers"
                check_divisible(stop - start, step.num_parts, what, layout.rows)
            first, last = part_of(stop - start, step.num_parts, step.index)
            start, stop = start + first, start + last
            continue
        # A factor of the rows per split leaves every row where it is.
        factor = smallest_factor(layout.rows_per_split)
        whole = (start, stop) == (0, layout.num_splits)
        is_same = layout.surplus == 0 or layout.tail == "drop" or (whole and layout.tail == "keep")
        if factor and is_same:
            layout = replace(layout, num_splits=layout.num_splits * factor)
            start, stop = start * factor, stop * factor
    return SplitStream(layout=layout, start=start, stop=stop)


def _natural_stream(shard_rows: Int64Array, steps: tuple[Step, ...]) -> NaturalStream:
    starts, stops = ranges_from_lengths(shard_rows)
    reshards = 0  # put off, so that a part of the shards has the same rows resharded or not
    for step in steps:
        if isinstance(step, Reshard):
            reshards += 1
            continue
        while reshards and starts.size % step.num_parts:
            starts, stops = halve_ranges(starts, stops)
            reshards -= 1
        if step.contiguous:
            first, last = part_of(starts.size, step.num_parts, step.index)
            starts, stops = starts[first:last], stops[first:last]
        else:
            starts, stops = (
                starts[step.index :: step.num_parts],
                stops[step.index :: step.num_parts],
            )
    for _ in range(reshards):
        starts, stops = halve_ranges(starts, stops)
    return NaturalStream(starts=starts, stops=stops)
