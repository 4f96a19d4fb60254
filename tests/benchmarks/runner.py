"""Run measurements in fresh processes, by turns, and compare their medians."""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import tables

HERE = Path(__file__).parent
LIBRARIES = ("hf_lance_stream", "datasets", "pylance", "lancedb", "torch", "torchdata", "pyarrow")
Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One thing that a fresh process measures; see `rate` and `start` in `readers.py`."""

    name: str
    table: str
    reader: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the reader."""
    kind: str = "rate"
    more: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the kind, such as `limit`."""
    imports: tuple[str, ...] = ("hf_lance_stream",)
    """Modules that are imported before the memory is looked at."""
    figures: tuple[str, ...] = ("rows_per_s",)
    """What is printed, out of what the process gives; the JSON file has all."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A figure of one measurement, alone or divided by that of another, and what it must reach."""

    name: str
    of: str
    to: tuple[str, ...] = ()
    """The best of these measurements is the divisor; none: the figure itself is compared."""
    goal: float | None = None
    direction: str = ">="
    figure: str = "rows_per_s"

    def result(self, found: dict[str, list[Figures]]) -> float | None:
        """The ratio of the medians, or the median; None where a measurement is missing."""
        own, other = median(found[self.of], self.figure), 1.0
        if self.to:
            others = [median(found[name], self.figure) for name in self.to]
            there = [value for value in others if value is not None]
            if not there:
                return None
            other = max(there) if self.direction == ">=" else min(there)
        return None if own is None else own / other

    def met(self, value: float) -> bool:
        """Whether the value reaches the goal."""
        goal = math.inf if self.goal is None else self.goal
        return {">=": value >= goal, "<=": value <= goal, "<": value < goal}[self.direction]


def median(runs: Iterable[Figures], figure: str) -> float | None:
    """The median of a figure, or None if there are no runs."""
    values = [run[figure] for run in runs]
    return statistics.median(values) if values else None


@dataclass(frozen=True, kw_only=True)
class Session:
    """Where the tables are and how the processes are started."""

    directory: Path
    size: str = "full"
    peers_python: str = sys.executable
    timeout: float = 900

    def run(self, measurement: Measurement) -> Figures:
        """Measure in a fresh process."""
        table, more = measurement.table, dict(measurement.more)
        if measurement.kind == "rate":
            more |= {"reader": measurement.reader, "options": measurement.options}
        job = {
            "kind": measurement.kind,
            "imports": measurement.imports,
            "path": str(tables.path_of(self.directory, table, self.size)),
            "small": str(tables.path_of(self.directory, table, "small")),
            "rows": tables.rows_of(table, self.size),
            **more,
        }
        python = self.python_for(measurement)
        output = self.call([python or "", str(HERE / "readers.py"), json.dumps(job)])
        return json.loads(output.strip().splitlines()[-1])

    def prepare(self, table: str, python: str) -> None:
        """Make a table, and read its files once so that they are in the page cache."""
        for size in (self.size, "small"):
            script = [python, str(HERE / "tables.py"), "--dir", str(self.directory)]
            self.call([*script, "--size", size, table])
            path = tables.path_of(self.directory, table, size)
            for file in (x for x in path.rglob("*") if x.is_file()):
                with file.open("rb") as stream:
                    while stream.read(1 << 24):
                        pass

    def call(self, command: Sequence[str]) -> str:
        """Run a command and return what it printed; RuntimeError with its last line if it fails."""
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=env, timeout=self.timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {self.timeout:g} s") from None
        if done.returncode:
            lines = [x for x in done.stderr.splitlines() if x.strip()]
            raise RuntimeError(f"exit code {done.returncode}: {lines[-1] if lines else ''}")
        return done.stdout

    def python_for(self, measurement: Measurement) -> str | None:
        """The Python that has the modules of a measurement: this one, else that of the peers."""
        for python in (sys.executable, self.peers_python):
            if all(has_module(python, name) for name in measurement.imports):
                return python
        return None


@cache
def has_module(python: str, name: str) -> bool:
    """Whether a Python has the package of a module, without importing it."""
    name = name.split(".")[0]
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def measure(
    session: Session, measurements: Sequence[Measurement], runs: int
) -> dict[str, list[Figures]]:
    """All figures of each measurement; the runs alternate, and one that fails is left out."""
    ready: list[Measurement] = []
    for measurement in measurements:
        python = session.python_for(measurement)
        if python is None:
            print(f"{measurement.name}: skipped, needs {', '.join(measurement.imports)}")
            continue
        try:
            if measurement.table not in {other.table for other in ready}:
                session.prepare(measurement.table, python)
            ready.append(measurement)
        except RuntimeError as error:
            print(f"{measurement.name}: no table: {error}", flush=True)
    found: dict[str, list[Figures]] = {measurement.name: [] for measurement in measurements}
    for run in range(runs):
        for measurement in ready:
            try:
                figures = session.run(measurement)
            except RuntimeError as error:
                print(f"run {run + 1}: {measurement.name}: failed: {error}", flush=True)
                continue
            found[measurement.name].append(figures)
            shown = ", ".join(f"{name} {figures[name]:,.4g}" for name in measurement.figures)
            print(f"run {run + 1}: {measurement.name}: {shown}", flush=True)
    return found


def report(
    measurements: Sequence[Measurement],
    comparisons: Sequence[Comparison],
    found: dict[str, list[Figures]],
) -> str:
    """The measurements and the comparisons as Markdown tables."""
    lines = ["| measurement | figure | median | min | max | runs |", "|---|---|---|---|---|---|"]
    for measurement in measurements:
        runs = found[measurement.name]
        for figure in measurement.figures if runs else ():
            values = [run[figure] for run in runs]
            numbers = (statistics.median(values), min(values), max(values))
            shown = " | ".join(number(value) for value in numbers)
            lines.append(f"| {measurement.name} | {figure} | {shown} | {len(values)} |")
    if comparisons:
        lines += ["", "| comparison | measured | goal | met |", "|---|---|---|---|"]
    for comparison in comparisons:
        value = comparison.result(found)
        unit = "x" if comparison.to else ""
        shown = "not measured" if value is None else f"{value:,.2f}{unit}"
        goal, met = "", ""
        if comparison.goal is not None:
            goal = f"{comparison.direction} {comparison.goal:g}{unit}"
            met = "" if value is None else "yes" if comparison.met(value) else "**no**"
        lines.append(f"| {comparison.name} | {shown} | {goal} | {met} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """A number to read: no decimals where it is large."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def main(
    description: str | None,
    measurements: Sequence[Measurement],
    comparisons: Sequence[Comparison] = (),
) -> None:
    """The command line of a benchmark: measure, print the tables, write the figures."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each measurement")
    parser.add_argument("--dir", type=Path, help="where the tables are kept; default: temporary")
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument("--quick", action="store_true", help="2 %% of the rows, to see all work")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--peers-python", default=sys.executable, help="Python with the peers")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of one process")
    parser.add_argument(
        "--tokens",
        choices=["tokens", "tokens_list"],
        default="tokens",
        help="the tokens as fixed-size lists (default) or as plain lists",
    )
    options = parser.parse_args()
    comparisons = [c for c in comparisons if options.only in c.name]
    needed = {name for c in comparisons for name in (c.of, *c.to)}
    measurements = [m for m in measurements if m.name in needed or options.only in m.name]
    measurements = [
        replace(m, table=options.tokens) if m.table == "tokens" else m for m in measurements
    ]
    if not measurements:
        parser.error(f"--only {options.only!r} is in the name of no measurement or comparison")
    with tempfile.TemporaryDirectory(prefix="benchmark_") as temporary:
        session = Session(
            directory=options.dir or Path(temporary),
            size="quick" if options.quick else "full",
            peers_python=options.peers_python,
            timeout=options.timeout,
        )
        load = os.getloadavg()[0]
        found = measure(session, measurements, options.runs)
    print(f"\n{platform.platform()}, {os.cpu_count()} cores, load at the start {load:.1f}\n")
    print(report(measurements, comparisons, found))
    if options.json:
        written = {
            "cores": os.cpu_count(),
            "load": load,
            "size": session.size,
            "versions": {name: metadata.version(name) for name in LIBRARIES},
            "found": found,
            "comparisons": {c.name: c.result(found) for c in comparisons},
        }
        options.json.write_text(json.dumps(written, indent=2) + "\n")
