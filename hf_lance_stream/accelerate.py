"""Hugging Face accelerate: loaders for its training loops and its evaluation.

Importing this module imports `accelerate`; importing the package does not.
"""

import warnings
from collections.abc import Iterator
from typing import Any

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.data_loader import DataLoaderStateMixin  # type: ignore[import-untyped]
    from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]
    from accelerate.utils import gather_object, send_to_device  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(
        'hf_lance_stream.accelerate needs accelerate: pip install "hf_lance_stream[trainer]"'
    ) from error

from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.evaluation import EvalLoader
from hf_lance_stream.loader import LanceDataLoader
from hf_lance_stream.loader import stateful_dataloader as _stateful_dataloader
from hf_lance_stream.rank_states import RankStates
from hf_lance_stream.ranks import length_of, part_of_rank, parts_of
from hf_lance_stream.stats import ReadStats

_END = object()


def stateful_dataloader(
    accelerator: Accelerator,
    ds: LanceIterableDataset,
    batch_size: int,
    num_workers: int = 0,
    **kwargs: Any,
) -> "AcceleratedLoader":
    """A loader for training with accelerate, which `save_state` and `load_state` include.

    Each process gets its own rows, as tensors on its device, and `accumulate` is told the end of
    an epoch. `accelerator.save_state` saves where the loader of every process stands, and
    `load_state` lets each go on with its next batch, at once; on another number of processes or
    workers it does so where one row stays one row. `accelerator.prepare` leaves it as it is.

    Args:
        accelerator: it tells the processes and saves the state. Each loader is one of the
            objects that are registered with it, in order.
        ds: the whole dataset, after all transformations; or one divided by these processes.
        batch_size: rows per batch of one process, at least 1.
        num_workers: worker processes of each process.
        kwargs: see `hf_lance_stream.stateful_dataloader`.

    Raises:
        ValueError: for a dataset divided in another way, an accelerator with split_batches, and
            what `hf_lance_stream.stateful_dataloader` refuses.

    Example:
        >>> import hf_lance_stream as hls
        >>> from accelerate import Accelerator
        >>> from hf_lance_stream.accelerate import stateful_dataloader
        >>> ds = hls.from_lance(write_example_table(rows=100), num_splits=4, shuffle_seed=1)
        >>> loader = stateful_dataloader(Accelerator(cpu=True), ds, batch_size=16)
        >>> [len(batch["id"]) for batch in loader]
        [16, 16, 16, 16, 16, 16, 4]
    """
    if accelerator.split_batches:
        raise ValueError(
            "`split_batches` must be False: got an Accelerator with split_batches=True; with Lance "
            "datasets `batch_size` is the rows of one process"
        )
    rank, world_size, copies = _data_rank(accelerator.state)
    part = part_of_rank(ds, rank, world_size)
    plain = _stateful_dataloader(part, batch_size, num_workers, **kwargs)
    loader = AcceleratedLoader(plain, accelerator)
    lengths = gather_object([length_of(plain)])
    if len(set(lengths)) > 1:
        warnings.warn(
            f"the processes have unequal numbers of batches, {lengths}, and may wait for each "
            'other: give the dataset a `num_splits` that their number divides, and tail="drop" or '
            '"pad"; or use accelerator.join_uneven_inputs',
            stacklevel=2,
        )
    accelerator.register_for_checkpointing(RankStates(loader, copies=copies))
    return loader


class AcceleratedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """What `stateful_dataloader` of this module returns: a loader, seen by accelerate.

    It reads one batch ahead, to know the last one; its state does not. It is no
    `torch.utils.data.DataLoader`, so that `Accelerator.prepare` does not build another of it.
    """

    def __init__(self, loader: LanceDataLoader, accelerator: Accelerator) -> None:
        self.loader = loader
        self.dataset: LanceIterableDataset = loader.dataset
        self.batch_size: int = loader.batch_size
        self.num_workers: int = loader.num_workers
        self.gradient_state = GradientState()
        self._device = accelerator.device if accelerator.device_placement else None
        self._non_blocking = accelerator.non_blocking
        self._drop_last = True  # each process has rows of its own: nothing is cut off in gathering
        self._given: tuple[int, dict[str, Any]] | None = None  # epoch and state after that batch

    def __len__(self) -> int:
        """Batches of a whole epoch on this process; TypeError when only iterating tells."""
        return len(self.loader)

    def __bool__(self) -> bool:
        return True  # also where the length is unknown

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.loader.set_epoch(epoch)

    def stats(self) -> ReadStats:
        """See `hf_lance_stream.loader.LanceDataLoader.stats`."""
        return self.loader.stats()

    def state_dict(self) -> dict[str, Any]:
        """The position of this process after the last batch that was yielded."""
        if self._given is not None and self._given[0] == self.dataset.epoch:
            return self._given[1]
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position in the next pass; restores the epoch."""
        self._given = None
        self.loader.load_state_dict(state_dict)

    def __iter__(self) -> Iterator[Any]:
        self._given = None
        return self._batches(iter(self.loader))

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        self.begin()
        try:
            batch = next(batches, _END)
            while batch is not _END:
                self._given = self.dataset.epoch, self.loader.state_dict()
                following = next(batches, _END)
                self.end_of_dataloader = following is _END
                if self._device is not None:
                    batch = send_to_device(batch, self._device, non_blocking=self._non_blocking)
                yield batch
                batch = following
            self._given = None  # the loader knows that the epoch has ended
        finally:
            self.end()


def evaluation_dataloader(
    accelerator: Accelerator,
    ds: LanceIterableDataset,
    batch_size: int,
    num_workers: int = 0,
    **kwargs: Any,
) -> "EvaluationLoader":
    """A loader with which ``accelerator.gather_for_metrics`` has every row once, in order.

    Each process gets its part of each batch of all processes, as tensors on its device. All get
    equally many batches, and the parts of one batch have equal sizes: the last batch is filled
    up with a row that `gather_for_metrics` cuts off again. Every process reads the whole dataset.

    Args:
        accelerator: it tells the processes.
        ds: the whole dataset, after all transformations.
        batch_size: rows per batch of one process, at least 1.
        num_workers: worker processes of each process. They are not used where a step changes the
            number of rows: the rows must be counted in this process.
        kwargs: further arguments of `torch.utils.data.DataLoader`, such as collate_fn.

    Raises:
        ValueError: for a dataset that is divided.
    """
    rank, world_size, _ = _data_rank(accelerator.state)
    if parts_of(ds) != {None}:
        raise ValueError(
            "`ds` must be whole, without shard, split_dataset_by_node, rank and world_size: got "
            f"one divided as {sorted(map(str, parts_of(ds)))} (rank, world_size); every process "
            "takes its part of each batch of the whole"
        )
    kwargs = {"multiprocessing_context": None, **kwargs}
    return EvaluationLoader(accelerator, ds, batch_size, num_workers, rank, world_size, **kwargs)


class EvaluationLoader(EvalLoader):
    """What `evaluation_dataloader` returns."""

    # Private: `Accelerator.prepare` asks this before it builds another loader in place of one.
    _is_accelerate_prepared = True

    def __init__(self, accelerator: Accelerator, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._device = accelerator.device if accelerator.device_placement else None
        self._non_blocking = accelerator.non_blocking

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            if self._device is not None:
                batch = send_to_device(batch, self._device, non_blocking=self._non_blocking)
            yield batch


def check_prepared(loader: LanceDataLoader) -> None:
    """What a plain loader does when `Accelerator.prepare` gets it: it stays as it is.

    Raises:
        ValueError: when it does not have the rows of this process.
    """
    rank, world_size, _ = _data_rank(AcceleratorState())
    if world_size > 1 and parts_of(loader.dataset) != {(rank, world_size)}:
        found = sorted(map(str, parts_of(loader.dataset)))
        raise ValueError(
            "the dataset of a loader given to Accelerator.prepare must be divided by its "
            f"processes: got {found} (rank, world_size), and this is {rank} of {world_size}; make "
            "it with hf_lance_stream.accelerate.stateful_dataloader(accelerator, ds, batch_size)"
        )
    warnings.warn(
        "Accelerator.prepare leaves a loader of hf_lance_stream.stateful_dataloader as it is: its "
        "tensors stay on the CPU and save_state does not include it; the loader of "
        "hf_lance_stream.accelerate.stateful_dataloader has both",
        stacklevel=4,
    )


def _data_rank(state: Any) -> tuple[int, int, int]:
    """Data-parallel rank and size, and the number of processes that read the same rows."""
    copies = 1
    config = state.parallelism_config
    if config is not None:
        if config.sp_size > 1:
            raise ValueError(
                "sequence parallelism deals the rows out in a way of its own, which is not "
                f"supported with Lance datasets: got sp_size={config.sp_size}"
            )
        copies = config.tp_size * config.cp_size
    return state.process_index // copies, state.num_processes // copies, copies
