"""How a dataset is iterated: rows, batches and a loader's batches, each with an exact state."""

from collections.abc import Iterator
from typing import Any

import dill
import torch
from datasets import IterableDataset
from datasets.iterable_dataset import _BaseExamplesIterable

from hf_lance_stream.convert import FORMATS, Converter
from hf_lance_stream.features import check_format
from hf_lance_stream.iterables import ConvertedIterable, RowsIterable, converted
from hf_lance_stream.plan import check_int
from hf_lance_stream.stats import ReadStats, StatsBoard, total_of
from hf_lance_stream.wrappers import (
    batch_exactly,
    only_converts,
    rows_below,
    sources,
)

_SHARED = ("_epoch", "_versions")  # tensors, which go to workers apart


class IteratedDataset(IterableDataset):  # type: ignore[misc]
    """The part of `LanceIterableDataset` that yields rows."""

    _pass_is_running = False
    _is_at_end = False  # the state that was loaded is at the end of its epoch
    _forgets_at_start = False  # lets go of a loaded state at the first row, not after the last
    _is_asked_for_batches = False  # by `iter`
    _built_batch: tuple[int, bool] | None = None  # size and drop_last of batches for a loader
    _starting_state_dict: dict[str, Any] | None

    def __iter__(self) -> Iterator[Any]:
        self._check_format()
        if self._starting_state_dict is not None and self._is_at_end:
            # The rest is empty. Who knows that may never ask for a row, and so end the pass.
            self._starting_state_dict = None
            return iter(())
        # Loaders ask for the state before the first row: not for that of the last pass.
        self._prepare_ex_iterable_for_iteration()
        return self._one_pass(super().__iter__())

    def iter(self, batch_size: int, drop_last_batch: bool = False) -> Iterator[Any]:
        """Iterate over batches of `batch_size` rows; the last one may be short.

        Args:
            batch_size: rows per batch.
            drop_last_batch: leave out a short last batch.
        """
        batch_size = check_int("batch_size", batch_size, 1, 2**62)
        self._check_format()
        batches = self._converted_batches(batch_size, drop_last_batch)
        if batches is None:
            batches = super().iter(batch_size, drop_last_batch)
        yield from self._one_pass(batches)

    def _check_format(self) -> None:
        # Not when the format is set: a column that it cannot have may be left out after that.
        check_format(self.features, self._formatting.format_type if self._formatting else None)

    def _converted_batches(self, batch_size: int, drop_last: bool) -> Iterator[Any] | None:
        """What `datasets` makes of tables of `batch_size` rows, made faster; None if it cannot."""
        format_type = self._formatting.format_type if self._formatting else None
        if format_type not in FORMATS or not only_converts(self._ex_iterable, self.features):
            return None
        self._is_asked_for_batches = True
        try:
            prepared = self._prepare_ex_iterable_for_iteration(batch_size, drop_last)
        finally:
            self._is_asked_for_batches = False
        converter = Converter(format_type, self.features, self._token_per_repo_id)
        source = next(sources(prepared))
        return (
            converted(source, converter, converter.batch, stop, table)
            for stop, table in prepared.iter_arrow()
        )

    def _one_pass(self, rows: Iterator[Any]) -> Iterator[Any]:
        """Yield all of `rows`; a pass that is over forgets the state it started from."""
        if self._starting_state_dict and self._starting_state_dict["epoch"] != self.epoch:
            self._starting_state_dict = None
        self._pass_is_running = True
        try:
            if self._forgets_at_start:
                for row in rows:
                    self._starting_state_dict = None
                    yield row
            else:
                yield from rows
            self._starting_state_dict = None
        finally:
            self._pass_is_running = False

    def _prepare_ex_iterable_for_iteration(
        self, batch_size: int = 1, drop_last_batch: bool = False
    ) -> _BaseExamplesIterable:
        starting, self._starting_state_dict = self._starting_state_dict, None
        try:
            prepared = super()._prepare_ex_iterable_for_iteration(batch_size, drop_last_batch)
        finally:
            self._starting_state_dict = starting
        prepared = self._read_directly(prepared)
        self._state_dict = {"examples_iterable": prepared._init_state_dict(), "epoch": self.epoch}
        if starting and self.epoch == starting["epoch"]:
            prepared.load_state_dict(starting["examples_iterable"])
            self._state_dict["examples_iterable"] = prepared._state_dict
        return prepared

    def _read_directly(self, prepared: _BaseExamplesIterable) -> _BaseExamplesIterable:
        """`prepared`, as `datasets` made it, with what reads the same faster and exactly."""
        if not self._is_asked_for_batches:
            rows = rows_below(
                prepared,
                self.features,
                self._formatting,
                self._token_per_repo_id,
                rows_of_batches=self._formatting is None,
            )
            if rows is not None and self._built_batch is not None:
                return rows.collated(*self._built_batch)
            if rows is not None:
                return rows
            format_type = self._formatting.format_type if self._formatting else None
            if format_type in ("numpy", "torch") and prepared.iter_arrow is not None:
                return ConvertedIterable(prepared, Converter(format_type, self.features))
        return batch_exactly(prepared)

    def build_batches(self, batch_size: int, drop_last: bool) -> bool:
        """Yield whole batches, collated as torch would collate the rows, if that is possible.

        Args:
            batch_size: rows per batch.
            drop_last: leave out a short last batch.
        """
        self._built_batch = None
        rows = self.prepared_source()
        if isinstance(rows, RowsIterable) and rows.can_collate:
            self._built_batch = (batch_size, drop_last)
        return self._built_batch is not None

    def prepared_source(self) -> _BaseExamplesIterable:
        """The iterables of this rank and epoch, at their start; the state stays as it is."""
        self._check_format()
        starting, self._starting_state_dict = self._starting_state_dict, None
        state = self._state_dict
        try:
            return self._prepare_ex_iterable_for_iteration()
        finally:
            self._starting_state_dict, self._state_dict = starting, state

    def __reduce__(self) -> tuple[Any, ...]:
        # With dill, so that lambdas and local functions reach spawned workers; the epoch and the
        # counters apart from it, so that multiprocessing keeps them in shared memory.
        state = {name: value for name, value in vars(self).items() if name not in _SHARED}
        boards = [examples.stats.values for examples in sources(self._ex_iterable)]
        content = dill.dumps(state, recurse=True)
        return _unpickle, (type(self), content, self._epoch, boards)

    def __setstate__(self, d: dict[str, Any]) -> None:
        super().__setstate__(d)
        self._pass_is_running = False  # a copy made during a pass does not run it

    def stats(self) -> ReadStats:
        """What has been read so far, by this process and its DataLoader workers."""
        return total_of(examples.stats for examples in sources(self._ex_iterable))


def _unpickle(
    cls: type[IteratedDataset], state: bytes, epoch: Any, boards: list[torch.Tensor]
) -> IteratedDataset:
    new: IteratedDataset = object.__new__(cls)
    new.__setstate__({**dill.loads(state), "_epoch": epoch})
    for examples, board in zip(sources(new._ex_iterable), boards, strict=True):
        examples.stats = StatsBoard(board)
    return new
