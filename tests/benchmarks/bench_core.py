"""Start-up, memory and row rate of one process, side by side; prints medians and ratios.

    python tests/benchmarks/bench_core.py [--runs 5] [--dir DIRECTORY]

Every measurement runs in a fresh process; the runs alternate. The tables are made once, with a
fixed seed, in DIRECTORY (default: a temporary one).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

TEXT_ROWS = 200_000
SPLITS = {"num_splits": 8, "shuffle_seed": 1, "shuffle_clump_size": 64}


def make_tables(directory: Path) -> None:
    import lance

    for rows in (10_000, 10_000_000):
        path = directory / f"ints_{rows}.lance"
        if not path.exists():
            table = pa.table({"id": np.arange(rows)})
            lance.write_dataset(table, str(path), max_rows_per_file=rows // 10)
    path = directory / "text.lance"
    if not path.exists():
        words = np.random.default_rng(0).choice(2000, size=(TEXT_ROWS, 112))
        names = np.array([f"word{i:04d}" for i in range(2000)])
        texts = [" ".join(row) for row in names[words]]
        table = pa.table({"id": np.arange(TEXT_ROWS), "text": texts})
        lance.write_dataset(table, str(path), max_rows_per_file=TEXT_ROWS // 8)


def start(directory: Path, rows: int, at: float) -> dict[str, float]:
    """Seconds to build and to have the first row, after the imports; memory in MB after it."""
    import hf_lance_stream as hls

    path = str(directory / f"ints_{rows}.lance")
    list(islice(hls.from_lance(str(directory / "ints_10000.lance")), 1))  # warm the libraries
    Path("/proc/self/clear_refs").write_text("5")  # restart the peak
    base = peak_mb()
    begin = time.perf_counter()
    ds = hls.from_lance(path, **SPLITS)
    built = time.perf_counter()
    if at:
        state = ds.state_dict()
        state["examples_iterable"]["position"] = int(rows * at)
        ds.load_state_dict(state)
    rows_iter = iter(ds)
    next(rows_iter)
    first = time.perf_counter()
    return {"build_s": built - begin, "first_row_s": first - begin, "memory_mb": peak_mb() - base}


def peak_mb() -> float:
    """Peak resident memory since it was restarted."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) / 1024


def rate(directory: Path, reader: str) -> dict[str, float]:
    """Python rows per second of one pass over the text table."""
    path = str(directory / "text.lance")
    if reader.startswith("ours"):
        import hf_lance_stream as hls

        options = {**SPLITS, "shuffle_clump_size": None} if reader == "ours_single_rows" else SPLITS
        rows = hls.from_lance(path, **({} if reader == "ours_unshuffled" else options))
    elif reader == "builtin":
        import datasets

        rows = datasets.load_dataset(
            "lance", data_files=f"{path}/**", split="train", streaming=True
        )
    else:
        import lancedb
        from lancedb.streaming import StreamingDataset

        table = lancedb.connect(str(directory)).open_table("text")
        rows = StreamingDataset(table, num_splits=8, shuffle_seed=1, shuffle_clump_size=64)
    begin = time.perf_counter()
    count = sum(1 for _ in rows)
    return {"rows_per_s": count / (time.perf_counter() - begin)}


MEASUREMENTS = {
    "start, 10 k rows": ("start", 10_000, 0.0),
    "start, 10 M rows": ("start", 10_000_000, 0.0),
    "resume at 90 %, 10 M rows": ("start", 10_000_000, 0.9),
    "rows, ours, shuffled in clumps of 64": ("rate", "ours"),
    "rows, ours, shuffled by single rows": ("rate", "ours_single_rows"),
    "rows, ours, natural shards": ("rate", "ours_unshuffled"),
    "rows, built-in builder, unshuffled": ("rate", "builtin"),
    "rows, LanceDB StreamingDataset, clumps of 64": ("rate", "lancedb"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, *arguments = MEASUREMENTS[options.one]
        print(json.dumps({"start": start, "rate": rate}[kind](options.dir, *arguments)))
        return
    directory = options.dir or Path(tempfile.mkdtemp(prefix="bench_core_"))
    directory.mkdir(parents=True, exist_ok=True)
    make_tables(directory)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in MEASUREMENTS}
    for _ in range(options.runs):
        for name in MEASUREMENTS:
            command = [sys.executable, __file__, "--dir", str(directory), "--one", name]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                print(f"{name}: failed: {run.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            found[name].append(json.loads(run.stdout.strip().splitlines()[-1]))
    for name, runs in found.items():
        for figure in runs[0] if runs else ():
            values = [run[figure] for run in runs]
            print(
                f"{name:48} {figure:12} median {statistics.median(values):>12,.4f}"
                f"   (min {min(values):,.4f}, max {max(values):,.4f}, {len(values)} runs)"
            )


if __name__ == "__main__":
    main()
