"""Evaluation: the rows of each rank, as Hugging Face `Trainer` and accelerate gather them."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin  # type: ignore[import-untyped]
from accelerate.state import GradientState  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.processes import WorkerInit
from hf_lance_stream.ranks import length_of, parts_of
from hf_lance_stream.wrappers import changes_rows


class _EvalRows(torch.utils.data.IterableDataset[Any]):
    """One rank's rows of each batch of a whole dataset; the last one is filled up evenly."""

    def __init__(self, ds: LanceIterableDataset, rank: int, world_size: int, rows: int) -> None:
        self.ds, self.rank, self.world_size, self.rows = ds, rank, world_size, rows
        self.counted = 0  # rows of the whole dataset in the last pass, in this process

    def __len__(self) -> int:
        return len(self.ds)

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self.ds)
        self.counted = 0
        while batch := list(islice(rows, self.rows)):
            self.counted += len(batch)
            size = -(-len(batch) // self.world_size)
            batch += batch[:1] * (size * self.world_size - len(batch))
            yield from batch[self.rank * size : (self.rank + 1) * size]


class EvalLoader(DataLoaderStateMixin, DataLoader):  # type: ignore[misc, type-arg]
    """Batches of this rank for Trainer's evaluation, which gathers them in the dataset's order.

    It tells accelerate how many rows of the last batch are real; the others are cut off after
    gathering. Where the number of rows is unknown they are counted, without workers.
    """

    def __init__(
        self,
        ds: LanceIterableDataset,
        batch_size: int,
        num_workers: int,
        rank: int,
        world_size: int,
        **options: Any,
    ) -> None:
        if world_size > 1 and parts_of(ds) != {None}:
            raise ValueError(
                "`eval_dataset` must be whole, without shard, split_dataset_by_node, rank and "
                f"world_size: got one divided as {sorted(map(str, parts_of(ds)))}"
            )
        self.total_batch_size = batch_size * world_size
        rows = _EvalRows(ds, rank, world_size, self.total_batch_size)
        if changes_rows(ds._ex_iterable) is None:  # so that workers share whole batches
            rows.ds = ds.with_batches(self.total_batch_size)
        elif length_of(ds) is None:
            num_workers = 0
        else:
            num_workers = min(num_workers, 1)
        if not num_workers:
            options.update(multiprocessing_context=None, prefetch_factor=None)
        elif options["multiprocessing_context"] is None:
            options["multiprocessing_context"] = "forkserver"
        self._rows = rows
        super().__init__(
            rows,
            batch_size,
            num_workers=num_workers,
            worker_init_fn=WorkerInit(None) if num_workers else None,
            generator=torch.Generator(),  # drawing from the global one would change the training
            **options,
        )
        self.gradient_state = GradientState()
        self._drop_last = False

    def __len__(self) -> int:
        return -(-len(self._rows) // self.total_batch_size)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.begin()
        try:
            batches = super().__iter__()
            batch = next(batches, None)
            while batch is not None:
                following = next(batches, None)
                self.end_of_dataloader = following is None
                if self.end_of_dataloader and length_of(self._rows) is None:
                    self.remainder = self._rows.counted % self.total_batch_size
                yield batch
                batch = following
        finally:
            self.end()
