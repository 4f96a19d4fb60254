"""Numbers of splits and clump sizes that suit a job and a table, with the reason: integers only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_lance_stream.permutation import MAX_LENGTH
from hf_lance_stream.plan import DEFAULT_NUM_SPLITS, check_int
from hf_lance_stream.splits import divisors

_LIMIT = 2**31  # of GPUs and of rows in a global batch; a bound for the search of divisors

EFFICIENT_READ = 512 << 10
"""Bytes of a clump from which reads are about as fast as they get (rows of 1 to 100 KB, SSD)."""

LARGEST_CLUMP = 64
"""Rows of a clump beyond which reads are hardly faster, and batches less mixed."""

FEWEST_CLUMPS = 1024
"""Clumps that a table should have, so that a shuffle mixes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitsSuggestion:
    """What `suggest_num_splits` found.

    Attributes:
        num_splits: the number of splits to use.
        reason: why, in words.
        candidates: all numbers of splits that would do, in rising order.
        world_sizes: all numbers of GPUs that go with `num_splits`, in rising order; the global
            batch has the same rows on each of them.
        dropped_rows: rows that each epoch leaves out with ``tail="drop"``; None if the number of
            rows was not given.
    """

    num_splits: int
    reason: str
    candidates: tuple[int, ...]
    world_sizes: tuple[int, ...]
    dropped_rows: int | None


def suggest_num_splits(
    world_sizes: int | Sequence[int], global_batch_size: int, rows: int | None = None
) -> SplitsSuggestion:
    """A number of splits for a job that shall run on any of several numbers of GPUs.

    It is a multiple of every world size, so that all ranks read equally many splits, and divides
    the global batch, so that every step has the same rows on each of them. Of all such numbers it
    is the one nearest to 64 (the smaller of two as near).

    Args:
        world_sizes: the numbers of GPUs, or one.
        global_batch_size: rows all GPUs process in one step: world size x batch size.
        rows: rows of the table; there cannot be more splits. Default: unknown.

    Raises:
        ValueError: there is no such number; the message says which global batches and numbers of
            GPUs would do.

    Example:
        >>> import hf_lance_stream as hls
        >>> found = hls.suggest_num_splits([4, 6, 8], global_batch_size=960, rows=100_000)
        >>> found.num_splits, found.candidates
        (48, (24, 48, 96, 120, 192, 240, 480, 960))
        >>> found.world_sizes, found.dropped_rows
        ((1, 2, 3, 4, 6, 8, 12, 16, 24, 48), 16)
    """
    if isinstance(world_sizes, int):
        world_sizes = [world_sizes]
    if not isinstance(world_sizes, list | tuple) or not world_sizes:
        raise ValueError(
            f"`world_sizes` must be a number of GPUs or a list of them: got {world_sizes!r}"
        )
    worlds = sorted({check_int("world_sizes", world, 1, _LIMIT) for world in world_sizes})
    batch = check_int("global_batch_size", global_batch_size, 1, _LIMIT)
    if rows is not None:
        rows = check_int("rows", rows, 0, MAX_LENGTH)
    _check_batch(worlds, batch)
    unit = math.lcm(*worlds)  # divides the batch, since every world size does
    candidates = [unit * d for d in divisors(batch // unit) if rows is None or unit * d <= rows]
    if not candidates:
        raise ValueError(
            f"no number of splits suits {_of_worlds(worlds)}: it must be a multiple of {unit}, and "
            f"cannot be larger than the number of rows: got rows={rows}; use fewer GPUs"
        )
    best = min(candidates, key=lambda n: (abs(n - DEFAULT_NUM_SPLITS), n))
    dropped = None if rows is None else rows % best
    return SplitsSuggestion(
        num_splits=best,
        reason=_reason(best, candidates, worlds, batch, rows),
        candidates=tuple(candidates),
        world_sizes=tuple(divisors(best)),
        dropped_rows=dropped,
    )


def _check_batch(worlds: list[int], batch: int) -> None:
    """Raise ValueError unless every world size divides the global batch."""
    unfit = [world for world in worlds if batch % world]
    if not unfit:
        return
    unit = math.lcm(*worlds)
    batches = [n for n in (batch // unit * unit, batch // unit * unit + unit) if n]
    fitting = divisors(batch)
    near = {max(d for d in fitting if d < world) for world in unfit}
    near |= {next(d for d in fitting if d > world) for world in unfit if world < batch}
    raise ValueError(
        f"no number of splits suits {_of_worlds(worlds)} and global_batch_size={batch}: it must be "
        f"a multiple of every number of GPUs and divide the global batch, which "
        f"{_listed(unfit)} does not divide; use a global batch that is a multiple of {unit}, such "
        f"as {' or '.join(map(str, batches))}, or numbers of GPUs that divide {batch}, such as "
        f"{_listed(sorted(near))}"
    )


def _reason(
    best: int, candidates: list[int], worlds: list[int], batch: int, rows: int | None
) -> str:
    what = f"{best} is a multiple of {_listed(worlds)}"
    is_chosen = f"the one of {_listed(candidates)} nearest to {DEFAULT_NUM_SPLITS}"
    if len(candidates) == 1:
        is_chosen = "the only such number"
    text = (
        f"{what}, so all GPUs read equally many splits, and divides the global batch of {batch} "
        f"rows, so a step has the same rows on any of these numbers of GPUs; it is {is_chosen}"
    )
    if rows is not None:
        text += f'; {rows % best} of {rows} rows are left out per epoch with tail="drop"'
    return text


def _of_worlds(worlds: list[int]) -> str:
    return f"world_sizes={worlds}"


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    """Numbers in words, those in the middle of many left out."""
    texts = [str(number) for number in numbers]
    if len(texts) > most:
        texts = [*texts[: most - 2], "…", texts[-1]]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClumpSuggestion:
    """What `suggest_clump_size` found.

    Attributes:
        shuffle_clump_size: neighbouring rows that a shuffle should move as one.
        reason: why, in words.
    """

    shuffle_clump_size: int
    reason: str


def suggest_clump_size(row_bytes: int, rows: int) -> ClumpSuggestion:
    """A clump size for a shuffle that reads fast and mixes well.

    The smallest power of two of rows that make `EFFICIENT_READ`, but not more than
    `LARGEST_CLUMP`, nor so many that the table has fewer than `FEWEST_CLUMPS` clumps.

    Args:
        row_bytes: bytes of a row of the columns that are read, at least 1.
        rows: rows of the table.
    """
    row_bytes = check_int("row_bytes", row_bytes, 1, MAX_LENGTH)
    rows = check_int("rows", rows, 0, MAX_LENGTH)
    wanted = 1 << max(0, -(-EFFICIENT_READ // row_bytes) - 1).bit_length()
    by_rows = 1 << max(0, (rows // FEWEST_CLUMPS).bit_length() - 1)
    size = min(wanted, by_rows, LARGEST_CLUMP)
    if size == by_rows < min(wanted, LARGEST_CLUMP):
        reason = (
            f"the table is small: {rows} rows make {-(-rows // size)} clumps, and a shuffle of "
            "fewer would mix less"
        )
    elif size == wanted:
        rows_are = "a row is" if size == 1 else f"{size} rows are"
        reason = (
            f"with some {row_bytes} bytes a row, {rows_are} about what one efficient read holds; "
            "larger clumps are hardly faster, smaller ones mix better"
        )
    else:
        reason = "larger clumps mix less, and are hardly faster"
    return ClumpSuggestion(shuffle_clump_size=size, reason=reason)
