"""Reading a table for a short time, as a training would: what `benching` measures."""

import time
from dataclasses import dataclass
from typing import Any

from hf_lance_stream.factory import dataset_of, examples_of
from hf_lance_stream.loader import LanceDataLoader, stateful_dataloader
from hf_lance_stream.plan import Options
from hf_lance_stream.source import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is tried.

    Attributes:
        shuffle_clump_size: neighbouring rows that the shuffle moves as one.
        read_budget: bytes read ahead.
        num_workers: worker processes.
    """

    shuffle_clump_size: int
    read_budget: int
    num_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One reading for a short time.

    Attributes:
        rows: rows read after the first batch.
        bytes: their size in memory.
        seconds: time that took.
        first_batch_seconds: time from the start to the first batch, with the start of workers.
        peak_bytes: the most memory this process had; None with workers, or where it is unknown.
    """

    rows: int
    bytes: int
    seconds: float
    first_batch_seconds: float
    peak_bytes: int | None = None

    @property
    def rows_per_second(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds if self.seconds else 0.0


class Reader:
    """Reads a table for a short time with a setting and a seed: a `Measure`.

    Args:
        source, batch_size, format, num_splits, seconds: as for `bench`.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        format: str | None,
        num_splits: int | None,
        seconds: float,
    ) -> None:
        self._source = source
        self._batch_size = batch_size
        self._format = format
        self._num_splits = num_splits
        self._seconds = seconds
        self.joins_batches: bool | None = None

    def __call__(self, setting: Setting, seed: int) -> Run:
        """Read until the time is over, in as many passes as that takes.

        Where the rows of a batch cannot be joined, as ragged ones and pictures, they stay rows.
        """
        if self.joins_batches is None:
            self.joins_batches = True
            try:
                return self._read(setting, seed)
            except (TypeError, RuntimeError, ValueError):
                self.joins_batches = False
        return self._read(setting, seed)

    def _read(self, setting: Setting, seed: int) -> Run:
        _forget_peak()
        began = time.perf_counter()
        loader = self._loader(setting, seed)
        more = len(loader.dataset) - self._batch_size  # rows of a pass after the first batch
        if more <= 0:
            raise ValueError(
                f"a pass must have more rows than a batch: got {len(loader.dataset)} rows and "
                f"batch_size={self._batch_size}"
            )
        rows = epoch = 0
        elapsed, first = 0.0, None
        # Passes over a small table begin too often for their starts to count for nothing.
        while first is None or (
            elapsed < self._seconds and time.perf_counter() - began < first + 2 * self._seconds
        ):
            loader.set_epoch(epoch)
            batches = iter(loader)
            next(batches)
            start = time.perf_counter()
            first = first if first is not None else start - began
            seen = 0
            for _ in batches:
                seen += self._batch_size
                if elapsed + time.perf_counter() - start >= self._seconds:
                    break
            elapsed += time.perf_counter() - start
            rows += min(seen, more)
            epoch += 1
        stats = loader.stats()
        return Run(
            rows=rows,
            bytes=int(rows * stats.bytes / max(1, stats.rows)),
            seconds=elapsed,
            first_batch_seconds=first,
            peak_bytes=None if setting.num_workers else _peak(),
        )

    def _loader(self, setting: Setting, seed: int) -> LanceDataLoader:
        options = Options(
            num_splits=self._num_splits,
            shuffle_seed=seed,
            shuffle_clump_size=setting.shuffle_clump_size,
        )
        examples = examples_of(
            self._source, options, None, None, None, setting.read_budget, "raise"
        )
        dataset = dataset_of(examples).with_format(self._format)
        more: dict[str, Any] = {} if self.joins_batches else {"collate_fn": as_rows}
        return stateful_dataloader(dataset, self._batch_size, setting.num_workers, **more)


def as_rows(rows: list[Any]) -> list[Any]:
    """A batch as a list of rows."""
    return rows


def _forget_peak() -> None:
    """Let the system count the peak of the memory of this process anew, where it can."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass


def _peak() -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            line = next(line for line in file if line.startswith("VmHWM:"))
    except OSError:
        return None
    return int(line.split()[1]) * 1024
