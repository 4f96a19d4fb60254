"""Counters of the reading, cheap enough to be always on, across worker processes."""

from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.utils.data

from hf_lance_stream.html import html_table

_FIELDS = ("rows", "bytes", "chunks", "requests", "waiting", "consuming", "queue", "bad_rows")
_SLOTS = 65  # this process and 64 workers; more share slots


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadStats:
    """What has been read so far, all passes and workers together.

    Attributes:
        rows: rows read and handed to the consumer's side.
        bytes: their size in memory.
        chunks: reads they came in.
        requests: reads of the storage: requests to an object store, reads of local files.
        waiting_seconds: time in which the consumer waited for rows.
        consuming_seconds: time between, in which it worked on them.
        queue_depth: chunks that lay ready when the last one was taken, added over workers.
        bad_rows: rows that had another one put in their place; see ``on_bad_rows`` of
            `from_lance`.
    """

    rows: int = 0
    bytes: int = 0
    chunks: int = 0
    requests: int = 0
    waiting_seconds: float = 0.0
    consuming_seconds: float = 0.0
    queue_depth: int = 0
    bad_rows: int = 0

    @property
    def waiting_fraction(self) -> float:
        """Part of the time, in [0, 1], that the consumer waited: near 0, reading is no limit."""
        total = self.waiting_seconds + self.consuming_seconds
        return self.waiting_seconds / total if total else 0.0

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows, {self.bytes / 1e6:,.1f} MB in {self.chunks:,} chunks and "
            f"{self.requests:,} requests; waited {self.waiting_seconds:.2f} s for data, worked "
            f"{self.consuming_seconds:.2f} s ({self.waiting_fraction:.0%} waiting); "
            f"{self.queue_depth} chunks ready"
            + (f"; {self.bad_rows:,} bad rows replaced" if self.bad_rows else "")
        )

    def _repr_html_(self) -> str:
        return html_table(
            [
                ("Rows", f"{self.rows:,}"),
                ("Size", f"{self.bytes / 1e6:,.1f} MB"),
                ("Chunks, requests", f"{self.chunks:,}, {self.requests:,}"),
                ("Waited for data", f"{self.waiting_seconds:.2f} s"),
                ("Worked", f"{self.consuming_seconds:.2f} s"),
                ("Waiting", f"{self.waiting_fraction:.0%}"),
                ("Chunks ready", f"{self.queue_depth:,}"),
                ("Bad rows replaced", f"{self.bad_rows:,}"),
            ]
        )


def _new_values(slots: int) -> torch.Tensor:
    return torch.zeros((slots, len(_FIELDS)), dtype=torch.float64)


class Counters:
    """The counters of one reading process.

    They stay a tensor: torch moves its memory when a worker gets the dataset, and a numpy array
    made before that would still be of the memory that is freed then.
    """

    def __init__(self, slot: torch.Tensor | None = None) -> None:
        self._values = slot if slot is not None else _new_values(1)[0]
        self._lock = Lock()

    def add(self, rows: int, size: int, waited: float, queue: int) -> None:
        """Count a chunk that the consumer got after `waited` seconds."""
        self._add(rows=rows, bytes=size, chunks=1, waiting=waited)
        self._values[_FIELDS.index("queue")] = queue

    def requested(self, count: int) -> None:
        """Count requests to the storage; called by several threads."""
        self._add(requests=count)

    def bad_row(self) -> None:
        """Count a row that another one replaces; called by several threads."""
        self._add(bad_rows=1)

    def consumed(self, seconds: float) -> None:
        """Count the time the consumer worked on a chunk."""
        self._add(consuming=seconds)

    def _add(self, **counts: float) -> None:
        more = [counts.get(name, 0) for name in _FIELDS]
        with self._lock:
            self._values += torch.tensor(more, dtype=self._values.dtype)


class StatsBoard:
    """The counters of a dataset, in memory that its workers share once they are started.

    Args:
        values: float64, shape ``(slots, fields)``; new by default.
    """

    def __init__(self, values: torch.Tensor | None = None) -> None:
        self.values = values if values is not None else _new_values(_SLOTS)

    def counters(self) -> Counters:
        """Those of this process."""
        worker = torch.utils.data.get_worker_info()
        slot = 0 if worker is None else 1 + worker.id % (_SLOTS - 1)
        return Counters(self.values[slot])

    def __reduce__(self) -> tuple[Any, ...]:
        return StatsBoard, ()  # datasets send theirs to workers apart


def total_of(boards: Iterable[StatsBoard]) -> ReadStats:
    """All counters of some boards together; a board that several readers share counts once."""
    values = sum(board.values.sum(dim=0) for board in {id(b): b for b in boards}.values())
    total = dict(zip(_FIELDS, torch.as_tensor(values).tolist(), strict=True))
    return ReadStats(
        waiting_seconds=total.pop("waiting"),
        consuming_seconds=total.pop("consuming"),
        queue_depth=int(total.pop("queue")),
        **{name: int(value) for name, value in total.items()},
    )
