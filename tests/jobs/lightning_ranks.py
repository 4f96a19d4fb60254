"""What the ranks of `test_lightning.py` do: module functions, as processes import them."""

import logging
import os
import warnings

import pytorch_lightning as pl
import torch
import torch.distributed as dist

import hf_lance_stream as hls
from hf_lance_stream.lightning import stateful_dataloader

OPTIONS = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(pl.LightningModule):
    """Notes the ids it gets, and saves at a step, or after an error in it."""

    def __init__(self, table, output, with_filter, workers, batch, stop, breaks_at):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.table, self.output, self.with_filter = table, output, with_filter
        self.workers, self.batch, self.stop, self.breaks_at = workers, batch, stop, breaks_at
        self.seen, self.validated = [], []

    def train_dataloader(self):
        ds = hls.from_lance(self.table, num_splits=24, shuffle_seed=1, shuffle_clump_size=16)
        if self.with_filter:
            ds = ds.filter(lambda row: row["id"] % 64 < 20)
        return stateful_dataloader(self.trainer, ds.with_format("torch"), self.batch, self.workers)

    def val_dataloader(self):
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        ds = hls.from_lance(
            self.table, num_splits=world_size, tail="keep", rank=rank, world_size=world_size
        )
        return [hls.stateful_dataloader(ds.with_format("torch"), 100)]

    def training_step(self, batch, index):
        if len(self.seen) == self.breaks_at:
            raise ZeroDivisionError
        self.seen.append(batch["id"].tolist())
        return (self.layer(batch["id"][:, None] / 1000) - torch.rand(1)).square().mean()

    def validation_step(self, batch, index):
        self.validated += batch["id"].tolist()

    def on_train_batch_end(self, outputs, batch, index):
        if self.trainer.global_step == self.stop:
            self.trainer.save_checkpoint(f"{self.output}/{self.stop}.ckpt")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveOnError(pl.Callback):
    """As Lightning's OnExceptionCheckpoint, which saves at the same place."""

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(f"{module.output}/{module.breaks_at}.ckpt")


def fit(
    table,
    output,
    *,
    with_filter=False,
    workers=0,
    batch=24,
    stop=None,
    breaks_at=None,
    resume=None,
    saves_after=False,
    **options,
):
    """The ids of each step and the weight at the end, or the error."""
    world_size = int(os.environ["WORLD_SIZE"])
    module = Module(table, output, with_filter, workers, batch, stop, breaks_at)
    if stop is not None:
        options["max_steps"] = stop
    options.setdefault("max_epochs", 3)
    if options.pop("validates", False) is False:
        options["limit_val_batches"] = 0
    strategy = "ddp" if world_size > 1 else "auto"
    trainer = pl.Trainer(
        devices=world_size, strategy=strategy, callbacks=[SaveOnError()], **OPTIONS | options
    )
    error = None
    try:
        trainer.fit(module, ckpt_path=resume and f"{output}/{resume}.ckpt")
    except (ValueError, ZeroDivisionError) as caught:
        error = str(caught)
    if saves_after:
        trainer.save_checkpoint(f"{output}/after.ckpt")
    return {
        "seen": module.seen,
        "weight": module.layer.weight.item(),
        "epochs": trainer.current_epoch,
        "validated": module.validated,
        "error": error,
    }


def fits(rank, table, specs):
    """One training after the other; `specs` are (output, options), the same on every rank."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    found = [fit(table, output, **options) for output, options in specs]
    if dist.is_initialized():
        dist.barrier()
    return found
