"""Small trainings with Hugging Face Trainer, in this process or in ranks of a gloo group.

`train` runs one; `in_ranks` runs several, one after the other, in as many processes as asked.
"""

import multiprocessing
import os
import socket
import time
import traceback
import uuid

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainingArguments

import hf_lance_stream as hls
from hf_lance_stream.trainer import StatefulTrainer

SPLITS, CLUMP = 24, 16


class Model(torch.nn.Module):
    """Two layers and a dropout, so that weights tell of rows, their order and the random state."""

    def __init__(self, dropout=0.5):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.dropout, self.seen = dropout, []

    def forward(self, id, vector, score=None, noise=None):
        if self.training:
            self.seen.append(id.tolist())
        hidden = torch.nn.functional.dropout(self.first(vector / 1000), self.dropout, self.training)
        out = self.second(torch.tanh(hidden)).squeeze(1)
        target = score.float() / 250 if noise is None else noise
        return {"loss": torch.nn.functional.mse_loss(out, target), "logits": out, "rows": id}


class StopAt(TrainerCallback):
    """Save at a step and stop the training."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True


def dataset(table, **options):
    return hls.from_lance(
        table, **{"num_splits": SPLITS, "shuffle_seed": 1, "shuffle_clump_size": CLUMP} | options
    )


def arguments(output, **options):
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "label_names": ["score"],
        "logging_strategy": "no",
        "save_strategy": "no",
        "per_device_train_batch_size": 48,
        "num_train_epochs": 3,
    }
    return TrainingArguments(str(output), **defaults | options)


def train(table, output, *, stop=None, resume=None, **options):
    """One training; what came of it.

    Args:
        table: path of the table, or a dataset.
        output: the output directory of Trainer.
        stop: the step after which it saves and stops.
        resume: the step of the checkpoint to go on from; or True for the last one.
        options: `ds`, options of the dataset; `trainer`, the class; `build`, a function of the
            dataset; `dropout`, of the model; all others go to TrainingArguments.
    """
    trainer_class = options.pop("trainer", StatefulTrainer)
    given = {k: options.pop(k) for k in ("data_collator", "eval_dataset") if k in options}
    callbacks = [StopAt(stop), *options.pop("callbacks", ())]
    ds = options.pop("build", lambda ds: ds)(dataset(table, **options.pop("ds", {})))
    model = Model(options.pop("dropout", 0.5))
    trainer = trainer_class(
        model, arguments(output, **options), train_dataset=ds, callbacks=callbacks, **given
    )
    if type(resume) is int:
        resume = f"{output}/checkpoint-{resume}"
    trainer.train(resume_from_checkpoint=resume)
    return {
        "seen": model.seen,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "log": trainer.state.log_history,
    }


def flat(batches):
    """The ids of batches, in order."""
    return [row for batch in batches for row in batch]


def same_weights(first, second):
    return all(torch.equal(value, second["weights"][k]) for k, value in first["weights"].items())


# Ranks.


def in_ranks(world_size, function, directory, *args, timeout=150):
    """What ``function(rank, *args)`` returns on each rank, as torchrun would start them."""
    context = multiprocessing.get_context("forkserver")
    multiprocessing.set_forkserver_preload(["hf_lance_stream.preload", "hf_lance_stream.trainer"])
    directory = directory / uuid.uuid4().hex
    directory.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=_main, args=(function, rank, world_size, port, directory, args))
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            rank.start()
        end = time.monotonic() + timeout
        while any(rank.is_alive() for rank in ranks) and time.monotonic() < end:
            if any(rank.exitcode for rank in ranks):
                end = min(end, time.monotonic() + 5)  # the others may wait for it for ever
            time.sleep(0.02)
        errors = [path.read_text() for path in sorted(directory.glob("*.txt"))]
        codes = [rank.exitcode for rank in ranks]
        assert codes == [0] * world_size, "\n".join([f"exit codes {codes}", *errors])
        return [
            torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(world_size)
        ]
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()
            rank.close()


def _main(function, rank, world_size, port, directory, args):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    try:
        torch.save(function(rank, *args), directory / f"{rank}.pt")
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        (directory / f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
