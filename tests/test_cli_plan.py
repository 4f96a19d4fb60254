"""``hf-lance-stream plan``: what it says against what datasets and loaders then do."""

import logging
from dataclasses import asdict
from pathlib import Path

import pytest
from command import Command, delete_data
from helpers import make_table
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_lance_stream as hls
from hf_lance_stream.layouts import examples_to_lay_out, world_layout
from hf_lance_stream.plan import Options, unequal_lengths
from hf_lance_stream.source import open_source


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """T(157, 13)."""
    return make_table(tmp_path_factory.mktemp("table") / "t.lance", 157, 13)


def refusal(do) -> str:
    """What the package says when it refuses something."""
    try:
        do()
    except ValueError as error:
        return str(error)
    return pytest.fail("nothing was refused")


def broken(rules: list[dict], word: str) -> dict:
    """The one rule with `word` in it, which must be broken."""
    (rule,) = [rule for rule in rules if word in rule["rule"]]
    assert not rule["holds"]
    return rule


@settings(deadline=None, max_examples=60)
@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "num_splits": st.integers(1, 157),
            "shuffle_seed": st.just(1),
            "tail": st.sampled_from(["drop", "pad", "keep"]),
        },
    ),
    world_size=st.integers(1, 6),
    num_workers=st.integers(0, 4),
    batch_size=st.integers(1, 40),
)
def test_ranks_steps_and_batches_are_those_of_datasets_and_loaders(
    small, options, world_size, num_workers, batch_size
):
    examples = examples_to_lay_out(open_source(small), Options(**options))
    world = world_layout(examples, world_size, num_workers=num_workers, batch_size=batch_size)

    def part_of(rank):
        return hls.from_lance(small, **options, rank=rank, world_size=world_size)

    if not world.ranks:
        assert not world.fits
        assert refusal(lambda: part_of(0)) in [rule.message for rule in world.rules]
        return
    parts = [part_of(rank) for rank in range(world_size)]
    assert [rank.rows for rank in world.ranks] == [len(part) for part in parts]
    lengths = [len(hls.stateful_dataloader(part, batch_size)) for part in parts]
    assert [rank.steps for rank in world.ranks] == lengths
    assert world.dropped_rows == parts[0].dropped_rows
    assert world.padded_rows == parts[0].padded_rows
    for rank, part in zip(world.ranks, parts, strict=True):
        batches = list(range(rank.steps))  # worker w makes the batches w, w + W, …
        assert rank.batches_per_worker == tuple(
            len(batches[worker::num_workers]) for worker in range(num_workers)
        )
        assert rank.last_batch_rows == (len(part) - (rank.steps - 1) * batch_size or None)
        assert rank.stop - rank.start == part.num_shards or len(part) == 0
    assert [rank.start for rank in world.ranks[1:]] == [rank.stop for rank in world.ranks[:-1]]
    assert world.fits == (len(set(lengths)) == 1)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--gpus", "2", "--batch", "10"],
        ["--num-splits", "24", "--gpus", "1,2,8", "--workers", "3", "--global-batch", "48"],
        ["--seed", "1", "--clump", "16", "--gpus", "4", "--global-batch", "64", "--tail", "pad"],
    ],
)
def test_reads_nothing_but_the_manifest(arguments: list[str], table: str, command: Command) -> None:
    before = command("plan", table, *arguments, "--json")
    words = command("plan", table, *arguments)
    delete_data(table)
    assert command("plan", table, *arguments, "--json") == before
    assert command("plan", table, *arguments) == words
    assert before.code == words.code == 0, before
    assert before.err == words.err == ""


def test_json_is_that_of_the_python_api(table: str, command: Command) -> None:
    found = command(
        "plan", table, "--num-splits", 24, "--gpus", "3,4", "--workers", 2, "--global-batch", 48,
        "--json",
    )  # fmt: skip
    document = found.json
    ds = hls.from_lance(table, num_splits=24)
    assert found.code == 0
    assert document["fits"]
    assert (document["rows"], document["version"]) == (1000, 1)
    assert document["splits"]["rows_per_split"] == 1000 // 24
    assert document["splits"]["compatible_world_sizes"] == [1, 2, 3, 4, 6, 8, 12, 24]
    for world, size in zip(document["worlds"], (3, 4), strict=True):
        assert world["world_size"] == size
        assert world["batch_size"] == 48 // size
        assert world["epoch_rows"] == len(ds)
        assert world["dropped_rows"] == ds.dropped_rows == 1000 % 24
        assert world["steps_per_epoch"] == len(hls.stateful_dataloader(ds, 48))
        assert [rank["start"] for rank in world["ranks"]] == list(range(0, 24, 24 // size))
        assert all(rule["holds"] for rule in world["rules"])
    assert document["suggestion"] == {
        **asdict(hls.suggest_num_splits([3, 4], 48, 1000)),
        "candidates": [12, 24, 48],
        "world_sizes": [1, 2, 3, 4, 6, 8, 12, 16, 24, 48],
    }


class TestRules:
    def test_gpus_that_do_not_divide_the_splits(self, table: str, command: Command) -> None:
        found = command("plan", table, "--num-splits", 48, "--gpus", 5, "--json")
        assert found.code == 1
        rule = broken(found.json["worlds"][0]["rules"], "divides the splits")
        assert rule["message"] == refusal(
            lambda: hls.from_lance(table, num_splits=48, rank=0, world_size=5)
        )

    def test_gpus_that_do_not_divide_the_fragments(self, table: str, command: Command) -> None:
        found = command("plan", table, "--gpus", 3, "--json")
        assert found.code == 1
        rule = broken(found.json["worlds"][0]["rules"], "divides the natural shards")
        assert rule["message"] == refusal(lambda: hls.from_lance(table, rank=0, world_size=3))
        assert found.json["natural_shards"] == 4

    def test_more_splits_than_rows(self, table: str, command: Command) -> None:
        found = command("plan", table, "--num-splits", 1001, "--gpus", 2, "--json")
        assert found.code == 1
        assert found.json["refusal"] == refusal(lambda: hls.from_lance(table, num_splits=1001))
        assert found.json["worlds"] == []
        words = command("plan", table, "--num-splits", 1001)
        assert words.code == 1
        assert "Refused: `num_splits` must not be larger than the number of rows" in words.out

    def test_a_global_batch_that_gpus_do_not_divide(self, table: str, command: Command) -> None:
        found = command(
            "plan", table, "--num-splits", 6, "--gpus", 6, "--global-batch", 64, "--json"
        )
        assert found.code == 1
        world = found.json["worlds"][0]
        assert "use 60 or 66" in broken(world["rules"], "divides the global batch")["message"]
        assert world["batch_size"] is None
        assert world["steps_per_epoch"] is None
        assert found.json["suggestion"]["num_splits"] is None
        assert found.json["suggestion"]["reason"] == refusal(
            lambda: hls.suggest_num_splits([6], 64, 1000)
        )

    def test_splits_that_do_not_divide_the_global_batch_are_a_warning(
        self, table: str, command: Command, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = command("plan", table, "--num-splits", 48, "--gpus", 2, "--batch", 20, "--json")
        assert found.code == 0
        rule = broken(found.json["worlds"][0]["rules"], "splits divide the global batch")
        with caplog.at_level(logging.WARNING, "hf_lance_stream"):
            part = hls.from_lance(table, num_splits=48, rank=0, world_size=2)
            hls.stateful_dataloader(part, 20)
        assert rule["message"] in caplog.messages

    def test_workers_that_would_not_share_the_splits_evenly_are_a_note(
        self, table: str, command: Command
    ) -> None:
        found = command("plan", table, "--num-splits", 8, "--workers", 3, "--batch", 8, "--json")
        assert found.code == 0
        rule = broken(found.json["worlds"][0]["rules"], "workers that share splits")
        ds = hls.from_lance(table, num_splits=8).filter(lambda row: True)
        assert rule["message"] == refusal(lambda: hls.stateful_dataloader(ds, 8, num_workers=3))

    def test_ranks_with_unequal_steps(self, ranks_table: str, command: Command) -> None:
        arguments = ("plan", ranks_table, "--num-splits", 8, "--tail", "keep", "--gpus", 2)
        found = command(*arguments, "--batch", 101, "--json")  # 506 and 504 rows: 6 and 5 batches
        assert [rank["steps"] for rank in found.json["worlds"][0]["ranks"]] == [6, 5]
        assert found.code == 1
        rule = broken(found.json["worlds"][0]["rules"], "equally many steps")
        assert rule["message"] == unequal_lengths([6, 5])
        assert (
            "BROKEN: all ranks have equally many steps" in command(*arguments, "--batch", 101).out
        )
        assert command(*arguments, "--batch", 102).code == 0


class TestWords:
    def test_who_reads_what(self, table: str, command: Command) -> None:
        found = command(
            "plan", table, "--num-splits", 24, "--seed", 1, "--clump", 16, "--gpus", 2,
            "--workers", 3, "--global-batch", 48,
        )  # fmt: skip
        for text in (
            "shuffled with seed 1, clumps of 16 rows, epoch 0",
            "Splits: 24 of 41 rows each",
            "Compatible world sizes: 1, 2, 3, 4, 6, 8, 12, 24",
            "2 GPUs, batches of 24 rows, 48 together",
            "984 rows per epoch, 16 left out; 21 steps; a step takes 2 rows of each split",
            "0   0 to 11   492     21          12                   7 7 7",
            "holds: the number of GPUs divides the splits",
            "Suggested number of splits\n  48: 48 is a multiple of 2",
        ):
            assert text in found.out, found.out

    def test_many_gpus_are_abbreviated(self, table: str, command: Command) -> None:
        arguments = ("plan", table, "--num-splits", 500, "--gpus", 500, "--batch", 1)
        found = command(*arguments)
        assert found.code == 0
        assert len(found.out.splitlines()) < 30
        assert "\n   499     499     2" in found.out
        assert len(command(*arguments, "--json").json["worlds"][0]["ranks"]) == 500

    def test_without_a_batch_there_are_no_steps_and_no_suggestion(
        self, table: str, command: Command
    ) -> None:
        document = command("plan", table, "--gpus", 2, "--json").json
        assert document["suggestion"] is None
        assert document["worlds"][0]["steps_per_epoch"] is None
        assert "steps" not in command("plan", table, "--gpus", 2).out

    def test_a_filter_is_applied_and_it_is_said_to_read(self, table: str, command: Command) -> None:
        arguments = ("plan", table, "--filter", "id < 100", "--seed", 1, "--batch", 10)
        document = command(*arguments, "--json").json
        ds = hls.from_lance(table, filter="id < 100", shuffle_seed=1)
        assert document["rows"] == 100
        assert document["worlds"][0]["epoch_rows"] == len(ds)
        assert document["worlds"][0]["tail"] == "keep"
        assert "the filter was applied, which read the columns it names" in command(*arguments).out

    def test_a_default_tail_of_one_gpu_and_of_two(self, table: str, command: Command) -> None:
        document = command("plan", table, "--seed", 1, "--gpus", "1,2", "--json").json
        tails = [(world["tail"], world["dropped_rows"]) for world in document["worlds"]]
        assert tails == [("keep", 0), ("drop", 1000 % 64)]
        words = command("plan", table, "--seed", 1, "--gpus", "1,2").out
        assert words.count("tail 'drop', the default of several GPUs") == 1


def test_the_suggested_number_of_splits_holds_all_rules(table: str, command: Command) -> None:
    arguments = ("plan", table, "--gpus", "2,4,6", "--global-batch", 96, "--json")
    number = command(*arguments).json["suggestion"]["num_splits"]
    found = command(*arguments, "--num-splits", number)
    assert found.code == 0
    rules = [rule for world in found.json["worlds"] for rule in world["rules"]]
    assert len(rules) == 12
    assert all(rule["holds"] for rule in rules)


def test_an_empty_table(tmp_path: Path, command: Command) -> None:
    path = make_table(tmp_path / "t.lance", 10, 5)
    arguments = ("plan", path, "--filter", "id < 0", "--gpus", "2", "--batch", "4")
    document = command(*arguments, "--json").json
    assert document["rows"] == 0
    assert [rank["rows"] for rank in document["worlds"][0]["ranks"]] == [0, 0]
    assert command(*arguments).code == 0
