"""`stateful_dataloader`: a torchdata loader with the same batches for any number of workers."""

import logging
import multiprocessing
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.merge import innermost_state, merge_state_dicts
from hf_lance_stream.permutation import derive_key
from hf_lance_stream.plan import check_int, unlike_steps
from hf_lance_stream.processes import ByDill, WorkerInit
from hf_lance_stream.resume import start_from
from hf_lance_stream.splits import check_divisible
from hf_lance_stream.state import check_depth
from hf_lance_stream.stats import ReadStats
from hf_lance_stream.worker_states import check_worker_states, epoch_of, saved_workers
from hf_lance_stream.wrappers import changes_rows, only_source, sources

logger = logging.getLogger(__name__)

_PRELOAD = ["hf_lance_stream.preload"]
_NEVER = 2**31  # snapshots of workers are not needed where batches are counted


def stateful_dataloader(
    ds: LanceIterableDataset, batch_size: int, num_workers: int = 0, **kwargs: Any
) -> "LanceDataLoader":
    """A stateful loader of a Lance dataset.

    Its workers share whole batches: worker w of W makes the batches w, w + W, … of this rank. So
    the batches are the same, in content and order, for every number of workers, also more
    workers than splits. Where a step of the dataset does not keep one row per row (filter, take,
    interleave_datasets, …), they share splits instead; a log line says so.

    Args:
        ds: the dataset, after all transformations, divided by rank if there are several. A state
            loaded into it is where the loader starts.
        batch_size: rows per batch of this rank, at least 1.
        num_workers: worker processes; they are started by ``forkserver``. 0 reads in this one.
        kwargs: further arguments of torchdata's `StatefulDataLoader`, such as collate_fn,
            drop_last, pin_memory, prefetch_factor, persistent_workers.

    Raises:
        ValueError: for an argument that does not fit; the message names it.

    Example:
        >>> import hf_lance_stream as hls
        >>> ds = hls.from_lance(write_example_table(rows=100), num_splits=4, shuffle_seed=1)
        >>> loader = hls.stateful_dataloader(ds, batch_size=16)
        >>> len(loader), [len(batch["id"]) for batch in loader]
        (7, [16, 16, 16, 16, 16, 16, 4])
    """
    if not isinstance(ds, LanceIterableDataset):
        raise ValueError(
            "`ds` must be a dataset of Lance tables, from hls.from_lance or load_dataset("
            f'"lance_stream", …): got {type(ds).__name__}'
        )
    batch_size = check_int("batch_size", batch_size, 1, 2**31)
    num_workers = check_int("num_workers", num_workers, 0, 2**15)
    for name in ("shuffle", "sampler", "batch_sampler"):
        if kwargs.get(name):
            raise ValueError(
                f"`{name}` does not go with a dataset that has an order of its own: got "
                f"{name}={kwargs[name]!r}; shuffle with ds.shuffle(seed=…)"
            )
    if kwargs.get("in_order") is False:
        raise ValueError("`in_order` must be True: got in_order=False, which loses the order")
    context = kwargs.get("multiprocessing_context")
    if num_workers:
        if getattr(context, "get_start_method", lambda: context)() == "fork":
            raise ValueError(
                "`multiprocessing_context` must not be 'fork': Lance has been used in this "
                "process, and a process forked after that cannot read; leave it out, or use "
                "'forkserver' or 'spawn'"
            )
        if context is None:
            kwargs["multiprocessing_context"] = "forkserver"
        multiprocessing.set_forkserver_preload(_PRELOAD)
    for name in ("persistent_workers", "prefetch_factor", "timeout"):
        value = kwargs.get(name)
        if value and not num_workers:
            raise ValueError(f"`{name}` needs workers: got {name}={value!r}, num_workers=0")
    if num_workers and kwargs.get("prefetch_factor") is not None:
        check_int("prefetch_factor", kwargs["prefetch_factor"], 1, 2**31)
    if kwargs.get("timeout", 0) < 0:
        raise ValueError(f"`timeout` must not be negative: got timeout={kwargs['timeout']!r}")
    return LanceDataLoader(ds, batch_size, num_workers, **kwargs)


class LanceDataLoader(StatefulDataLoader):  # type: ignore[misc]
    """What `stateful_dataloader` returns.

    Where one row stays one row, this process counts the batches it delivers, and the state is
    that of the dataset, whatever the workers do. Elsewhere it is the dataset's own without
    workers, and torchdata's, with a snapshot of each worker, with them.
    """

    def __init__(
        self, ds: LanceIterableDataset, batch_size: int, num_workers: int, **kwargs: Any
    ) -> None:
        self._is_counted = changes_rows(ds._ex_iterable) is None
        self._pass: _Pass | None = None  # the running pass, or the last one
        self._finished_state: dict[str, Any] | None = None  # loaded: the next pass is empty
        self._loaded_raw: dict[str, Any] | None = None  # torchdata's, until a batch has come of it
        self._initial_epoch: int | None = None  # of the pass that workers were started for
        self._waiting = self._consuming = 0.0  # seconds
        self._seeds_itself = kwargs.get("generator") is None
        if self._seeds_itself:
            kwargs["generator"] = torch.Generator()
        if self._is_counted:
            kwargs["snapshot_every_n_steps"] = _NEVER
        if num_workers:
            kwargs["worker_init_fn"] = WorkerInit(kwargs.get("worker_init_fn"))
        shared = _sharing_batches(ds, batch_size)
        _check_workers(shared, num_workers)
        self._builds_batches = (
            self._is_counted
            and kwargs.get("collate_fn") in (None, default_collate)
            and shared.build_batches(batch_size, bool(kwargs.get("drop_last")))
        )
        if self._builds_batches:
            kwargs["collate_fn"] = _as_built
        elif num_workers and kwargs.get("collate_fn") is not None:
            kwargs["collate_fn"] = ByDill(kwargs["collate_fn"])
        with warnings.catch_warnings():  # torchdata 0.11 calls what torch 2.13 deprecates
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            super().__init__(shared, batch_size=batch_size, num_workers=num_workers, **kwargs)
        if shared._starting_state_dict is not None:
            self._refuse_dataset_state()
        _log_steps(shared, batch_size)

    @property
    def _auto_collation(self) -> bool:
        # Private: torch's loaders and workers ask it whether to fetch rows and collate them, or
        # to fetch what the dataset yields. A loader with a batch size collates, except here.
        return not self._builds_batches

    @property
    def _is_accelerate_prepared(self) -> bool:
        # Private: accelerate's `prepare` asks this before it would build another loader in place
        # of this one, which divides the rows a second time.
        from hf_lance_stream.accelerate import check_prepared

        check_prepared(self)
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        pass  # `prepare` also notes it

    @property
    def _asks_workers(self) -> bool:
        """Whether only the workers know where they are."""
        return self.num_workers > 0 and not self._is_counted

    def __bool__(self) -> bool:
        return True  # also where the length is unknown

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank.

        Raises:
            TypeError: when only iterating tells.
        """
        if self._asks_workers:
            raise TypeError("the number of batches is unknown: the workers share splits")
        rows, size = len(self.dataset), int(self.batch_size)
        return rows // size if self.drop_last else -(-rows // size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, also in workers that are alive."""
        self.dataset.set_epoch(epoch)
        self._let_go_of_other_epochs()

    def _let_go_of_other_epochs(self) -> None:
        """Forget a loaded state, and workers started from it, of another epoch than the next."""
        finished = self._finished_state
        if finished is not None and epoch_of(finished) != self.dataset.epoch:
            self._finished_state = None
        loaded = self._loaded_raw
        if loaded is not None and epoch_of(loaded) != self.dataset.epoch:
            self._loaded_raw = None
        waiting = self.next_iter_state
        is_other = waiting is not None and epoch_of(waiting) != self.dataset.epoch
        is_begun = self._initial_iter_for_state_dict and self._initial_epoch != self.dataset.epoch
        if is_other or is_begun:
            self._restart({})

    def _restart(self, raw: dict[str, Any]) -> None:
        super().load_state_dict(raw)
        if not raw:
            self.next_iter_state = None  # torchdata keeps it

    def __iter__(self) -> Iterator[Any]:
        ds = self.dataset
        if self._asks_workers:
            self._let_go_of_other_epochs()
            running = self._iterator is not None and not self._iterator._finished
            if running and self.next_iter_state is None and not self._initial_iter_for_state_dict:
                # Persistent workers would go on with the pass that was left.
                self._restart(dict(self._loaded_raw or {}))
            self._initial_epoch = ds.epoch
        if self.num_workers and self._iterator is not None and ds._starting_state_dict is not None:
            self._restart({})  # living workers do not have the state that was loaded
        if self._seeds_itself:  # not the global generator, whose draws a resume would shift
            self.generator.manual_seed(derive_key(torch.initial_seed(), ds.epoch) >> 1)
        if self._finished_state is not None:
            self._finished_state = None
            return iter(())
        self._pass = _Pass(ds) if self._is_counted else None
        return self._count(super().__iter__(), self._pass)

    def _count(self, batches: Iterator[Any], running: "_Pass | None") -> Iterator[Any]:
        asked = perf_counter()
        for batch in batches:
            given = perf_counter()
            if self.num_workers:  # the workers have gone on from what was loaded
                self.dataset._starting_state_dict = self._loaded_raw = None
            if running is not None:
                running.batches += 1
            yield batch
            self._waiting += given - asked
            asked = perf_counter()
            self._consuming += asked - given
        if self.num_workers:
            self.dataset._starting_state_dict = self._loaded_raw = None

    def stats(self) -> ReadStats:
        """What this process and its workers have read, and how long this process waited for it.

        It waited between asking for a batch and getting it, and worked until it asked again.
        """
        read: ReadStats = self.dataset.stats()
        return replace(
            read,
            waiting_seconds=self._waiting,
            consuming_seconds=self._consuming,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was yielded.

        Where workers share batches it is JSON, under 2 KB and 8 bytes per split. After the last
        batch it is the end of the epoch: a loader that loads it has an empty rest once, then
        whole epochs.
        """
        if self._finished_state is not None:
            return deepcopy(self._finished_state)
        if self._asks_workers:
            self._let_go_of_other_epochs()
        is_other = self._iterator is not None and self._initial_epoch != self.dataset.epoch
        if self._asks_workers and not is_other:  # or a pass of another epoch runs
            self._initial_epoch = self.dataset.epoch
            raw: dict[str, Any] = super().state_dict()
            return raw
        current, state = self._pass, {}
        if not self._is_counted:
            state = _state_at_epoch(self.dataset)
        elif current is None or current.epoch != self.dataset.epoch:
            state = _Pass(self.dataset).state_dict(self.batch_size)
        else:
            state = current.state_dict(self.batch_size)
        state["loader"] = {"num_workers": self.num_workers, "batch_size": self.batch_size}
        return state

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, allow_moved: bool = False
    ) -> None:
        """Continue at a saved position in the next pass; restores the epoch.

        A table that has another version by now is read at the saved one, as `load_state_dict` of
        the dataset says; the loader's length is that of it then.

        Args:
            state_dict: the state of a loader with the same settings on this rank, or a portable
                state, from `merge_state_dicts` or `gather_state_dict`, of any. An empty dict
                lets go of what was loaded.
            strict: refuse a state of another table, version, filter or order. If False, warn, and
                continue at the same place; workers that share splits refuse it all the same.
            allow_moved: accept a state of the same table at another place.

        Raises:
            FileNotFoundError: the saved version of the table is gone.
            ValueError: when the state does not fit; the message says how it can be made to.
        """
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"`state_dict` must be a dict: got {str(state_dict)[:100]!r}")
        check_depth(state_dict)
        raw: Mapping[str, Any] = {}
        finished = None
        if not state_dict:
            self.dataset._starting_state_dict = None
        else:
            self._check_saved_workers(state_dict)
            if "examples_iterable" in state_dict:
                saved = {name: value for name, value in state_dict.items() if name != "loader"}
                self._load_dataset_state(saved, strict, allow_moved)
            elif self._is_counted:
                merged = merge_state_dicts([state_dict])
                self.dataset.load_state_dict(merged, strict, allow_moved)
            elif not self._asks_workers:
                inner = state_dict.get("dataset_state") or {}
                self.dataset.load_state_dict(inner, strict, allow_moved)
            else:
                state = deepcopy(dict(state_dict))
                check_worker_states(state, self.dataset, allow_moved)
                self.dataset.set_epoch(epoch_of(state))
                raw, finished = ({}, state) if state.get("_iterator_finished") else (state, None)
        self._pass, self._finished_state, self._loaded_raw = None, finished, dict(raw) or None
        self._restart(dict(raw))

    def _check_saved_workers(self, state_dict: Mapping[str, Any]) -> None:
        saved = saved_workers(state_dict)
        if saved is not None and saved != self.num_workers:
            raise ValueError(
                f"the state was saved with num_workers={saved}, this loader has "
                f"num_workers={self.num_workers}: load what hls.merge_state_dicts([...]) makes of "
                "the states of all ranks"
            )

    def _load_dataset_state(self, saved: dict[str, Any], strict: bool, allow_moved: bool) -> None:
        with self.dataset.unchanged_on_failure():
            self.dataset.load_state_dict(saved, strict, allow_moved)
            if not self._asks_workers:
                return
            loaded, self.dataset._starting_state_dict = self.dataset._starting_state_dict, None
            assert loaded is not None
            if loaded["examples_iterable"] != self.dataset.prepared_source().state_dict():
                self._refuse_dataset_state()

    def _refuse_dataset_state(self) -> None:
        if self._asks_workers:
            raise ValueError(
                "workers that share splits cannot continue the state of a dataset with "
                f"{changes_rows(self.dataset._ex_iterable)}: got num_workers={self.num_workers}; "
                "load the state of a loader with as many workers, or use num_workers=0"
            )


def _as_built(batch: Any) -> Any:
    """The collate function of batches that are built as a whole."""
    return batch


class _Pass:
    """One pass of a loader whose workers share batches: where it started, how far it is."""

    def __init__(self, ds: LanceIterableDataset) -> None:
        self.epoch = ds.epoch
        self.batches = 0
        examples = only_source(ds.prepared_source())
        assert examples is not None
        starting = ds._starting_state_dict
        if starting is not None and starting["epoch"] == self.epoch:
            state = innermost_state(starting["examples_iterable"])
        else:
            state = examples._init_state_dict()
        start = start_from(state, examples.fingerprint, examples.plan)
        self._state: dict[str, Any] = deepcopy(state)
        start.write_to(self._state)  # it may have been that of all ranks
        self._position = start.position
        self._length = start.plan.stream_rows

    def state_dict(self, batch_size: int) -> dict[str, Any]:
        """The dataset's state after the batches so far, without wrappers."""
        state = {k: dict(v) if type(v) is dict else v for k, v in self._state.items()}
        state["position"] = min(self._position + self.batches * batch_size, self._length)
        return {"examples_iterable": state, "epoch": self.epoch}


def _state_at_epoch(ds: LanceIterableDataset) -> dict[str, Any]:
    """The state of the pass of the dataset's epoch, also when one of another epoch runs."""
    if ds._state_dict["epoch"] == ds.epoch:
        return ds.state_dict()
    state = {"examples_iterable": ds.prepared_source().state_dict(), "epoch": ds.epoch}
    return ds.with_sources(state)


def _sharing_batches(ds: LanceIterableDataset, batch_size: int) -> LanceIterableDataset:
    """`ds` with its workers sharing batches, at the same epoch and state."""
    starting, ds._starting_state_dict = ds._starting_state_dict, None
    try:
        shared = ds.with_batches(batch_size)
    finally:
        ds._starting_state_dict = starting
    shared._epoch = ds._epoch  # one number, so that ds.set_epoch reaches the loader
    shared._forgets_at_start = True
    if starting:
        shared.load_state_dict(starting)
    return shared


def _check_workers(ds: LanceIterableDataset, num_workers: int) -> None:
    """Refuse, before a process is started, workers that cannot share splits evenly."""
    for examples in sources(ds.prepared_source()):
        plan = examples.plan
        if num_workers and plan.layout is not None and examples.options.batch_size is None:
            check_divisible(plan.num_shards, num_workers, "num_workers", plan.order.rows)


def _log_steps(ds: LanceIterableDataset, batch_size: int) -> None:
    """Say it where another world size would have other rows in a step."""
    examples = only_source(ds._ex_iterable)
    layout = examples.plan.layout if examples is not None else None
    if examples is None or layout is None:
        return
    world_size = layout.num_splits // max(1, ds.num_shards)
    is_meant = examples.options.num_splits is not None or world_size > 1
    message = unlike_steps(layout, world_size, batch_size)
    if is_meant and message is not None:
        logger.warning(message)
