"""A training job that may be killed at any time and goes on with any number of processes.

python train.py --table T --output DIR                            # one process
torchrun --nproc_per_node=4 train.py --table T --output DIR       # four, from where that one was

Every rank logs the rows of each of its steps. Every few steps rank 0 writes a checkpoint of the
model and of the data of all ranks, and a new start goes on at the newest one.
"""

import argparse
import datetime
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hf_lance_stream as hls


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", required=True, help="Lance table with id, vector and score")
    parser.add_argument("--output", required=True, type=Path, help="directory of the checkpoints")
    parser.add_argument("--record", type=Path, help="directory of the logs; default: --output")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=48, help="rows of a step, all ranks")
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers of each rank")
    parser.add_argument("--tail", choices=["drop", "pad"], default="drop")
    parser.add_argument("--save-every", type=int, default=5, help="steps from save to save")
    parser.add_argument("--kill-rank", type=int, help="for tests: kill this rank …")
    parser.add_argument("--kill-after", type=int, help="… when it has done so many steps")
    return parser.parse_args()


def newest_checkpoint(directory: Path) -> dict | None:
    files = sorted(directory.glob("step_*.pt"))
    return torch.load(files[-1], weights_only=True) if files else None


def write_checkpoint(directory: Path, step: int, checkpoint: dict) -> None:
    """A file that has the final name is whole, also after a crash in the middle of writing."""
    path = directory / f"step_{step:08}.pt"
    unfinished = path.with_suffix(".unfinished")
    torch.save({"step": step, **checkpoint}, unfinished)
    os.replace(unfinished, path)


def main() -> None:
    arguments = parse_arguments()
    rank, world_size = 0, 1
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
        rank, world_size = dist.get_rank(), dist.get_world_size()

    ds = hls.from_lance(
        arguments.table,
        num_splits=24,  # world sizes 1, 2, 3, 4, 6, 8, 12 and 24 see the same global batches
        shuffle_seed=1,
        shuffle_clump_size=16,
        tail=arguments.tail,
        rank=rank,
        world_size=world_size,
    )
    if arguments.global_batch % world_size:
        raise SystemExit(f"--global-batch must be divisible by the {world_size} processes")
    loader = hls.stateful_dataloader(
        ds.with_format("torch"),
        batch_size=arguments.global_batch // world_size,
        num_workers=arguments.workers,
    )

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    checkpoint = newest_checkpoint(arguments.output)
    if checkpoint is not None:
        step = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["data"])  # restores the epoch, too
    trained = model if world_size == 1 else DistributedDataParallel(model)

    def save() -> None:
        data = hls.gather_state_dict(loader)  # every rank takes part
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": data}
        if rank == 0:
            write_checkpoint(arguments.output, step, states)

    directory = arguments.record or arguments.output
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / f"rank_{rank}.jsonl", "a") as log:
        for epoch in range(loader.dataset.epoch, arguments.epochs):
            loader.set_epoch(epoch)
            for batch in loader:
                inputs, targets = batch["vector"] / 1000, batch["score"].float() / 250
                loss = torch.nn.functional.mse_loss(trained(inputs).squeeze(1), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                line = {"epoch": epoch, "step": step, "rank": rank, "ids": batch["id"].tolist()}
                log.write(json.dumps(line) + "\n")
                log.flush()
                if step % arguments.save_every == 0:
                    save()
                if (rank, step) == (arguments.kill_rank, arguments.kill_after):
                    os.kill(os.getpid(), signal.SIGKILL)
    save()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
