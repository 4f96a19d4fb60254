"""What the ranks of `test_accelerate.py` do: module functions, as processes import them."""

import warnings

import torch
import torch.distributed as dist
from accelerate import Accelerator

import hf_lance_stream as hls
from hf_lance_stream.accelerate import evaluation_dataloader, stateful_dataloader

EPOCHS = 3


def dataset(table, with_filter=False, **options):
    ds = hls.from_lance(
        table, **{"num_splits": 24, "shuffle_seed": 1, "shuffle_clump_size": 16} | options
    )
    if with_filter:  # of ranks' rows: uneven, as the ids of a clump are
        ds = ds.filter(lambda row: row["id"] % 64 < 20)
    return ds.with_format("torch")


def trainings(rank, table, specs):
    """One training after the other; `specs` are (output, options), the same on every rank."""
    return [train(table, output, **options) for output, options in specs]


def train(table, output, *, with_filter=False, workers=0, batch=24, stop=None, resume=None):
    """The ids of each step, and a random number after the last, or the error of a resume.

    It saves after `stop` steps and ends, or goes on from the state saved after `resume` steps.
    """
    accelerator = Accelerator(cpu=True)
    loader = stateful_dataloader(accelerator, dataset(table, with_filter), batch, workers)
    assert accelerator.prepare(loader) is loader
    torch.manual_seed(rank_seed(accelerator))
    if resume is not None:
        try:
            accelerator.load_state(f"{output}/{resume}")
        except ValueError as error:
            return str(error)
    seen = []
    for epoch in range(loader.dataset.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for part in loader:
            seen.append(part["id"].tolist())
            torch.rand(1)  # as a dropout would
            if len(seen) == stop:
                accelerator.save_state(f"{output}/{stop}")
                accelerator.wait_for_everyone()
                return {"seen": seen}
    return {"seen": seen, "drawn": torch.rand(1).item()}


def rank_seed(accelerator):
    """Another one for each process, so that a state of the wrong one shows."""
    return 10 + accelerator.process_index


def accumulation(rank, table):
    """At which batches of two epochs accelerate steps, with and without a known length."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    found = []
    for with_filter in (False, True):
        loader = stateful_dataloader(accelerator, dataset(table, with_filter), 48)
        model = torch.nn.Linear(1, 1)
        for epoch in range(2):
            loader.set_epoch(epoch)
            steps = []
            for _ in loader:
                with accelerator.accumulate(model):
                    steps.append(accelerator.sync_gradients)
            found.append(steps)
    return found


def prepared(rank, table):
    """What `Accelerator.prepare` makes of plain loaders: batches, and messages."""
    accelerator = Accelerator(cpu=True)
    world_size = accelerator.num_processes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = hls.stateful_dataloader(dataset(table, rank=rank, world_size=world_size), 24)
        loader = accelerator.prepare(own)
    seen = [batch["id"].tolist() for batch in loader]
    messages = []
    if world_size > 1:
        other = hls.from_lance(table, num_splits=24, rank=0, world_size=3)
        for make in (
            lambda: accelerator.prepare(hls.stateful_dataloader(dataset(table), 24)),
            lambda: stateful_dataloader(accelerator, other, 24),
            lambda: evaluation_dataloader(accelerator, other, 24),
        ):
            try:
                make()
            except ValueError as error:
                messages.append(str(error))
    with warnings.catch_warnings(record=True) as uneven:
        warnings.simplefilter("always")
        stateful_dataloader(accelerator, hls.from_lance(table), 24)
    texts = [[str(warning.message) for warning in found] for found in (caught, uneven)]
    return loader is own, seen, messages, *texts


def evaluations(rank, table, specs):
    """The ids that `gather_for_metrics` gives for each dataset, and the sizes of this rank's."""
    accelerator = Accelerator(cpu=True)
    found = []
    for divisor, rows, workers, batch in specs:
        ds = hls.from_lance(table, columns=["id"])
        if rows is not None:
            ds = ds.take(rows)
        if divisor:
            ds = ds.filter(lambda row, divisor=divisor: row["id"] % divisor == 0)
        loader = evaluation_dataloader(accelerator, ds.with_format("torch"), batch, workers)
        assert accelerator.prepare(loader) is loader
        passes, sizes = [], []
        for _ in range(2):
            ids = []
            for part in loader:
                ids += accelerator.gather_for_metrics(part["id"]).tolist()
                sizes.append(len(part["id"]))
            passes.append(ids)
        assert passes[0] == passes[1]
        found.append((passes[0], sizes))
    if dist.is_initialized():
        dist.barrier()
    return found
