"""DataLoader workers simulated in this process, so that tests can afford many of them.

`in_process_workers` takes the place of what torchdata's loader starts for its workers. The
datasets are pickled as for a process, the batches come in the same order, and the states have
the same shape; `test_loader.py` holds the simulation against real processes.
"""

import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import cycle
from typing import Any
from unittest import mock

import torch.utils.data
from torch.utils.data._utils.fetch import _IterableDatasetFetcher
from torch.utils.data._utils.worker import WorkerInfo
from torchdata.stateful_dataloader import stateful_dataloader as torchdata_loader


@contextmanager
def in_process_workers() -> Iterator[None]:
    """Inside, a StatefulDataLoader with workers starts no process."""
    with mock.patch.object(
        torchdata_loader, "_StatefulMultiProcessingDataLoaderIter", _WorkersIterator
    ):
        yield


class _Worker:
    """One worker: its own copy of the dataset, and batches fetched ahead."""

    def __init__(self, loader: Any, index: int, pickled: bytes, state: dict | None) -> None:
        self.loader, self.index = loader, index
        self.dataset = pickle.loads(pickled)
        self.dataset._epoch = loader.dataset._epoch  # shared memory between processes
        self.info = WorkerInfo(
            id=index, num_workers=loader.num_workers, seed=index, dataset=self.dataset
        )
        if state is not None:
            with self._inside():
                self.dataset.load_state_dict(deepcopy(state["dataset_state"]))
        self.start()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with mock.patch.object(torch.utils.data, "get_worker_info", return_value=self.info):
            yield

    def start(self) -> None:
        """Begin a pass."""
        loader = self.loader
        with self._inside():
            self.fetcher = _IterableDatasetFetcher(
                self.dataset, loader._auto_collation, loader.collate_fn, loader.drop_last
            )
            self.state = self._snapshot()
        self._ahead: deque[tuple[Any, Any, dict]] = deque()
        for _ in range(loader.prefetch_factor):
            self._fetch()

    def _fetch(self) -> None:
        data, error = None, None
        with self._inside():
            try:
                data = self.fetcher.fetch(range(self.loader.batch_size))
            except Exception as caught:
                error = caught
            self._ahead.append((data, error, self._snapshot()))

    def _snapshot(self) -> dict:
        return {
            "worker_id": self.index,
            "dataset_state": deepcopy(self.dataset.state_dict()),
            "fetcher_state": {"dataset_iter_state": None, "fetcher_ended": self.fetcher.ended},
        }

    def next(self) -> Any:
        """The next batch; StopIteration at the end."""
        data, error, self.state = self._ahead.popleft()
        if error is not None:
            raise error
        self._fetch()
        return data


class _WorkersIterator:
    """What torchdata's loader has for its workers."""

    def __init__(self, loader: Any, next_iter_state: dict | None = None) -> None:
        self._interval = loader.snapshot_every_n_steps
        pickled = pickle.dumps(loader.dataset)
        saved = next_iter_state["_snapshot"] if next_iter_state else {}
        states = saved.get("_worker_snapshots", {})
        self._workers = [
            _Worker(loader, w, pickled, states.get(f"worker_{w}"))
            for w in range(loader.num_workers)
        ]
        self._begin(saved.get("_snapshot_step", 0), saved.get("_last_yielded_worker_id"))
        if next_iter_state:
            assert len(states) == len(self._workers)
            for _ in range(next_iter_state["_steps_since_snapshot"]):
                next(self)
            self._finished = next_iter_state["_iterator_finished"]

    def _begin(self, step: int = 0, last: int | None = None) -> None:
        self._finished, self._step = False, step
        self._active = set(range(len(self._workers)))
        self._turns = cycle(range(len(self._workers)))
        self._last = len(self._workers) - 1 if last is None else last
        for _ in range(self._last + 1):
            next(self._turns)
        self._take_snapshot()

    def _reset(self, loader: Any) -> None:
        for worker in self._workers:
            worker.start()
        self._begin()

    def _take_snapshot(self) -> None:
        self._snapshot = {
            "_snapshot_step": self._step,
            "_last_yielded_worker_id": self._last,
            "_main_snapshot": {"_num_workers": len(self._workers)},
            "_worker_snapshots": {f"worker_{w.index}": w.state for w in self._workers},
        }

    def __iter__(self) -> "_WorkersIterator":
        return self

    def __next__(self) -> Any:
        while self._active:
            worker = next(self._turns)
            if worker not in self._active:
                continue
            try:
                data = self._workers[worker].next()
            except StopIteration:
                self._active.remove(worker)
                continue
            self._last = worker
            self._step += 1
            if self._interval and self._step % self._interval == 0:
                self._take_snapshot()
            return data
        self._finished = True
        raise StopIteration

    def state_dict(self) -> dict:
        return deepcopy(
            {
                "_snapshot": self._snapshot,
                "_steps_since_snapshot": self._step - self._snapshot["_snapshot_step"],
                "_iterator_finished": self._finished,
            }
        )
