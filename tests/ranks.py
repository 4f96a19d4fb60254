"""What the tests of several ranks share: one design of an epoch, and the scripts of the README."""

import os
import re
import subprocess
import sys
from pathlib import Path

import lance
import oracle
import pyarrow as pa
import pytest
import torch.distributed as dist

ROWS, SPLITS, CLUMP, GLOBAL_BATCH, STEPS = 1010, 24, 16, 48, 21
README = Path(__file__).parent.parent / "README.md"

needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
)


def steps_of(epoch):
    """The ids of every global step of an epoch, as one process gets them, by the design."""
    rows = oracle.deal(oracle.cut(oracle.sequence(ROWS, CLUMP, 1, epoch), SPLITS, "drop"))
    return [rows[i : i + GLOBAL_BATCH] for i in range(0, len(rows), GLOBAL_BATCH)]


def script(name):
    """A script of the README, which has at most 25 lines, blank ones apart."""
    found = re.search(
        rf"<!-- script: {name} -->\n```python\n(.*?)^```$",
        README.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert found, name
    assert len([line for line in found[1].splitlines() if line.strip()]) <= 25
    return found[1]


def torchrun(directory, processes):
    """Run `train.py` of a directory; what it printed."""
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*command, f"--nproc_per_node={processes}", "train.py"],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return run.stdout


def write_numbers(directory):
    """The table of the README."""
    rows = [{"id": n, "x": n / 10} for n in range(1000)]
    lance.write_dataset(pa.Table.from_pylist(rows), str(directory / "numbers.lance"))
