"""The demo: train, stop in mid-epoch, resume in a new process, compare.

`run` makes the table and trains on it twice: once without a stop, once up to a stop in mid-epoch.
Then it starts ``python -m hf_lance_stream.demo resume DIR``, which shares nothing with it but the
files in DIR, trains on from the checkpoint and compares.
"""

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import cross_entropy

from hf_lance_stream.dataset import LanceIterableDataset
from hf_lance_stream.factory import from_lance

if TYPE_CHECKING:
    from rich.console import Console

TABLE = "digits.lance"
CHECKPOINT = "checkpoint.pt"
RECORD = "uninterrupted.json"

_TRAIN_ROWS = 1440  # of 1,797: the first four fifths
_ROWS_PER_FRAGMENT = 300
_NUM_SPLITS = 8
_CLUMP_SIZE = 16
_EPOCHS = 5
_BATCH_SIZE = 32
_STEPS_PER_EPOCH = _TRAIN_ROWS // _BATCH_SIZE
_STOP_AFTER = 110  # steps: in epoch 2


def run(keep: Path | None = None) -> int:
    """Run the whole demo and print its report.

    Args:
        keep: directory for the table, the checkpoint and the record of the uninterrupted run,
            which stay there; default: a temporary directory.

    Returns:
        0 when the resumed run equals the uninterrupted one, else 1.

    Raises:
        FileExistsError: `keep` already holds one of these files.
        NotADirectoryError: `keep` is a file.
        ModuleNotFoundError: a package of the extra "demo" is missing.
    """
    console = _console()
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="hf_lance_stream_demo_") as directory:
            return _run_in(Path(directory), console)
    _check_free(keep)
    keep.mkdir(parents=True, exist_ok=True)
    code = _run_in(keep, console)
    console.print(
        f"\nKept {TABLE}, {CHECKPOINT} and {RECORD} in {keep}\n"
        "To resume and compare again:\n"
        f"  python -m hf_lance_stream.demo resume {shlex.quote(str(keep))}",
        markup=False,
    )
    return code


def _run_in(directory: Path, console: "Console") -> int:
    started = time.monotonic()
    fragments = write_table(directory / TABLE)
    console.print(
        f"1. Wrote the digits of scikit-learn to the Lance table {TABLE}:\n"
        f"   1,797 images in {fragments} fragments, {_TRAIN_ROWS:,} of them to train on, the rest "
        "to test."
    )
    uninterrupted = Training(directory / TABLE)
    uninterrupted.train()
    (directory / RECORD).write_text(json.dumps(uninterrupted.record()))
    console.print(
        f"2. Trained without a stop: {_EPOCHS} epochs, {len(uninterrupted.losses)} steps of "
        f"{_BATCH_SIZE} images from the stream,\n"
        f"   shuffled in clumps of {_CLUMP_SIZE} rows and dealt from {_NUM_SPLITS} splits."
    )
    stopped = Training(directory / TABLE)
    stopped.train(stop_after=_STOP_AFTER)
    state_bytes = stopped.save(directory / CHECKPOINT)
    epoch, step = divmod(_STOP_AFTER, _STEPS_PER_EPOCH)
    console.print(
        f"3. Trained again from the start, and stopped after {step * _BATCH_SIZE:,} images of "
        f"epoch {epoch}.\n"
        f"   Wrote {CHECKPOINT}: model, optimiser and dataset state ({state_bytes} bytes of JSON)."
    )
    code = _resume_in_new_process(directory)
    console.print(f"Took {time.monotonic() - started:.0f} seconds.")
    return code


def _check_free(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"`--keep` must name a directory: got {directory}, a file")
    taken = [name for name in (TABLE, CHECKPOINT, RECORD) if (directory / name).exists()]
    if taken:
        raise FileExistsError(
            f"`--keep` must name a directory without {taken[0]}, which is already in {directory}; "
            "name another directory or remove it"
        )


def _console() -> "Console":
    try:
        import rich.console
        import sklearn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the demo needs the package {error.name}, which is not installed: "
            'pip install "hf_lance_stream[demo]"',
            name=error.name,
        ) from error
    return rich.console.Console(highlight=False, soft_wrap=True)


# The table.


def write_table(path: Path) -> int:
    """Write scikit-learn's digits to a new Lance table and return its number of fragments.

    Its columns: ``id`` (int64, the row number), ``image`` (64 uint8 in [0, 16]), ``label``
    (int64, the digit), ``part`` ("train" or "test").
    """
    import lance
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = digits.data.astype(np.uint8)
    ids = np.arange(len(pixels))
    table = pa.table(
        {
            "id": ids,
            "image": pa.FixedSizeListArray.from_arrays(pixels.ravel(), pixels.shape[1]),
            "label": digits.target.astype(np.int64),
            "part": np.where(ids < _TRAIN_ROWS, "train", "test"),
        }
    )
    written = lance.write_dataset(table, path, max_rows_per_file=_ROWS_PER_FRAGMENT)
    return len(written.get_fragments())


def _stream(table: Path, part: str, **options: Any) -> LanceIterableDataset:
    """The images of one part as torch tensors."""
    columns = ["id", "image", "label"]
    dataset = from_lance(table, columns, filter=f"part = '{part}'", **options)
    return cast(LanceIterableDataset, dataset.with_format("torch"))


# Training.


@dataclass
class Training:
    """A model, its optimiser, the stream it learns from, and what it has seen.

    Attributes:
        table: path of the table.
        rows: for each step since the start or the resume, the ids of its rows.
        losses: the loss of each of these steps.
    """

    table: Path
    rows: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)  # sums in one fixed order, so that equal means bit for bit
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, 8, 8)),
            torch.nn.Conv2d(1, 32, kernel_size=3),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 3 * 3, 10),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.dataset = _stream(
            self.table,
            "train",
            num_splits=_NUM_SPLITS,
            shuffle_seed=42,
            shuffle_clump_size=_CLUMP_SIZE,
        )

    def train(self, stop_after: int | None = None) -> None:
        """Train to the end of the last epoch, or until `stop_after` steps are done."""
        for epoch in range(self.dataset.epoch, _EPOCHS):
            self.dataset.set_epoch(epoch)
            for batch in self.dataset.iter(_BATCH_SIZE):
                loss = cross_entropy(self.model(batch["image"] / 16), batch["label"])
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.rows.append(batch["id"].tolist())
                self.losses.append(loss.item())
                if len(self.losses) == stop_after:
                    return

    def save(self, path: Path) -> int:
        """Write a checkpoint; return the size of the dataset's state in bytes."""
        state = json.dumps(self.dataset.state_dict())
        checkpoint = {
            "steps": len(self.losses),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "dataset": state,
        }
        torch.save(checkpoint, path)
        return len(state)

    def load(self, path: Path) -> int:
        """Continue from a checkpoint; return the number of steps done before it."""
        checkpoint = torch.load(path, weights_only=True)
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.dataset.load_state_dict(json.loads(checkpoint["dataset"]))
        return int(checkpoint["steps"])

    def record(self) -> dict[str, Any]:
        """What `compare` needs of this training, as JSON data."""
        return {
            "rows": self.rows,
            "losses": self.losses,
            "weights": self.weights_digest(),
            "accuracy": self.accuracy(),
        }

    def weights_digest(self) -> str:
        """A SHA-256 digest of all weights, bit for bit."""
        digest = hashlib.sha256()
        for weights in self.model.state_dict().values():
            digest.update(weights.numpy().tobytes())
        return digest.hexdigest()

    def accuracy(self) -> float:
        """Share of the test images whose digit the model finds."""
        right = seen = 0
        with torch.no_grad():
            for batch in _stream(self.table, "test").iter(_BATCH_SIZE):
                found = self.model(batch["image"] / 16).argmax(dim=1)
                right += int((found == batch["label"]).sum())
                seen += len(found)
        return right / seen


# Resuming, in a process of its own.


def _resume_in_new_process(directory: Path) -> int:
    """Run `resume` in a new Python process that imports from where this one does."""
    command = [sys.executable, "-P", "-m", "hf_lance_stream.demo", "resume", str(directory)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = subprocess.run(command, env=env, check=False).returncode
    if code not in (0, 1):  # these it has explained
        print(f"the process that was to resume failed with exit code {code}", file=sys.stderr)
    return min(abs(code), 1)


def resume(directory: Path) -> int:
    """Train on from the checkpoint in `directory` and compare with the uninterrupted run.

    Args:
        directory: where a demo kept its files.

    Returns:
        0 when all is equal, 1 when something differs or the dataset refuses its state.

    Raises:
        FileNotFoundError: one of the files is not there.
    """
    console = _console()
    record = json.loads((directory / RECORD).read_text())
    training = Training(directory / TABLE)
    try:
        done = training.load(directory / CHECKPOINT)
    except ValueError as error:
        console.print(f"NOT RESUMED: {error}", markup=False)
        return 1
    training.train()
    console.print(f"4. Resumed from it in a new process (id {os.getpid()}), and compared:\n")
    checks = compare(record, training.record(), done)
    _print_table(console, checks, f"from step {done + 1}")
    if all(check.equal for check in checks):
        console.print(
            "EQUAL: the same rows in the same order, the same losses bit for bit,\n"
            "and the same weights as the run that never stopped."
        )
        return 0
    names = ", ".join(check.what for check in checks if not check.equal)
    console.print(f"NOT EQUAL: the resumed run differs in {names}.")
    return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing compared between the two runs, in words."""

    what: str
    uninterrupted: str
    resumed: str
    equal: bool


def compare(record: dict[str, Any], resumed: dict[str, Any], done: int) -> list[Check]:
    """Compare the record of a resumed training with that of the uninterrupted one.

    Args:
        record: `Training.record` of the uninterrupted run.
        resumed: that of the resumed one, which starts `done` steps later.
        done: steps done before the resume.
    """
    rows, losses = record["rows"][done:], record["losses"][done:]
    return [
        _compare_steps("row ids", rows, resumed["rows"], done),
        _compare_steps("losses", losses, resumed["losses"], done),
        Check(
            what="weights",
            uninterrupted=f"sha256 {record['weights'][:12]}",
            resumed=f"sha256 {resumed['weights'][:12]}",
            equal=record["weights"] == resumed["weights"],
        ),
        Check(
            what="test accuracy",
            uninterrupted=f"{record['accuracy']:.1%}",
            resumed=f"{resumed['accuracy']:.1%}",
            equal=record["accuracy"] == resumed["accuracy"],
        ),
    ]


def _compare_steps(what: str, expected: list[Any], found: list[Any], done: int) -> Check:
    """Compare step by step; show the first step that differs, else the last one."""
    pairs = list(zip_longest(expected, found))
    differing = [i for i, (a, b) in enumerate(pairs) if a != b]
    shown = differing[0] if differing else len(pairs) - 1

    def text(value: list[int] | float | None) -> str:
        if isinstance(value, list):
            value_text = " ".join(map(str, value[:2])) + " ..."
        else:
            value_text = "none" if value is None else f"{value:.9g}"  # exact for float32
        return f"step {done + shown + 1}: {value_text}"

    a, b = pairs[shown] if pairs else (None, None)
    equal = bool(pairs) and not differing  # nothing compared is not equality
    return Check(what=what, uninterrupted=text(a), resumed=text(b), equal=equal)


def _print_table(console: "Console", checks: list[Check], title: str) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title, "uninterrupted", "resumed", "equal", box=box.SIMPLE)
    for check in checks:
        verdict = "[green]yes[/]" if check.equal else "[bold red]NO[/]"
        table.add_row(check.what, check.uninterrupted, check.resumed, verdict)
    console.print(table)


def _main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hf_lance_stream.demo")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    command = commands.add_parser("resume", help="resume from a kept demo and compare again")
    command.add_argument("directory", type=Path, help="where `hf-lance-stream demo --keep` wrote")
    try:
        return resume(parser.parse_args(argv).directory)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(_main())
