"""From a user's options to the rows one reader yields: the pure half of `examples`."""

import hashlib
import operator
from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_lance_stream.permutation import SEED_LIMIT, Int64Array
from hf_lance_stream.splits import (
    TAILS,
    Layout,
    NaturalStream,
    Order,
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
        top = "2**64" if high == SEED_LIMIT else str(high)
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
    """

    num_splits: int | None = None
    shuffle_seed: int | None = None
    shuffle_clump_size: int | None = None
    tail: Tail | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        def set_int(name: str, low: int, high: int = SEED_LIMIT, why: str = "") -> None:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_int(name, value, low, high, why))

        set_int("num_splits", 1, why="; leave it out to let the package choose")
        set_int("shuffle_seed", 0)
        set_int("shuffle_clump_size", 1, why="; use None to shuffle single rows")
        set_int("epoch", 0)
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
    """

    order: Order
    stream: SplitStream | NaturalStream
    layout: Layout | None

    def __len__(self) -> int:
        return len(self.stream)

    @property
    def num_shards(self) -> int:
        """Shards of this reader, at least 1."""
        return max(1, self.stream.num_shards)

    def rows(self, begin: int, end: int) -> Int64Array:
        """Row numbers of the rows ``[begin, end)`` of this reader, int64."""
        return self.order.rows_at(self.stream.positions(begin, end))

    def part(self) -> dict[str, Any]:
        """Which part of the epoch this reader has, in JSON types."""
        if isinstance(self.stream, SplitStream):
            return {"start": self.stream.start, "stop": self.stream.stop, "ranges": None}
        ranges = self.stream.starts.tobytes() + self.stream.stops.tobytes()
        digest = hashlib.sha256(ranges).hexdigest()[:16]
        return {"start": 0, "stop": self.stream.num_shards, "ranges": digest}

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
    if options.is_natural or (options.num_splits is None and rows == 0):
        return Plan(order=order, stream=_natural_stream(shard_rows, steps), layout=None)
    stream = _split_stream(_make_layout(options, rows, steps), steps)
    return Plan(order=order, stream=stream, layout=stream.layout)


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
                check_divisible(stop - start, step.num_parts, what)
            first, last = part_of(stop - start, step.num_parts, step.index)
            start, stop = start + first, start + last
            continue
        # A factor of the rows per split leaves every row where it is.
        factor = smallest_factor(layout.rows_per_split)
        whole = (start, stop) == (0, layout.num_splits)
        if factor and (whole or layout.tail == "drop" or layout.surplus == 0):
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
