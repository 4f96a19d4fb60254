"""Rates from an S3 server, with and without latency, and requests per 10 000 rows.

    python tests/benchmarks/bench_s3.py [--runs 3] [--rows 200000] [--delay 0.03]

The text table (1 KB a row, 8 fragments) is in moto, behind a proxy that adds `--delay` seconds to
every request, many at the same time. Each measurement is a pass in a fresh process, shuffled in
clumps of 64, 8 splits, python rows; the runs alternate.

moto is written in Python and answers a few hundred requests a second, so it is soon the limit. With
"fast" in its name a measurement has the proxy answer the reads of data files from memory; then the
reader is the limit, and the latency is harder to hide. Requests and bytes are those the proxy saw,
opening the table included; `at_once` is the most requests under way at once, `server_cpu_s` the
processor time of moto.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import tables
from runner import Comparison, Figures, Measurement, report

sys.path.insert(0, str(Path(__file__).parents[1]))
from s3 import S3

GOAL = 0.7
ORDER = {"num_splits": 8, "shuffle_seed": 1, "shuffle_clump_size": 64}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "read_budget of 8 MiB": {"read_budget": 8 << 20},
    "single rows": {"shuffle_clump_size": None},
}
FIGURES = (
    "rows_per_s",
    "after_first_per_s",
    "first_s",
    "requests_per_10k",
    "mb_per_10k",
    "at_once",
    "server_cpu_s",
)


@dataclass(frozen=True)
class Case:
    """A pass over the table: which server, which options, with or without the delay."""

    fast: bool
    setting: str
    delayed: bool

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.pair}, {'delay' if self.delayed else 'no delay'}"

    @property
    def pair(self) -> str:
        """The name without the delay."""
        return f"{'fast' if self.fast else 'moto'}, {self.setting}"


def one_pass(job: dict[str, Any]) -> Figures:
    """The rate of a pass: whole, from making the dataset on, and from the first row on."""
    import hf_lance_stream as hls

    def rows(uri: str) -> Any:
        return hls.from_lance(uri, storage_options=job["storage_options"], **job["options"])

    assert sum(1 for _ in rows(job["small"])) == tables.LEAST_ROWS  # warms the libraries
    begin = time.perf_counter()
    reading = iter(rows(job["uri"]))
    next(reading)
    first = time.perf_counter()
    count = 1 + sum(1 for _ in reading)
    end = time.perf_counter()
    return {
        "rows_per_s": count / (end - begin),
        "after_first_per_s": count / (end - first),
        "first_s": first - begin,
        "rows": count,
    }


def measure(s3: S3, case: Case, rows: int, delay: float) -> Figures:
    """The figures of one pass in a fresh process."""
    job = {
        "uri": s3.uri(f"text_{rows}.lance"),
        "small": s3.uri("small.lance"),
        "storage_options": s3.options,
        "options": ORDER | SETTINGS[case.setting],
    }
    s3.proxy.set(delay=delay if case.delayed else 0.0, keep=case.fast)
    before, cpu = s3.proxy.stats(), s3.server.cpu_seconds
    done = subprocess.run(
        [sys.executable, __file__, "--one", json.dumps(job)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
        check=True,
    )
    after = s3.proxy.stats()
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    if figures["rows"] != rows:
        raise RuntimeError(f"{case.name}: got {figures['rows']:.0f} of {rows} rows")
    each = 10_000 / rows
    return {
        **figures,
        "requests_per_10k": (after["requests"] - before["requests"]) * each,
        "mb_per_10k": (after["bytes"] - before["bytes"]) / 1e6 * each,
        "at_once": after["at_once"],
        "server_cpu_s": s3.server.cpu_seconds - cpu,
    }


def write(s3: S3, name: str, rows: int) -> None:
    """Write `rows` rows of the text table, in 8 fragments."""
    import lance

    made = tables.batches("text", rows)
    first = next(made)
    lance.write_dataset(
        pa.RecordBatchReader.from_batches(first.schema, chain([first], made)),
        s3.uri(name),
        storage_options=s3.options,
        max_rows_per_file=-(-rows // 8),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each measurement")
    parser.add_argument("--rows", type=int, default=200_000, help="rows, a multiple of 8")
    parser.add_argument("--moto-rows", type=int, default=50_000, help="the same without 'fast'")
    parser.add_argument("--delay", type=float, default=0.03, help="seconds added to a request")
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one_pass(json.loads(options.one))))
        return
    every = [Case(f, s, d) for f in (False, True) for s in SETTINGS for d in (False, True)]
    cases = [case for case in every if options.only in case.pair]
    found: dict[str, list[Figures]] = {case.name: [] for case in cases}
    load = os.getloadavg()[0]
    with S3() as s3:
        write(s3, "small.lance", tables.LEAST_ROWS)
        for rows in {options.rows, options.moto_rows}:
            write(s3, f"text_{rows}.lance", rows)
        if any(case.fast for case in cases):  # the proxy gets the files
            measure(s3, Case(True, "default", False), options.rows, 0.0)
        for run in range(options.runs):
            for case in cases:
                rows = options.rows if case.fast else options.moto_rows
                figures = measure(s3, case, rows, options.delay)
                found[case.name].append(figures)
                shown = ", ".join(f"{name} {figures[name]:,.4g}" for name in FIGURES)
                print(f"run {run + 1}: {case.name}: {shown}", flush=True)
    measurements = [Measurement(name=c.name, table="text", figures=FIGURES) for c in cases]
    comparisons = [
        Comparison(
            name=f"{c.pair}: {what}, {options.delay * 1000:g} ms / 0 ms",
            of=c.name,
            to=(Case(c.fast, c.setting, False).name,),
            goal=GOAL,
            figure=figure,
        )
        for c in cases
        if c.delayed
        for what, figure in (
            ("whole pass", "rows_per_s"),
            ("from the first row on", "after_first_per_s"),
        )
    ]
    print(f"\n{platform.platform()}, {os.cpu_count()} cores, load at the start {load:.1f}\n")
    print(report(measurements, comparisons, found))


if __name__ == "__main__":
    main()
