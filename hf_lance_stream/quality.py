"""How well an order mixes a table: a few numbers, and a figure.

All of it is computed from the plan of an epoch. No row is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.examples import LanceExamplesIterable
from hf_lance_stream.html import html_table
from hf_lance_stream.permutation import SEED_LIMIT, Int64Array
from hf_lance_stream.plan import check_int
from hf_lance_stream.wrappers import changes_rows, only_source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_ROWS = 1 << 20  # looked at, unless the user says how many
_MAX_DRAWN = 1 << 17  # the same for a figure, whose buffer takes 10 to 40 µs a row
_NAMES = {
    "neighbour_correlation": "correlation of neighbours",
    "rank_correlation": "rank correlation of order and position",
    "batch_correlation": "correlation of successive batches",
    "batch_variance": "variance of batch means (random: 1)",
    "neighbour_fraction": "rows with their table neighbour in the batch",
    "clumps_per_batch": "clumps per batch",
    "fragments_per_batch": "fragments per batch",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleQuality:
    """How well an order mixes a table; see `shuffle_quality`.

    The position of a row is its number in the table, or among the rows that a filter leaves.
    Only whole batches count. "Random" is what a random permutation of the table has on average.

    Attributes:
        rows: rows looked at.
        batch_size: rows per batch.
        neighbour_correlation: Pearson correlation of the positions of a row and the next one.
            Random: 0, table order: 1. It is 0 for any order that deals from many splits in turn.
        rank_correlation: Spearman's correlation of the order of the rows and their position.
            Random: 0, table order: 1. A buffer much smaller than the table leaves it near 1.
        batch_correlation: Pearson correlation of the mean positions of a batch and the next one.
            Random: 0. Near 1, training drifts through the table; nan for fewer than 3 batches.
        batch_variance: mean squared distance between the mean position of a batch and that of the
            table, as a multiple of that of random batches: the design effect of cluster sampling
            (Kish, Survey Sampling, 1965). Random: 1. At n, gradients of what depends on the
            position in the table are as noisy as those of random batches n times smaller.
        neighbour_fraction: part of the rows of a batch, in [0, 1], whose predecessor in the table
            is in the same batch. Random: (batch size - 1) / rows of the table.
        clumps_per_batch: mean number of different clumps in a batch; None if not shuffled.
        fragments_per_batch: mean number of different fragments in a batch.
    """

    rows: int
    batch_size: int
    neighbour_correlation: float
    rank_correlation: float
    batch_correlation: float
    batch_variance: float
    neighbour_fraction: float
    clumps_per_batch: float | None
    fragments_per_batch: float

    def _lines(self) -> list[tuple[str, str]]:
        lines = [("rows, batch size", f"{self.rows:,}, {self.batch_size:,}")]
        values = [(field.name, getattr(self, field.name)) for field in fields(self)[2:]]
        return lines + [(_NAMES[name], _number(value)) for name, value in values]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._lines())

    def _repr_html_(self) -> str:
        return html_table(self._lines())


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "0" if abs(value) < 5e-4 else digits


def shuffle_quality(
    ds: LanceIterableDataset, batch_size: int = 256, rows: int | None = None
) -> ShuffleQuality:
    """Say how well the order of a dataset mixes its table, in its epoch, without reading a row.

    Args:
        ds: a dataset of one source, whole or of one rank. Its steps must keep one row per row.
        batch_size: rows per batch, at least 2. For a whole dataset that is the global batch; for
            that of a rank the batch of this rank.
        rows: how many rows to look at, from the start of the epoch on. Default: all, at most 2**20.

    Raises:
        ValueError: an argument does not fit; the dataset mixes sources or changes the number of
            rows; or there are fewer than two batches.

    Example:
        >>> import hf_lance_stream as hls
        >>> path = write_example_table(rows=1000)
        >>> ds = hls.from_lance(path, num_splits=4, shuffle_seed=1, shuffle_clump_size=10)
        >>> quality = hls.shuffle_quality(ds, batch_size=40)
        >>> quality.clumps_per_batch, quality.fragments_per_batch <= 4
        (4.0, True)
        >>> hls.shuffle_quality(hls.from_lance(path), batch_size=50).rank_correlation
        1.0
    """
    examples = _source_of(ds)
    plan = examples.plan
    count = _count_of(rows, len(plan))
    return quality_of_positions(
        plan.rows(0, count),
        table_rows=plan.order.rows,
        batch_size=batch_size,
        fragment_rows=examples.source.shard_rows,
        clump_size=plan.order.clump_size if plan.order.seed is not None else None,
    )


def quality_of_positions(
    positions: npt.ArrayLike,
    *,
    table_rows: int,
    batch_size: int = 256,
    fragment_rows: npt.ArrayLike | None = None,
    clump_size: int | None = None,
) -> ShuffleQuality:
    """The numbers of `shuffle_quality` for any order, such as that of a buffer.

    Args:
        positions: position in the table of each row of the order, in ``[0, table_rows)``, int64,
            shape ``(rows,)``.
        table_rows: rows of the table.
        batch_size: rows per batch, at least 2.
        fragment_rows: rows of each fragment, int64, adding up to `table_rows`. Default: one.
        clump_size: rows per clump, or None if there are no clumps.

    Raises:
        ValueError: a batch size below 2, or fewer than two batches of rows.
    """
    order = np.asarray(positions, dtype=np.int64)
    batch_size = check_int("batch_size", batch_size, 2, 2**62)
    num_batches = order.size // batch_size
    if num_batches < 2:
        raise ValueError(
            f"`batch_size` must leave at least two batches: got batch_size={batch_size}, "
            f"rows={order.size}; use at most {order.size // 2}"
            if order.size >= 4
            else f"the quality of a shuffle needs at least two batches of two rows: got "
            f"{order.size} rows"
        )
    order = order[: num_batches * batch_size]
    batches = np.sort(order.reshape(num_batches, batch_size), axis=1)
    means = batches.mean(axis=1)
    random_variance = (table_rows + 1) * (table_rows - batch_size) / (12 * batch_size)
    stops = np.cumsum(np.asarray([table_rows] if fragment_rows is None else fragment_rows))
    return ShuffleQuality(
        rows=order.size,
        batch_size=batch_size,
        neighbour_correlation=_correlation(order[:-1], order[1:]),
        # Of ranks and their places; places and their ranks, a permutation's inverse, have the same.
        rank_correlation=_correlation(np.arange(order.size), np.argsort(order, kind="stable")),
        batch_correlation=_correlation(means[:-1], means[1:]),
        batch_variance=float(((means - (table_rows - 1) / 2) ** 2).mean() / random_variance),
        neighbour_fraction=float((np.diff(batches, axis=1) == 1).sum() / order.size),
        clumps_per_batch=None if clump_size is None else _distinct(batches // clump_size),
        fragments_per_batch=_distinct(np.searchsorted(stops, batches, side="right")),
    )


def _correlation(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    if a.size < 2 or a.std() == 0 or b.std() == 0:
        return float("nan")
    a, b = (a - a.mean()) / a.std(), (b - b.mean()) / b.std()
    return round(float((a * b).mean()), 12)


def _distinct(batches: Int64Array) -> float:
    """Mean number of different values in the rows of a sorted array."""
    return float((np.diff(batches, axis=1) != 0).sum(axis=1).mean() + 1)


def _source_of(ds: Any) -> LanceExamplesIterable:
    if not isinstance(ds, LanceIterableDataset):
        raise ValueError(
            "`ds` must be a dataset of a Lance table, from hls.from_lance or load_dataset("
            f'"lance_stream", …): got {type(ds).__name__}'
        )
    what = changes_rows(ds._ex_iterable)
    if what is not None:
        raise ValueError(
            f"`ds` must yield the rows of one source one by one: got a dataset with {what}; give "
            "the dataset as it is before that step"
        )
    examples = only_source(ds.prepared_source())
    assert examples is not None
    return examples


def _count_of(rows: int | None, available: int, most: int = _MAX_ROWS) -> int:
    if rows is None:
        return min(available, most)
    return min(check_int("rows", rows, 1, 2**62), available)


def buffer_shuffle_positions(
    rows: int, buffer_size: int = 1000, seed: int = 0, num_shards: int = 1
) -> Int64Array:
    """The order in which the buffered shuffle of `datasets` yields the rows of a table.

    It is that shuffle itself, ``IterableDataset.shuffle``, on row numbers: it shuffles the
    shards, then draws from a buffer.

    Args:
        rows: rows of the table, at least 1; each takes 10 to 40 µs.
        buffer_size: rows in the buffer, at least 1.
        seed: seed of the shuffle.
        num_shards: equal contiguous shards of the table, such as its fragments.

    Returns:
        The position in the table of each row, int64, shape ``(rows,)``.

    Example:
        >>> import hf_lance_stream as hls
        >>> order = hls.buffer_shuffle_positions(1000, buffer_size=10, seed=1)
        >>> int(order[:100].max()) < 110, sorted(order.tolist()) == list(range(1000))
        (True, True)
    """
    rows = check_int("rows", rows, 1, 2**62)
    order = _buffer_shuffled(rows, buffer_size, seed, num_shards)
    return np.fromiter(order, dtype=np.int64, count=rows)


def _buffer_shuffled(rows: int, buffer_size: int, seed: int, num_shards: int) -> Iterator[int]:
    num_shards = check_int("num_shards", num_shards, 1, rows + 1)
    table = Dataset.from_dict({"row": np.arange(rows)}).to_iterable_dataset(num_shards=num_shards)
    shuffled = table.shuffle(
        seed=check_int("seed", seed, 0, SEED_LIMIT),
        buffer_size=check_int("buffer_size", buffer_size, 1, 2**62),
    )
    return (row["row"] for row in shuffled)


def plot_shuffles(
    ds: LanceIterableDataset,
    clump_sizes: Sequence[int | None] = (16, 64, 1024, None),
    buffer_size: int | None = 1000,
    batch_size: int = 256,
    rows: int | None = None,
) -> "Figure":
    """Draw where in the table the rows come from over time, for a buffer and some clump sizes.

    The upper row of panels shows the epoch, as a sample of 4,000 rows; the lower one every row of
    the first 8 batches. Below them are the numbers of `shuffle_quality`. Nothing is read.

    Args:
        ds: a dataset of one source; its seed (0 if it is not shuffled) and splits are used.
        clump_sizes: a column of panels for each; None shuffles single rows. At most 7.
        buffer_size: rows in the buffer of the shuffle of `datasets`, which gets the fragments as
            its shards, as with the built-in ``lance`` builder. None leaves it out.
        batch_size: rows per batch, at least 2.
        rows: how many rows to look at, from the start of the epoch on. Default: all, at most 2**17.

    Returns:
        A matplotlib figure: ``figure.savefig("shuffles.png")``; a notebook shows it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: an argument does not fit.
    """
    figure_class = _figure_class()
    orders = _orders(ds, clump_sizes, buffer_size, batch_size, rows)
    examples = _source_of(ds)
    figure = figure_class(figsize=(2 * len(orders) + 0.6, 5), layout="constrained")
    axes = figure.subplots(2, len(orders), sharex="row", sharey=True, squeeze=False)
    for column, (title, order, quality) in enumerate(orders):
        sample = np.sort(np.random.default_rng(0).permutation(order.size)[:4000])
        axes[0, column].set_title(title, fontsize=9)
        _scatter(axes[0, column], sample / batch_size, order[sample])
        first = np.arange(min(8 * batch_size, order.size))
        _scatter(axes[1, column], first / batch_size, order[first])
        axes[1, column].set_xlabel(_caption(quality), fontsize=7, linespacing=1.5)
    for axis, label in zip(axes[:, 0], ("the epoch", "its first 8 batches"), strict=True):
        axis.set_ylabel(f"position in the table\n({label})", fontsize=8)
        axis.set_ylim(0, examples.plan.order.rows)
    return figure


def _figure_class() -> "type[Figure]":
    """A figure that a notebook shows although it is not one of pyplot's."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'plot_shuffles needs matplotlib: pip install "hf_lance_stream[notebooks]"'
        ) from error

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            image = BytesIO()
            self.savefig(image, format="png", dpi=80)
            return image.getvalue()

    return ShownFigure


def _orders(
    ds: LanceIterableDataset,
    clump_sizes: Sequence[int | None],
    buffer_size: int | None,
    batch_size: int,
    rows: int | None,
) -> list[tuple[str, Int64Array, ShuffleQuality]]:
    """Title, positions and quality of each order that is drawn."""
    examples = _source_of(ds)
    seed, table_rows = examples.plan.order.seed or 0, examples.plan.order.rows
    fragment_rows = examples.source.shard_rows
    count = _count_of(rows, table_rows, _MAX_DRAWN)
    found = []
    if not 1 <= len(clump_sizes) <= 7:
        raise ValueError(f"`clump_sizes` must have 1 to 7 clump sizes: got {list(clump_sizes)}")
    if buffer_size is not None:
        num_shards = int((fragment_rows > 0).sum())
        drawn = _buffer_shuffled(table_rows, buffer_size, seed, num_shards)
        order = np.fromiter(islice(drawn, count), dtype=np.int64, count=count)
        quality = quality_of_positions(
            order, table_rows=table_rows, batch_size=batch_size, fragment_rows=fragment_rows
        )
        found.append((f"buffer of {buffer_size:,} rows", order, quality))
    for clump_size in clump_sizes:
        shuffled = ds.shuffle(seed=seed, shuffle_clump_size=clump_size)
        title = "single rows" if clump_size is None else f"clumps of {clump_size:,}"
        quality = shuffle_quality(shuffled, batch_size, count)
        found.append((title, _source_of(shuffled).plan.rows(0, count), quality))
    return found


def _scatter(axis: "Axes", batches: npt.NDArray[np.float64], positions: Int64Array) -> None:
    axis.plot(batches, positions, ".", markersize=1.5, markeredgewidth=0, color="C0")
    axis.set_xlim(0, max(float(batches[-1]), 1e-9))
    axis.tick_params(labelsize=7)


def _caption(quality: ShuffleQuality) -> str:
    lines = {
        "neighbours corr.": f"{quality.neighbour_correlation:z.2f}",
        "order–position corr.": f"{quality.rank_correlation:z.2f}",
        "batches corr.": f"{quality.batch_correlation:z.2f}",
        "batch variance": f"{quality.batch_variance:.2f}",
        "clumps / batch": _number(quality.clumps_per_batch),
        "fragments / batch": _number(quality.fragments_per_batch),
    }
    return "\n".join(["batches", *(f"{name} {value}" for name, value in lines.items())])
