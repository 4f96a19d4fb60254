"""Time to the first step after a resume at step 10,000, of StatefulTrainer and of Trainer.

    python tests/benchmarks/bench_trainer.py [--rows 1000000] [--steps 10000] [--repeats 5]

Each time is that of a fresh process, from `train()` to the end of its first step, imports and the
building of the dataset and the model left out.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH = 64
MODES = ("fresh", "resume")


class _Done(Exception):
    pass


def measure(trainer_name: str, table: str, output: str, steps: int, mode: str) -> float:
    """Seconds to the first step; with mode "save", to the checkpoint at `steps`."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import hf_lance_stream as hls
    from hf_lance_stream.trainer import StatefulTrainer

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, vector: torch.Tensor) -> dict:
            return {"loss": self.layer(vector).square().mean()}

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if mode != "save":
                times.append(time.perf_counter())
                raise _Done
            if state.global_step == steps:
                control.should_save = control.should_training_stop = True

    times: list[float] = []
    ds = hls.from_lance(
        table, columns=["vector"], num_splits=64, shuffle_seed=1, shuffle_clump_size=64
    )
    args = TrainingArguments(
        output,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        per_device_train_batch_size=BATCH,
        accelerator_config={"dispatch_batches": False},
        dataloader_pin_memory=False,
    )
    trainer_class = StatefulTrainer if trainer_name == "StatefulTrainer" else Trainer
    trainer = trainer_class(
        Model(), args, train_dataset=ds.with_format("torch"), callbacks=[Stop()]
    )
    start = time.perf_counter()
    try:
        trainer.train(f"{output}/checkpoint-{steps}" if mode == "resume" else None)
        times.append(time.perf_counter())
    except _Done:
        pass
    return times[0] - start


def in_fresh_process(*arguments: str | int) -> float:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", json.dumps(arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr[-3000:])
    return float(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(measure(*json.loads(options.measure)))
        return
    import lance
    import numpy as np
    import pyarrow as pa

    with tempfile.TemporaryDirectory() as directory:
        table, output = f"{directory}/t.lance", str(Path(directory) / "run")
        values = pa.array(np.random.default_rng(0).random(options.rows * 4, dtype=np.float32))
        vectors = pa.FixedSizeListArray.from_arrays(values, 4)
        lance.write_dataset(pa.table({"vector": vectors}), table, max_rows_per_file=100_000)
        saving = in_fresh_process("StatefulTrainer", table, output, options.steps, "save")
        print(f"training {options.steps} steps and saving: {saving:.1f} s")
        runs = [(name, mode) for name in ("StatefulTrainer", "Trainer") for mode in MODES]
        times: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
        for _ in range(options.repeats):  # alternating, as the machine may be busy at times
            for name, mode in runs:
                seconds = in_fresh_process(name, table, output, options.steps, mode)
                times[name, mode].append(seconds)
        for (name, mode), seconds in times.items():
            print(
                f"{name:16} {mode:7} first step after {statistics.median(seconds):7.3f} s "
                f"({min(seconds):.3f} to {max(seconds):.3f})"
            )


if __name__ == "__main__":
    main()
