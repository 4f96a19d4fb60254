"""``bench``: what it measures adds up, and what it recommends follows from the figures.

No test here asserts a time: the figures of the recommendation are made up.
"""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from command import Command
from helpers import make_table
from s3 import S3

from hf_lance_stream import benching
from hf_lance_stream.bench_reader import Reader, Run, Setting
from hf_lance_stream.benching import (
    Figures,
    bench,
    choose,
    number_of_runs,
    run_stages,
    stages_of,
)
from hf_lance_stream.source import open_source

MIB = 1 << 20


def setting(clump: int = 64, budget: int = 64 * MIB, workers: int = 0) -> Setting:
    return Setting(shuffle_clump_size=clump, read_budget=budget, num_workers=workers)


def made_run(rate: float) -> Run:
    return Run(rows=int(rate), bytes=int(rate) * 100, seconds=1.0, first_batch_seconds=0.1)


def clumps(rates: dict[int, list[float]]) -> list[Figures]:
    return [
        Figures.of("clump", setting(clump), list(map(made_run, of_one)))
        for clump, of_one in rates.items()
    ]


class TestChoice:
    @pytest.mark.parametrize(
        ("rates", "chosen"),
        [
            ({1: 100, 16: 899, 64: 901, 256: 1000}, 64),  # 10 % slower at most
            ({1: 1000, 16: 1001}, 1),
            ({1: 1, 16: 2, 64: 4}, 64),
            ({1: 950, 16: 500, 64: 1000}, 1),
        ],
    )
    def test_is_the_smallest_value_within_a_tenth_of_the_fastest(
        self, rates: dict[int, int], chosen: int
    ) -> None:
        found, text = choose(clumps({clump: [rate] for clump, rate in rates.items()}))
        assert found.setting.shuffle_clump_size == chosen
        assert text.startswith(f"shuffle_clump_size={chosen}: ")

    def test_goes_by_medians(self) -> None:
        found, _ = choose(clumps({1: [10, 100, 2000], 16: [900, 1000, 1100]}))
        assert found.setting.shuffle_clump_size == 16

    def test_says_what_was_won_or_lost(self) -> None:
        _, text = choose(clumps({1: [500], 16: [1000]}))
        assert text == "shuffle_clump_size=16: the fastest, 2.00 times as fast as 1"
        _, text = choose(clumps({1: [950], 16: [1000]}))
        assert "5% slower than the fastest, 16, and smaller clumps mix better" in text

    def test_says_how_far_the_runs_lie_apart_where_that_matters(self) -> None:
        _, text = choose(clumps({1: [100], 16: [700, 1000, 1200]}))
        assert "the runs of one setting lie up to 50% apart" in text
        _, text = choose(clumps({1: [100], 16: [1000, 1020]}))
        assert "apart" not in text


def test_figures_are_medians_with_their_extremes() -> None:
    runs = [
        Run(rows=rows, bytes=rows * 1000, seconds=2.0, first_batch_seconds=first, peak_bytes=peak)
        for rows, first, peak in [(200, 0.3, 5), (400, 0.1, 9), (1000, 0.2, None)]
    ]
    found = Figures.of("clump", setting(), runs)
    assert (found.rows_per_second, found.lowest, found.highest) == (200, 100, 500)
    assert found.megabytes_per_second == pytest.approx(0.2)
    assert (found.first_batch_seconds, found.peak_bytes, found.runs) == (0.2, 9, 3)
    assert found.spread == 2.0


class TestStages:
    def test_each_goes_on_with_the_choice_of_the_one_before(self) -> None:
        """Clumps of 16 suffice, budgets do not matter, two workers are twice as fast as none."""
        seen: list[Setting] = []
        seeds: list[int] = []

        def measure(one: Setting, seed: int) -> Run:
            seen.append(one)
            seeds.append(seed)
            rate = min(one.shuffle_clump_size, 16) * 10.0 * (1 + min(one.num_workers, 2) / 2)
            return made_run(rate)

        stages = {"clump": [1, 16, 64], "budget": [16 * MIB, 64 * MIB], "workers": [0, 2, 4]}
        said: list[str] = []
        found = run_stages(stages, measure, rounds=2, batch_size=32, on_run=said.append)
        best = found.recommendation
        assert best.setting == setting(16, 16 * MIB, 2)
        assert best.rows_per_second == 320
        assert best.step_seconds == 0.1
        assert [text.split(":")[0] for text in best.reasons] == [
            "shuffle_clump_size=16",
            "read_budget=16 MiB",
            "num_workers=2",
        ]
        assert len(seen) == len(said) == number_of_runs(stages, 2) == 1 + 2 * 8
        assert len(set(seeds)) == len(seeds)  # no run reads what another one has read, in its order
        # They take turns, back and forth; the cold start is in no figure.
        assert [one.shuffle_clump_size for one in seen[1:7]] == [1, 16, 64, 64, 16, 1]
        assert found.cold.stage == "cold"
        assert [one.runs for one in found.figures] == [2] * 8

    def test_of_one_value_are_not_measured(self) -> None:
        stages = {"clump": [64], "budget": [64 * MIB], "workers": [0]}
        calls: list[Setting] = []

        def measure(one: Setting, seed: int) -> Run:
            calls.append(one)
            return made_run(10)

        found = run_stages(stages, measure, rounds=3, batch_size=5)
        assert len(calls) == number_of_runs(stages, 3) == 4
        assert [text.split(": ")[1] for text in found.recommendation.reasons] == [
            "the only one that was tried"
        ] * 3
        assert found.recommendation.step_seconds == 0.5

    def test_defaults_fit_the_table(self) -> None:
        assert stages_of(10, None, None, None)["clump"] == [1]
        assert stages_of(1024, None, None, None)["clump"] == [1, 16, 64]
        assert stages_of(10**6, None, None, None)["clump"] == list(benching.CLUMP_SIZES)
        assert stages_of(10, [64, 1, 64], [5], [0])["clump"] == [1, 64]

    def test_bad_values_are_named(self) -> None:
        for arguments, name in [
            (([0], None, None), "clump_sizes"),
            ((None, [0], None), "read_budgets"),
            ((None, None, [-1]), "workers"),
        ]:
            with pytest.raises(ValueError, match=f"`{name}` must be an integer"):
                stages_of(10, *arguments)


class TestReading:
    def test_counts_the_rows_and_bytes_that_were_read(self, table: str) -> None:
        source = open_source(table, columns=["id"])
        reader = Reader(source, 50, "torch", 4, 0.05)
        run = reader(setting(clump=16), 1)
        assert reader.joins_batches
        assert run.rows > 0
        assert run.rows % 50 == 0
        assert run.bytes == run.rows * 8
        assert run.seconds > 0
        assert run.first_batch_seconds > 0
        assert run.peak_bytes is None or run.peak_bytes > 1e6

    def test_ragged_rows_stay_rows(self, tmp_path: Path) -> None:
        ragged = pa.array([list(range(i % 7)) for i in range(300)])
        path = make_table(tmp_path / "t.lance", 300, 100, ["id"], extra={"x": ragged})
        reader = Reader(open_source(path), 16, "torch", None, 0.02)
        assert reader(setting(clump=1), 0).rows > 0
        assert reader.joins_batches is False
        assert reader(setting(clump=1, workers=1), 0).rows > 0

    def test_a_table_of_one_batch_is_refused(self, table: str) -> None:
        with pytest.raises(ValueError, match=r"more rows than a batch: got 1000 rows"):
            bench(open_source(table), batch_size=1000, seconds=0.01)

    def test_bad_arguments_are_named(self, table: str) -> None:
        source = open_source(table)
        for name, value in [("seconds", 0), ("rounds", 0), ("batch_size", 0)]:
            with pytest.raises(ValueError, match=f"`{name}` must be"):
                bench(source, **{name: value})


QUICK = ["--seconds", "0.02", "--rounds", "2", "--batch-size", "16"]


def test_the_json_document_says_what_was_measured(table: str, command: Command) -> None:
    options = ["--clumps", "1,16", "--read-budgets", "1M,64M", "--workers", "0", "--json"]
    found = command("bench", table, *QUICK, *options, "--columns", "id", "--filter", "id < 500")
    assert found.code == 0, found.err
    document = json.loads(found.out)
    assert (document["rows"], document["columns"]) == (500, ["id"])
    assert [(one["stage"], one["runs"]) for one in document["figures"]] == [
        ("clump", 2),
        ("clump", 2),
        ("budget", 2),
        ("budget", 2),
    ]
    for one in [document["cold"], *document["figures"]]:
        assert 0 < one["lowest"] <= one["rows_per_second"] <= one["highest"]
        assert one["megabytes_per_second"] == pytest.approx(one["rows_per_second"] * 8e-6, rel=0.05)
    best = document["recommendation"]
    assert best["setting"]["read_budget"] in (MIB, 64 * MIB)
    assert best["step_seconds"] == pytest.approx(16 / best["rows_per_second"])
    assert len(best["reasons"]) == 3


def test_the_report_names_the_settings_and_the_time_of_a_step(table: str, command: Command) -> None:
    found = command("bench", table, *QUICK, "--clumps", "16", "--workers", "0,1")
    assert found.code == 0, found.err
    for text in ("Cold start", "Clump sizes", "Read budgets", "Workers", "num_workers=", " ms on "):
        assert text in found.out


def test_an_object_store_is_read(command: Command) -> None:
    with S3() as s3:
        uri = s3.uri("pets.lance")
        make_table(uri, 500, 250, ["id"], storage_options=s3.options)
        options = [f"--storage-option={name}={value}" for name, value in s3.options.items()]
        before = s3.proxy.stats()["requests"]
        found = command(
            "bench",
            uri,
            *options,
            *QUICK,
            "--clumps",
            "16",
            "--read-budgets",
            "1M",
            "--workers",
            "0",
        )
        assert found.code == 0, found.err
        assert s3.proxy.stats()["requests"] > before
        assert "very-secret" not in found.out + found.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--clumps", "x"], "must be a number, or several"),
        (["--read-budgets", "1T"], "must be a number of bytes such as 512M"),
        (["--workers", "-1"], "`workers` must be an integer"),
        (["--columns", "txet"], "did you mean 'text'"),
        (["--seconds", "0"], "`seconds` must be more than 0"),
        (["--batch-size", "5000"], "more rows than a batch"),
    ],
)
def test_wrong_arguments_are_exit_code_2(
    arguments: list[str], text: str, table: str, command: Command
) -> None:
    found = command("bench", table, *arguments)
    assert found.code == 2
    assert found.out == ""
    assert text in found.err
