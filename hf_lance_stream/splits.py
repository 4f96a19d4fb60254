"""Integer maths of an epoch: rows, clumps, splits, cycles and the tail.

Pure functions of integers; nothing here knows a table, a process or a library but numpy.
Positions count along the sequence of an epoch, indices count along the stream of one reader.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from hf_lance_stream.permutation import ORDER_VERSION, Int64Array, Permutation, derive_key

Tail = Literal["drop", "pad", "keep"]
TAILS: tuple[str, ...] = get_args(Tail)


@dataclass(frozen=True, kw_only=True)
class Order:
    """The sequence of an epoch: a permutation of its rows that moves clumps as a whole.

    Attributes:
        rows: number of rows, at least 0.
        clump_size: contiguous rows moved as one, at least 1; the last clump may be short.
        seed: integer in ``[0, 2**64)``, or None for the table order.
        epoch: integer in ``[0, 2**64)``.
    """

    rows: int
    clump_size: int = 1
    seed: int | None = None
    epoch: int = 0

    @cached_property
    def _clumps(self) -> Permutation:
        assert self.seed is not None
        key = derive_key(ORDER_VERSION, self.seed, self.epoch)
        return Permutation(-(-self.rows // self.clump_size), key)

    @cached_property
    def _short_clump(self) -> tuple[int, int]:
        """Position at which the short last clump starts, and how many rows it lacks."""
        slot = int(self._clumps.inverse(self._clumps.n - 1))
        return slot * self.clump_size, -self.rows % self.clump_size

    def rows_at(self, positions: npt.ArrayLike) -> Int64Array:
        """Row numbers at `positions` of the sequence, int64, both in ``[0, rows)``."""
        positions = np.asarray(positions, dtype=np.int64)
        if self.seed is None or self.rows == 0:
            return positions
        if positions.ndim != 1:
            return self.rows_at(positions.reshape(-1)).reshape(positions.shape)
        start, missing = self._short_clump
        # Beyond the short clump every clump starts `missing` positions early.
        shifted = positions + missing * (positions >= start + self.clump_size - missing)
        slots = shifted // self.clump_size
        rows: Int64Array = self._clumps_at(slots) * self.clump_size + shifted % self.clump_size
        return rows

    def _clumps_at(self, slots: Int64Array) -> Int64Array:
        """`self._clumps(slots)`, each run of equal slots permuted once."""
        if self.clump_size == 1 or slots.size < 2:
            return self._clumps(slots)
        first = np.flatnonzero(np.diff(slots, prepend=-1))
        return np.repeat(self._clumps(slots[first]), np.diff(first, append=slots.size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """An epoch cut into `num_splits` equal splits and a tail.

    Attributes:
        rows: rows of the sequence.
        num_splits: number of splits, ``1 <= num_splits <= rows``.
        tail: what becomes of the ``rows % num_splits`` surplus rows at the end of the sequence.
    """

    rows: int
    num_splits: int
    tail: Tail = "drop"

    @property
    def rows_per_split(self) -> int:
        """Rows every split has before the tail."""
        return self.rows // self.num_splits

    @property
    def surplus(self) -> int:
        """Rows left over by equal splits."""
        return self.rows % self.num_splits

    @property
    def dropped(self) -> int:
        """Rows an epoch leaves out."""
        return self.surplus if self.tail == "drop" else 0

    @property
    def padded(self) -> int:
        """Rows an epoch yields a second time."""
        return -self.rows % self.num_splits if self.tail == "pad" else 0

    @property
    def epoch_rows(self) -> int:
        """Rows all splits yield in one epoch."""
        return self.rows - self.dropped + self.padded


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitStream:
    """What a reader of the splits ``[start, stop)`` yields: one row of each split per cycle."""

    layout: Layout
    start: int
    stop: int

    @property
    def num_shards(self) -> int:
        """Splits of this reader."""
        return self.stop - self.start

    @property
    def _tail_rows(self) -> int:
        if self.layout.tail == "drop" or self.layout.surplus == 0:
            return 0
        if self.layout.tail == "pad":
            return self.num_shards
        return max(0, min(self.stop, self.layout.surplus) - self.start)

    def __len__(self) -> int:
        return self.num_shards * self.layout.rows_per_split + self._tail_rows

    def cycle_and_split(self, index: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Cycle, and split of the epoch, of the rows with these numbers in this stream, int64."""
        cycle, split = np.divmod(index, max(self.num_shards, 1))
        return cycle, split + self.start

    def at(self, index: Int64Array) -> Int64Array:
        """Sequence positions of the rows with these numbers in this stream, int64."""
        layout = self.layout
        cycle, split = self.cycle_and_split(index)
        seen = layout.rows_per_split * layout.num_splits
        tail = np.where(split < layout.surplus, seen + split, split - layout.surplus)
        return np.where(cycle < layout.rows_per_split, split * layout.rows_per_split + cycle, tail)

    def positions(self, begin: int, end: int) -> Int64Array:
        """Sequence positions of the rows ``[begin, end)`` of this stream, int64."""
        return self.at(np.arange(begin, min(end, len(self)), dtype=np.int64))

    def split_lengths(self) -> Int64Array:
        """Rows of each split of this reader, tail included, int64."""
        tail = np.arange(self.num_shards) < self._tail_rows
        return self.layout.rows_per_split + tail.astype(np.int64)

    def consumed_after(self, consumed: Int64Array | None, delivered: int) -> Int64Array:
        """Rows consumed of each split when this stream has gone on by `delivered` rows.

        Args:
            consumed: rows consumed of each split before; None for none.
            delivered: rows delivered since, splits that lagged first.
        """
        counts = np.zeros(self.num_shards, dtype=np.int64) if consumed is None else consumed
        resume = Resume.of(self, counts)
        late = np.bincount(resume.late[:delivered] % self.num_shards, minlength=self.num_shards)
        counts = counts + late
        if delivered > resume.late.size:
            rest = resume.start + delivered - resume.late.size
            cycles, part = divmod(rest, self.num_shards)
            counts = np.maximum(counts, cycles + (np.arange(self.num_shards) < part))
        return np.minimum(counts, self.split_lengths())


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Where a stream goes on when its splits stand at different rows.

    The rows not yet consumed keep the order of the stream: by cycle, then by split. So splits
    that lag come first, until all are level.

    Attributes:
        late: numbers, in the stream, of the rows that come before all splits are level, int64.
        start: number of the first row after them.
    """

    late: Int64Array
    start: int

    @classmethod
    def of(cls, stream: SplitStream, consumed: Int64Array) -> "Resume":
        """The rest of `stream` when `consumed` rows of each of its splits are done, int64."""
        level = int(consumed.max(initial=0))
        lengths = np.maximum(0, np.minimum(level, stream.split_lengths()) - consumed)
        split = np.repeat(np.arange(consumed.size), lengths)
        first = np.repeat(np.cumsum(lengths) - lengths, lengths)
        cycle = consumed[split] + np.arange(split.size) - first
        late = np.sort(cycle * stream.num_shards + split)
        return cls(late=late, start=min(level * stream.num_shards, len(stream)))

    def remaining(self, length: int) -> int:
        """Rows left of a stream of `length` rows."""
        return int(self.late.size) + length - self.start

    def at(self, index: Int64Array) -> Int64Array:
        """Numbers, in the whole stream, of rows numbered from here."""
        if not self.late.size:
            return index + self.start
        late = self.late[np.minimum(index, self.late.size - 1)]
        return np.where(index < self.late.size, late, index - self.late.size + self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDeal:
    """Whole batches of a stream dealt to workers in turn.

    Worker `worker` of `num_workers` gets the batches ``worker, worker + num_workers, …``.
    """

    worker: int
    num_workers: int
    batch_size: int

    def count(self, total: int) -> int:
        """Rows of this worker among the first `total` rows of the stream."""
        rounds, rest = divmod(total, self.batch_size * self.num_workers)
        mine = min(max(rest - self.worker * self.batch_size, 0), self.batch_size)
        return rounds * self.batch_size + mine

    def at(self, index: Int64Array) -> Int64Array:
        """Numbers, in the stream, of the rows of this worker."""
        batch, row = np.divmod(index, self.batch_size)
        return (batch * self.num_workers + self.worker) * self.batch_size + row


@dataclass(frozen=True, kw_only=True, slots=True)
class NaturalStream:
    """What a reader of natural shards yields: ranges of the table, one after the other.

    Attributes:
        starts: first position of each shard, int64, shape ``(num_shards,)``.
        stops: one past the last position of each shard, the same shape.
    """

    starts: Int64Array
    stops: Int64Array

    @property
    def num_shards(self) -> int:
        """Shards of this reader."""
        return int(self.starts.size)

    def __len__(self) -> int:
        return int((self.stops - self.starts).sum())

    def at(self, index: Int64Array) -> Int64Array:
        """Sequence positions of the rows with these numbers in this stream, int64."""
        ends = np.cumsum(self.stops - self.starts)
        return index + (self.stops - ends)[np.searchsorted(ends, index, side="right")]

    def positions(self, begin: int, end: int) -> Int64Array:
        """Sequence positions of the rows ``[begin, end)`` of this stream, int64."""
        return self.at(np.arange(begin, min(end, len(self)), dtype=np.int64))


def part_of(count: int, num_parts: int, index: int) -> tuple[int, int]:
    """Bounds of the `index`-th of `num_parts` contiguous parts of ``range(count)``.

    The sizes differ by at most one; the first parts are the larger ones.
    """
    size, extra = divmod(count, num_parts)
    start = size * index + min(index, extra)
    return start, start + size + (index < extra)


def divisors(n: int) -> list[int]:
    """All divisors of `n` in rising order."""
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def smallest_factor(n: int, limit: int = 64) -> int | None:
    """Smallest prime factor of `n` that is at most `limit`, or None."""
    return next((d for d in range(2, min(n, limit) + 1) if n % d == 0), None)


def near_num_splits(num_splits: int, num_parts: int, rows: int) -> list[int]:
    """At most two numbers of splits near `num_splits`, up to `rows`, that `num_parts` divides."""
    below = min(num_splits, rows) // num_parts * num_parts
    near = (below, below + num_parts, below + 2 * num_parts)
    return [n for n in near if 0 < n <= rows][:2]


def check_divisible(num_splits: int, num_parts: int, what: str, rows: int) -> None:
    """Raise ValueError unless `num_parts` divides `num_splits`.

    Args:
        num_splits: splits to hand out.
        num_parts: number of ranks or workers.
        what: name of the number, such as ``"world_size"`` or ``"num_workers"``.
        rows: rows of the epoch, more than which there cannot be of splits.
    """
    if num_splits % num_parts:
        near = " or ".join(map(str, near_num_splits(num_splits, num_parts, rows)))
        hint = f", such as {near}" if near else ""
        raise ValueError(
            f"the number of splits must be divisible by {what}: got num_splits={num_splits}, "
            f"{what}={num_parts}; use a {what} out of {divisors(num_splits)} "
            f"or a multiple of {num_parts} as `num_splits`{hint}"
        )


def halve_ranges(starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Cut every range of at least two rows into halves, in order."""
    middles = (starts + stops + 1) // 2
    new_starts = np.stack([starts, middles], axis=1).reshape(-1)
    new_stops = np.stack([middles, stops], axis=1).reshape(-1)
    keep = (new_stops > new_starts) | np.tile([True, False], starts.size)
    return new_starts[keep], new_stops[keep]


def ranges_from_lengths(lengths: Sequence[int] | Int64Array) -> tuple[Int64Array, Int64Array]:
    """Starts and stops of consecutive ranges with these lengths, int64."""
    stops = np.cumsum(np.asarray(lengths, dtype=np.int64))
    return stops - np.asarray(lengths, dtype=np.int64), stops
