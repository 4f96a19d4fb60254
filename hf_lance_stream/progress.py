"""`progress`: a bar over rows or batches that knows its total over epochs, ranks and resumes."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from tqdm.auto import tqdm

from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.loader import LanceDataLoader
from hf_lance_stream.merge import innermost_state
from hf_lance_stream.plan import check_int
from hf_lance_stream.ranks import length_of, parts_of
from hf_lance_stream.resume import start_from
from hf_lance_stream.wrappers import changes_rows, only_source

Unit = Literal["rows", "batches"]


def progress(
    source: LanceDataLoader | LanceIterableDataset,
    epochs: int | None = None,
    *,
    unit: Unit | None = None,
    all_ranks: bool = True,
    rank: int | None = None,
    disable: bool | None = None,
    **kwargs: Any,
) -> "Progress":
    """Show a tqdm bar while iterating over a loader or dataset.

    Every iteration over what it returns is a pass over `source`, with the same items; states are
    those of `source`, as ever. The bar starts where the epoch and the loaded state of `source`
    are. Where the number of rows is unknown, as with a filter, the bar has no total and counts
    from its start.

    Args:
        source: a loader of `stateful_dataloader`, or a dataset.
        epochs: number of epochs of the whole training; one bar counts from the start of epoch 0 to
            the end of epoch ``epochs - 1``. Default: each pass has a bar of its own.
        unit: what is counted, "rows" or "batches". Default: rows, or batches of a loader whose
            length is unknown.
        all_ranks: count the rows of all ranks, taking them to be at the same step, or else those
            of this rank. A bar without a total counts this rank; batches are the same for all.
        rank: index of this process. Default: in the default process group, else of the part of
            the table that `source` reads.
        disable: whether to show no bar. Default: only rank 0 shows one.
        kwargs: further arguments of ``tqdm``, such as desc, leave, file or mininterval.

    Raises:
        ValueError: an argument does not fit.

    Example:
        >>> import hf_lance_stream as hls
        >>> ds = hls.from_lance(write_example_table(rows=100), num_splits=4, shuffle_seed=1)
        >>> bar = hls.progress(ds, epochs=2, disable=True)
        >>> for epoch in range(2):
        ...     ds.set_epoch(epoch)
        ...     for row in bar:
        ...         pass
        >>> bar.n, bar.total
        (200, 200)
    """
    if not isinstance(source, LanceDataLoader | LanceIterableDataset):
        raise ValueError(
            "`source` must be a loader of hls.stateful_dataloader or a dataset of Lance tables: "
            f"got {type(source).__name__}"
        )
    if unit not in (None, "rows", "batches"):
        raise ValueError(f'`unit` must be "rows", "batches" or None: got unit={unit!r}')
    is_loader = isinstance(source, LanceDataLoader)
    if unit == "batches" and not is_loader:
        raise ValueError('`unit` must be "rows" for a dataset: got unit="batches"')
    if unit == "rows" and is_loader and length_of(source.dataset) is None:
        raise ValueError(
            '`unit` must be "batches" for a loader whose number of rows is unknown, here for '
            f"{changes_rows(source.dataset._ex_iterable)}: got unit='rows'"
        )
    for name in ("total", "initial", "iterable"):
        if name in kwargs:
            raise ValueError(f"`{name}` is set by progress: leave it out")
    if epochs is not None:
        epochs = check_int("epochs", epochs, 1, 2**31)
    if rank is not None:
        rank = check_int("rank", rank, 0, 2**31)
    return Progress(source, epochs, unit, all_ranks, rank, disable, kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """What a pass counts.

    Attributes:
        size: rows per item.
        left: rows that this rank will yield in this pass; None if unknown.
        total: rows that this rank yields in the whole epoch; None if unknown.
        of_all: the same of all ranks.
        by_batch: count items instead of rows.
    """

    size: int
    left: int | None
    total: int | None
    of_all: int | None
    by_batch: bool

    @property
    def per_epoch(self) -> int | None:
        """Units of a whole epoch."""
        return -(-self.total // self.size) if self.total and self.by_batch else self.of_all

    def done_after(self, items: int) -> int | None:
        """Units of the epoch that are done after some items of this pass."""
        if self.left is None or self.total is None or self.of_all is None:
            return None
        left = max(0, self.left - items * self.size)
        if self.by_batch:
            return -(-self.total // self.size) - -(-left // self.size)
        return (self.total - left) * self.of_all // max(1, self.total)


class Progress:
    """What `progress` returns: an iterable over a loader or dataset, one pass each time.

    Attributes:
        n: rows or batches that are done.
        total: how many there will have been at the end; None if unknown.
        tqdm: the bar that is shown, from the start of the first pass on, for example for
            ``bar.tqdm.set_postfix(loss=0.5)``.
    """

    def __init__(
        self,
        source: LanceDataLoader | LanceIterableDataset,
        epochs: int | None,
        unit: Unit | None,
        all_ranks: bool,
        rank: int | None,
        disable: bool | None,
        options: dict[str, Any],
    ) -> None:
        self._source = source
        self._epochs = epochs
        self._unit = unit
        self._all_ranks = all_ranks
        self._rank = rank
        self._disable = disable
        self._options = options
        self.n = 0
        self.total: int | None = None
        self.tqdm: Any = None

    @property
    def _dataset(self) -> LanceIterableDataset:
        if isinstance(self._source, LanceIterableDataset):
            return self._source
        loaded: LanceIterableDataset = self._source.dataset
        return loaded

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._source, LanceDataLoader):
            current = self._next_pass(int(self._source.batch_size), self._source.drop_last)
        else:
            current = self._next_pass(1, False)
        self._show(current, self._dataset.epoch)
        return self._counted(iter(self._source), current, self._dataset.epoch)

    def iter(self, batch_size: int, drop_last_batch: bool = False) -> Iterator[Any]:
        """Iterate over batches of a dataset, as its `iter` does; the bar counts their rows.

        Args:
            batch_size: rows per batch.
            drop_last_batch: leave out a short last batch.
        """
        if isinstance(self._source, LanceDataLoader):
            raise ValueError("`iter` is for datasets: a loader has batches, iterate over it")
        batch_size = check_int("batch_size", batch_size, 1, 2**62)
        current = self._next_pass(batch_size, drop_last_batch)
        self._show(current, self._dataset.epoch)
        batches = self._source.iter(batch_size, drop_last_batch)
        return self._counted(batches, current, self._dataset.epoch)

    def close(self) -> None:
        """Let go of the bar. It does so by itself at the end of the last epoch."""
        if self.tqdm is not None:
            self.tqdm.close()
        self.tqdm = None

    def _counted(self, items: Iterable[Any], current: _Pass, epoch: int) -> Iterator[Any]:
        before = self.n  # of a bar without a total
        for count, item in enumerate(items, start=1):
            done = self._after(current, epoch, count)
            if done is None:
                done = before + count * (1 if current.by_batch else current.size)
            self.tqdm.update(done - self.n)
            self.n = done
            yield item
        if self._epochs is None or epoch + 1 >= self._epochs:
            self.close()

    def _after(self, current: _Pass, epoch: int, count: int) -> int | None:
        done, per_epoch = current.done_after(count), current.per_epoch
        if done is None or per_epoch is None or self._epochs is None:
            return done
        return epoch * per_epoch + done

    def _show(self, current: _Pass, epoch: int) -> None:
        """Have the bar show where a pass begins."""
        begin, per_epoch = self._after(current, epoch, 0), current.per_epoch
        self.total = None
        if begin is not None and per_epoch is not None:
            self.total = per_epoch * (max(self._epochs, epoch + 1) if self._epochs else 1)
        if begin is None:
            begin = self.n if self.tqdm is not None else 0
        self.n = begin
        if self.tqdm is None:
            unit = " batches" if current.by_batch else " rows"
            options: dict[str, Any] = {"unit": unit} | self._options
            self.tqdm = tqdm(
                total=self.total, initial=begin, disable=not self._is_shown(), **options
            )
        elif not self.tqdm.disable:
            if self.tqdm.total != self.total:
                self.tqdm.reset(self.total)
                self.tqdm.total = self.total  # None leaves it as it was
            # Rows that were skipped over do not count for the speed.
            self.tqdm.initial += begin - self.tqdm.n
            self.tqdm.n = self.tqdm.last_print_n = begin
            self.tqdm.refresh()

    def _is_shown(self) -> bool:
        if self._disable is not None:
            return not self._disable
        if self._rank is not None:
            return self._rank == 0
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank() == 0
        return _part_of(self._dataset)[0] == 0

    def _next_pass(self, size: int, drop_last: bool) -> _Pass:
        ds = self._dataset
        total, done = length_of(ds), _rows_done(ds)
        if length_of(self._source) is None:  # of a loader with workers
            total = None
        is_loader = isinstance(self._source, LanceDataLoader)
        by_batch = is_loader and (self._unit == "batches" or total is None)
        if total is None or done is None:
            return _Pass(size=size, left=None, total=None, of_all=None, by_batch=by_batch)
        of_all = _rows_of_all_ranks(ds, total) if self._all_ranks else total
        left = total - done
        if drop_last:
            left, total = left // size * size, total // size * size
            of_all = total * (_part_of(ds)[1] if self._all_ranks else 1)
        return _Pass(size=size, left=left, total=total, of_all=of_all, by_batch=by_batch)


def _rows_done(ds: LanceIterableDataset) -> int | None:
    """Rows of the epoch before those of the next pass; None where a step of `ds` hides them."""
    starting = ds._starting_state_dict
    if starting is None or starting["epoch"] != ds.epoch:
        return 0
    examples = only_source(ds.prepared_source())
    if examples is None or changes_rows(ds._ex_iterable) is not None:
        return None
    try:
        state = innermost_state(starting["examples_iterable"])
    except ValueError:  # a step on tables is under way in a batch of its own
        return None
    start = start_from(state, examples.fingerprint, examples.plan)
    return len(examples.plan) - (len(start.plan) - start.position)


def _rows_of_all_ranks(ds: LanceIterableDataset, rows: int) -> int:
    """Rows of an epoch over all ranks where this one has `rows`."""
    examples = only_source(ds.prepared_source())
    if examples is None or len(examples.plan) != rows:
        return rows * _part_of(ds)[1]
    layout = examples.plan.layout
    return layout.epoch_rows if layout is not None else examples.plan.order.rows


def _part_of(ds: LanceIterableDataset) -> tuple[int, int]:
    """Rank and number of ranks as which `ds` is divided."""
    part = next(iter(parts_of(ds)), None) or (0, 1)
    if isinstance(part[0], int):
        return part
    ranks, sizes = zip(*part, strict=True)  # divided more than once
    return max(ranks), math.prod(sizes)
