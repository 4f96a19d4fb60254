"""How fast a table can be read where it is, and what settings suit it."""

import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hf_lance_stream.bench_reader import Reader, Run, Setting
from hf_lance_stream.examples import DEFAULT_READ_BUDGET
from hf_lance_stream.plan import check_int
from hf_lance_stream.source import Source

CLUMP_SIZES = (1, 16, 64, 256, 1024)
READ_BUDGETS = (16 << 20, DEFAULT_READ_BUDGET, 256 << 20)
TOLERANCE = 0.1
"""A setting is as good as the fastest one if it is slower by no more than this part."""

_FEWEST_CLUMPS = 16  # of a table, for a clump size to be tried

Stage = Literal["cold", "clump", "budget", "workers"]
Measure = Callable[[Setting, int], Run]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What the runs of a setting were: medians, and how far they lie apart.

    Attributes:
        stage: what was varied: "clump", "budget" or "workers"; "cold" is the very first run.
        setting: what was tried.
        rows_per_second: median of the runs.
        lowest, highest: rows per second of the slowest and the fastest run.
        megabytes_per_second: median, of 10**6 bytes in memory.
        first_batch_seconds: median.
        peak_bytes: the most of all runs, or None.
        runs: number of runs.
    """

    stage: Stage
    setting: Setting
    rows_per_second: float
    lowest: float
    highest: float
    megabytes_per_second: float
    first_batch_seconds: float
    peak_bytes: int | None
    runs: int

    @classmethod
    def of(cls, stage: Stage, setting: Setting, runs: Sequence[Run]) -> "Figures":
        """Those of at least one run."""
        rates = [run.rows_per_second for run in runs]
        sizes = [run.bytes / run.seconds / 1e6 if run.seconds else 0.0 for run in runs]
        peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
        return cls(
            stage=stage,
            setting=setting,
            rows_per_second=statistics.median(rates),
            lowest=min(rates),
            highest=max(rates),
            megabytes_per_second=statistics.median(sizes),
            first_batch_seconds=statistics.median(run.first_batch_seconds for run in runs),
            peak_bytes=max(peaks) if peaks else None,
            runs=len(runs),
        )

    @property
    def spread(self) -> float:
        """How far the runs lie apart, as a part of their median."""
        apart = self.highest - self.lowest
        return apart / self.rows_per_second if self.rows_per_second else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """What suits the table.

    Attributes:
        setting: the settings.
        rows_per_second: what they gave.
        step_seconds: time of a training step from which on the loader keeps up with it.
        reasons: why, in sentences.
    """

    setting: Setting
    rows_per_second: float
    step_seconds: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """What `bench` returns.

    Attributes:
        cold: the very first run, which no other figure contains.
        figures: of all settings, in the order in which they were tried.
        recommendation: what suits the table.
        batch_size: rows per batch.
        joins_batches: whether the rows of a batch were joined; ragged ones cannot be.
    """

    cold: Figures
    figures: tuple[Figures, ...]
    recommendation: Recommendation
    batch_size: int
    joins_batches: bool = True


def bench(
    source: Source,
    *,
    batch_size: int = 64,
    format: str | None = "torch",
    clump_sizes: Sequence[int] | None = None,
    read_budgets: Sequence[int] | None = None,
    workers: Sequence[int] | None = None,
    num_splits: int | None = None,
    seconds: float = 2.0,
    rounds: int = 3,
    on_run: Callable[[str], None] = lambda text: None,
) -> Benchmark:
    """Read a table for a short time with several settings.

    First the clump sizes are tried, then with the best of them the read budgets, then with these
    the workers. The settings of a stage take turns, `rounds` times, back and forth, so that a
    machine that grows slower or faster is no advantage to one of them. Each run has its own seed.

    Args:
        source: the rows and columns.
        batch_size: rows per batch.
        format: of the batches: "torch", "numpy", "arrow" or None for python objects.
        clump_sizes: those to try. Default: `CLUMP_SIZES` that make at least 16 clumps.
        read_budgets: those to try, in bytes. Default: `READ_BUDGETS`.
        workers: numbers of workers to try. Default: 0, 2 and, with 8 processors or more, 4.
        num_splits: number of splits. Default: that of `from_lance`.
        seconds: how long each run takes at least, beside its start; more than 0.
        rounds: runs of each setting, at least 1.
        on_run: called before each run with what it tries, in words.

    Raises:
        ValueError: an argument does not fit, or there is nothing to read.
    """
    batch_size = check_int("batch_size", batch_size, 1, 2**31)
    rounds = check_int("rounds", rounds, 1, 1000)
    if not seconds > 0:
        raise ValueError(f"`seconds` must be more than 0: got seconds={seconds!r}")
    stages = stages_of(source.num_rows, clump_sizes, read_budgets, workers)
    reader = Reader(source, batch_size, format, num_splits, seconds)
    found = run_stages(stages, reader, rounds=rounds, batch_size=batch_size, on_run=on_run)
    return replace(found, joins_batches=bool(reader.joins_batches))


def stages_of(
    rows: int,
    clump_sizes: Sequence[int] | None,
    read_budgets: Sequence[int] | None,
    workers: Sequence[int] | None,
) -> dict[str, list[int]]:
    """What to try in each stage, in rising order: those given, or the defaults that fit."""
    processors = os.cpu_count() or 1
    fitting = [size for size in CLUMP_SIZES if size == 1 or size * _FEWEST_CLUMPS <= rows]
    given = {
        "clump": ("clump_sizes", clump_sizes or fitting, 1),
        "budget": ("read_budgets", read_budgets or READ_BUDGETS, 1),
        "workers": ("workers", workers or ([0, 2, 4] if processors >= 8 else [0, 2]), 0),
    }
    return {
        stage: sorted({check_int(name, value, low, 2**62) for value in values})
        for stage, (name, values, low) in given.items()
    }


def number_of_runs(stages: dict[str, list[int]], rounds: int) -> int:
    """How many runs `run_stages` does: of what has one value, only the clump size is measured."""
    counts = [len(values) for stage, values in stages.items() if stage == "clump" or values[1:]]
    return 1 + rounds * sum(counts)


def run_stages(
    stages: dict[str, list[int]],
    measure: Measure,
    *,
    rounds: int,
    batch_size: int,
    on_run: Callable[[str], None] = lambda text: None,
) -> Benchmark:
    """Try the settings stage by stage, each with what the stage before it chose.

    Args:
        stages: as from `stages_of`.
        measure: does one run of a setting with a seed.
        rounds: runs of each setting.
        batch_size: rows per batch, for the recommendation.
        on_run: called before each run.
    """
    budgets, workers = stages["budget"], stages["workers"]
    setting = Setting(
        shuffle_clump_size=stages["clump"][-1],
        read_budget=min(budgets, key=lambda budget: abs(budget - DEFAULT_READ_BUDGET)),
        num_workers=workers[0],
    )
    seeds = itertools.count()
    on_run("cold start")
    cold = Figures.of("cold", setting, [measure(setting, next(seeds))])
    found: list[Figures] = []
    reasons: list[str] = []
    stage: Stage
    for stage, name in _NAMES.items():
        settings = [_with(setting, name, value) for value in stages[stage]]
        if len(settings) == 1 and found:
            reasons.append(_only(stage, setting))
            continue
        runs: dict[Setting, list[Run]] = {one: [] for one in settings}
        for number in range(rounds):
            for one in settings if number % 2 == 0 else settings[::-1]:
                on_run(f"{_WORDS[stage]} {_value_in_words(stage, getattr(one, name))}")
                runs[one].append(measure(one, next(seeds)))
        figures = [Figures.of(stage, one, runs[one]) for one in settings]
        chosen, reason = choose(figures)
        setting = chosen.setting
        reasons.append(reason)
        found += figures
    rate = chosen.rows_per_second
    return Benchmark(
        cold=cold,
        figures=tuple(found),
        recommendation=Recommendation(
            setting=setting,
            rows_per_second=rate,
            step_seconds=batch_size / rate if rate else 0.0,
            reasons=tuple(reasons),
        ),
        batch_size=batch_size,
    )


_NAMES: dict[Stage, str] = {
    "clump": "shuffle_clump_size",
    "budget": "read_budget",
    "workers": "num_workers",
}
_WORDS: dict[Stage, str] = {"clump": "clumps of", "budget": "read budget", "workers": "workers:"}
_WHY: dict[Stage, str] = {
    "clump": "smaller clumps mix better",
    "budget": "a smaller budget takes less memory, in each worker",
    "workers": "each worker takes memory and a processor",
}


def choose(figures: Sequence[Figures]) -> tuple[Figures, str]:
    """The smallest value of a stage within `TOLERANCE` of the fastest, and why, in a sentence.

    Args:
        figures: of one stage, values rising.
    """
    best = max(figures, key=lambda one: one.rows_per_second)
    chosen = next(
        one for one in figures if one.rows_per_second >= (1 - TOLERANCE) * best.rows_per_second
    )
    stage = chosen.stage
    name = _NAMES[stage]
    if len(figures) == 1:
        return chosen, _only(stage, chosen.setting)
    text = f"{name}={_value_in_words(stage, getattr(chosen.setting, name))}: "
    if chosen is best:
        others = [one for one in figures if one is not best]
        second = max(others, key=lambda one: one.rows_per_second)
        value = _value_in_words(stage, getattr(second.setting, name))
        times = best.rows_per_second / max(second.rows_per_second, 1e-9)
        text += f"the fastest, {times:.2f} times as fast as {value}"
    else:
        part = 1 - chosen.rows_per_second / best.rows_per_second
        value = _value_in_words(stage, getattr(best.setting, name))
        text += f"{part:.0%} slower than the fastest, {value}, and {_WHY[stage]}"
    noise = max(chosen.spread, best.spread)
    if noise > TOLERANCE:
        text += (
            f"; the runs of one setting lie up to {noise:.0%} apart, so a difference of less says "
            "little: try longer runs on a quiet machine"
        )
    return chosen, text


def _only(stage: Stage, setting: Setting) -> str:
    value = _value_in_words(stage, getattr(setting, _NAMES[stage]))
    return f"{_NAMES[stage]}={value}: the only one that was tried"


def _with(setting: Setting, name: str, value: int) -> Setting:
    values = {field: getattr(setting, field) for field in _NAMES.values()}
    return Setting(**(values | {name: value}))


def _value_in_words(stage: Stage, value: int) -> str:
    if stage != "budget":
        return str(value)
    return f"{value / (1 << 20):g} MiB" if value >= 1 << 20 else f"{value} bytes"
