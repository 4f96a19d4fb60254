"""What a loader costs: its start, and its state at every step; prints medians.

    python tests/benchmarks/bench_loader.py [--runs 7]

Starts: seconds from `iter(loader)` to the first batch with 4 workers; the first time in a process
the server of the workers imports its libraries, after that it has them. State: the seconds of one
`loader.state_dict()`, the median over a pass, against those of one step of a loader that yields 32
text rows of 1 KB, the mean over a pass that takes no state. The runs alternate; the first starts
are each in a fresh process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from itertools import islice
from pathlib import Path

import tables

import hf_lance_stream as hls

ROWS, BATCH, STEPS = 64_000, 32, 500
OPTIONS = {"num_splits": 32, "shuffle_seed": 1, "shuffle_clump_size": 64}


def first_batch(path: Path, workers: int, after: int = 0) -> float:
    """Seconds to the first batch, and to the state after `after` batches if there are some."""
    loader = hls.stateful_dataloader(hls.from_lance(path, **OPTIONS), BATCH, workers)
    if after:
        state = hls.stateful_dataloader(hls.from_lance(path, **OPTIONS), BATCH).state_dict()
        state.pop("loader")
        state["examples_iterable"]["position"] = after * BATCH
        loader.load_state_dict(state)
    begin = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - begin


def step(path: Path, workers: int, wrapped: bool) -> tuple[float, float]:
    """Seconds of one step, and of one state."""
    ds = hls.from_lance(path, **OPTIONS)
    if wrapped:
        ds = ds.filter(lambda row: True)
    loader = hls.stateful_dataloader(ds, BATCH, workers)
    batches = iter(loader)
    for _ in islice(batches, 50):
        pass
    begin = time.perf_counter()
    for _ in islice(batches, STEPS):
        pass
    of_step = (time.perf_counter() - begin) / STEPS
    states = []
    for _ in islice(batches, STEPS):
        begin = time.perf_counter()
        loader.state_dict()
        states.append(time.perf_counter() - begin)
    return of_step, statistics.median(states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--first", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    if options.first:
        print(json.dumps(first_batch(options.first, 4)))
        return
    found: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="bench_loader_") as directory:
        path = Path(directory) / "text.lance"
        tables.write_lance("text", ROWS, path)
        first_batch(path, 4)  # starts the server
        for run in range(options.runs):
            if run < max(3, options.runs // 2):
                command = [sys.executable, "-W", "ignore", __file__, "--first", str(path)]
                output = subprocess.run(command, check=True, capture_output=True, text=True)
                found["first batch, 4 workers, first time"].append(json.loads(output.stdout))
            found["first batch, 4 workers, after that"].append(first_batch(path, 4))
            found["first batch, 4 workers, resumed in the middle"].append(
                first_batch(path, 4, after=1000)
            )
            found["first batch, no workers"].append(first_batch(path, 0))
            for workers in (0, 2):
                for wrapped in (False, True):
                    name = f"{workers} workers{', under filter' if wrapped else ''}"
                    of_step, of_state = step(path, workers, wrapped)
                    found[f"step, {name}"].append(of_step)
                    found[f"state_dict(), {name}"].append(of_state)
                    shares[name].append(of_state / of_step)
    for name, values in found.items():
        scale, unit = (1e6, "µs") if "step" in name or "state" in name else (1, "s")
        low, middle, high = (f(values) * scale for f in (min, statistics.median, max))
        print(f"{name:48} {middle:10.3f} {unit}   ({low:.3f} to {high:.3f})")
    for name, values in shares.items():
        print(f"{'state_dict() / step, ' + name:48} {statistics.median(values):10.2%}")


if __name__ == "__main__":
    main()
