"""What the ranks of `test_trainer_torchrun.py` do: module functions, as processes import them."""

import multiprocessing

import lance
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from jobs.trainer_runs import arguments, dataset, train
from transformers import Trainer

import hf_lance_stream as hls
from hf_lance_stream.trainer import StatefulTrainer


def trainings(rank, table, specs):
    """One training after the other; `specs` are (output, options), the same on every rank."""
    return [train(table, output, **options) for output, options in specs]


def refused(rank, world_size, table, output):
    """The messages of trainings that must not begin."""

    def natural(ds):
        return hls.from_lance(table)  # 4 fragments of 250 rows and one of 10

    def other_ranks(ds):
        return ds.shard(world_size, 0)

    def own_rank(ds):
        return ds.shard(world_size, rank)

    def keeps(ds):
        return dataset(table, tail="keep", num_splits=960)

    found = {}
    for build in (natural, other_ranks, own_rank, keeps):
        try:
            run = train(table, output, build=build, max_steps=2)
            found[build.__name__] = run["seen"]
        except ValueError as error:
            found[build.__name__] = str(error)
        dist.barrier()
    return found


# Ragged token lists.


def make_ragged(path, rows, rows_per_file=25):
    """A table of token lists of 1 to 7 tokens, the first of which is the number of the row."""
    lists = [[n] * (n % 7 + 1) for n in range(rows)]
    table = pa.table({"tokens": pa.array(lists, pa.list_(pa.int64())), "id": np.arange(rows)})
    lance.write_dataset(table, str(path), max_rows_per_file=rows_per_file)
    return str(path)


def pad(rows):
    """A padding collator."""
    tokens = [torch.as_tensor(row["tokens"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-1)
    return {"tokens": padded, "labels": torch.tensor([row["id"] for row in rows])}


class Ragged(torch.nn.Module):
    """Takes padded tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def forward(self, tokens, labels=None):
        if self.training:
            assert (tokens[:, 0] == labels).all()
            self.seen.append(labels.tolist())
        out = self.layer(tokens.clamp(min=0).float().sum(1, keepdim=True) / 1000)
        return {"loss": out.square().mean(), "logits": out, "first": tokens[:, 0]}


def ragged_training(rank, path, output, stock, dispatch, workers, num_splits):
    """Ids seen in two epochs, and of an evaluation, or the error."""
    multiprocessing.set_forkserver_preload(["hf_lance_stream.preload", "transformers.trainer"])
    options = arguments(
        output,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        num_train_epochs=2,
        accelerator_config={"dispatch_batches": dispatch},
        dataloader_num_workers=workers,
        dataloader_multiprocessing_context="forkserver" if stock and workers else None,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    trainer = (Trainer if stock else StatefulTrainer)(
        Ragged(),
        options,
        train_dataset=hls.from_lance(
            path, num_splits=num_splits, shuffle_seed=1, batch_size=4 if stock else None
        ),
        eval_dataset=hls.from_lance(path),
        data_collator=pad,
    )
    try:
        trainer.train()
    except Exception as error:
        return str(error)
    seen = trainer.model.seen
    if stock:
        return seen
    output = trainer.predict(trainer.eval_dataset)
    with_filter = hls.from_lance(path).filter(lambda row: row["id"] % 2 == 0)
    filtered = trainer.predict(with_filter)
    return seen, output.label_ids.tolist(), output.metrics, filtered.label_ids.tolist()
