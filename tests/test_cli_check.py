"""``hf-lance-stream check``: what it says of saved states, against the runs that saved them."""

import io
import json
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import lance
import pytest
from command import Command, Result, delete_data
from datasets import interleave_datasets
from helpers import make_table
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_lance_stream as hls
from hf_lance_stream.checkpoint import STATE_NAME, write_states
from hf_lance_stream.saved_states import progress_of, saved_states

ORDER = {"num_splits": 8, "shuffle_seed": 1, "shuffle_clump_size": 16}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> str:
    """T(1010, 250) that no test changes."""
    path = tmp_path_factory.mktemp("table") / "t.lance"
    return make_table(path, 1010, 250, ["id", "text"])


@pytest.fixture
def own(shared: str, tmp_path: Path) -> str:
    """A table of the test's own."""
    return make_table(tmp_path / "t.lance", 1010, 250, ["id", "text"])


@pytest.fixture
def check(command: Command, tmp_path: Path) -> Callable[..., Result]:
    """Checks a state through a JSON file."""

    def run(state: Any, *arguments: Any) -> Result:
        path = tmp_path / "state.json"
        path.write_text(json.dumps(state))
        return command("check", path, *arguments)

    return run


def after(ds: Any, rows: int) -> dict[str, Any]:
    """The state of a dataset after some rows."""
    iterator = iter(ds)
    for _ in range(rows):
        next(iterator)
    state = ds.state_dict()
    iterator.close()
    return state


def loader_states(table: str, ranks: int, batches: int, **options: Any) -> list[dict[str, Any]]:
    """The states of the loaders of all ranks after some batches of 10."""
    states = []
    for rank in range(ranks):
        ds = hls.from_lance(table, **ORDER, rank=rank, world_size=ranks, **options)
        loader = hls.stateful_dataloader(ds, 10)
        list(islice(loader, batches))
        states.append(loader.state_dict())
    return states


class TestWhatItIs:
    @pytest.mark.parametrize("rows", [0, 1, 137, 1008])
    def test_the_state_of_a_dataset(self, rows: int, shared: str, check) -> None:
        ds = hls.from_lance(shared, **ORDER, epoch=2)
        document = check(after(ds, rows), "--json").json
        (source,) = document["sources"]
        assert document["kind"] == "the state of a dataset"
        assert document["fit"] is None
        assert source["is_exact"]
        assert (source["epoch"], source["rows_done"], source["rows"]) == (2, rows, len(ds))
        assert source["fingerprint"] == ds._ex_iterable.fingerprint | {"epoch": 2}
        assert source["obstacle"] is None
        (part,) = source["parts"]
        assert part["part"] == "splits 0 to 7"
        assert (part["least"], part["most"]) == (rows // 8, -(-rows // 8))

    def test_the_state_of_a_loader_of_one_rank_of_two(self, shared: str, check) -> None:
        state = loader_states(shared, 2, 5)[1]
        document = check(state, "--json").json
        (source,) = document["sources"]
        assert document["kind"] == "the state of a loader, of one rank"
        assert document["num_workers"] == 0
        assert (source["rows_done"], source["rows"]) == (50, 504)
        assert source["parts"][0]["part"] == "splits 4 to 7"
        assert source["obstacle"].startswith("the states of ranks [0] of 2 are missing")

    def test_the_states_of_all_ranks(self, shared: str, check) -> None:
        states = loader_states(shared, 4, 3)
        (source,) = check(states, "--json").json["sources"]
        assert (source["rows_done"], source["rows"], source["obstacle"]) == (120, 1008, None)
        assert [part["rows_done"] for part in source["parts"]] == [30] * 4
        assert [part["part"] for part in source["parts"]] == [
            f"splits {2 * rank} to {2 * rank + 1}" for rank in range(4)
        ]
        copies = check([*states, *states], "--json").json["sources"]  # tensor-parallel ranks
        assert copies[0]["rows_done"] == 120

    def test_a_merged_state(self, shared: str, check) -> None:
        merged = hls.merge_state_dicts(loader_states(shared, 2, 5))
        document = check(merged, "--json").json
        assert document["kind"].startswith("a merged state")
        assert document["sources"][0]["rows_done"] == 100
        assert document["sources"][0]["obstacle"] is None

    def test_states_together(self, shared: str, check) -> None:
        loader = hls.stateful_dataloader(hls.from_lance(shared, **ORDER), 10)
        list(islice(loader, 7))
        document = check(hls.RankStates(loader).state_dict(), "--json").json
        assert document["kind"] == "the loader states of 1 rank, together"
        assert document["num_workers"] == 0
        assert document["sources"][0]["rows_done"] == 70

    def test_natural_shards_and_a_filter(self, shared: str, check) -> None:
        ds = hls.from_lance(shared, columns=["id"], filter="id < 500")
        found = check(after(ds, 100), shared, "--json")
        (source,) = found.json["sources"]
        assert (source["rows_done"], source["rows"]) == (100, None)
        assert found.code == 0
        words = check(after(ds, 100)).out
        assert "100 rows are read, of 500 of the table" in words
        assert "Filter: id < 500" in words

    def test_a_step_that_changes_the_number_of_rows(self, shared: str, check) -> None:
        ds = hls.from_lance(shared, **ORDER).filter(lambda row: row["id"] % 2 == 0)
        found = check(after(ds, 60), shared, "--json")
        (source,) = found.json["sources"]
        assert found.code == 0
        assert source["steps"] == "Filtered of Lance"
        assert source["obstacle"].startswith("filter buffers rows")
        assert not source["is_exact"]
        assert 60 < source["rows_done"] < 1010

    def test_two_tables_of_a_mix(self, shared: str, own: str, check) -> None:
        mix = interleave_datasets([hls.from_lance(t, **ORDER) for t in (shared, own)])
        found = check(after(mix, 60), own, "--json")
        assert [s["fingerprint"]["table"] for s in found.json["sources"]] == [shared, own]
        assert [s["is_exact"] for s in found.json["sources"]] == [False, False]
        assert all(30 <= s["rows_done"] <= 1010 for s in found.json["sources"])
        assert "may hold some of them back" in check(after(mix, 60)).out
        assert found.code == 0
        assert found.json["fit"]["table"] == own

    @pytest.mark.slow
    def test_workers_that_share_splits(self, shared: str, check) -> None:
        ds = hls.from_lance(shared, **ORDER).filter(lambda row: row["id"] % 2 == 0)
        loader = hls.stateful_dataloader(ds, 10, num_workers=2)
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        document = check(loader.state_dict(), shared, "--json").json
        del batches
        (source,) = document["sources"]
        assert document["num_workers"] == 2
        assert [part["part"] for part in source["parts"]] == ["splits 0 to 3", "splits 4 to 7"]
        assert 40 <= source["rows_done"] < 200
        assert document["fit"]["fits"]

    def test_words(self, shared: str, check) -> None:
        found = check(loader_states(shared, 2, 5), shared)
        for text in (
            "What: a list of 2 states",
            "Order: shuffled with seed 1, clumps of 16 rows, 8 splits",
            "Epoch 0: 100 of 1,008 rows are done (9.9%), 12 to 13 of each split",
            "splits 4 to 7         50",
            "Loads: on any number of ranks and DataLoader workers, merged",
            "Fits: yes",
        ):
            assert text in found.out, found.out


class TestTrainer:
    @pytest.fixture
    def checkpoint(self, shared: str, tmp_path: Path) -> Path:
        """A checkpoint directory of Trainer at step 5, of two ranks."""
        directory = tmp_path / "checkpoint-5"
        directory.mkdir()
        states = loader_states(shared, 2, 5)
        content = {"global_step": 5, "num_workers": 0, "rows_per_step": 20, "states": states}
        write_states(directory, {**content, "steps_per_epoch": 51})
        (directory / "trainer_state.json").write_text('{"global_step": 5}')
        return directory

    @pytest.mark.parametrize("name", ["", STATE_NAME])
    def test_a_checkpoint_or_its_file(
        self, name: str, checkpoint: Path, shared: str, command: Command
    ) -> None:
        found = command("check", checkpoint / name, shared, "--json")
        document = found.json
        assert found.code == 0
        assert document["kind"] == "a checkpoint of Trainer, with the loader states of 2 ranks"
        assert (document["global_step"], document["rows_per_step"]) == (5, 20)
        assert document["sources"][0]["rows_done"] == 100
        assert "Steps: 5, of 20 rows each" in command("check", checkpoint / name).out

    def test_one_of_another_step_is_damaged(self, checkpoint: Path, command: Command) -> None:
        (checkpoint / "trainer_state.json").write_text('{"global_step": 6}')
        found = command("check", checkpoint)
        assert found.code == 2
        assert "it is of step 5, the checkpoint of step 6" in found.err

    def test_a_changed_one_is_damaged(self, checkpoint: Path, command: Command) -> None:
        file = checkpoint / STATE_NAME
        file.write_text(file.read_text().replace('"position": 50', '"position": 51'))
        found = command("check", checkpoint)
        assert found.code == 2
        assert f"{file} is damaged" in found.err

    def test_a_checkpoint_without_the_file(self, checkpoint: Path, command: Command) -> None:
        (checkpoint / STATE_NAME).unlink()
        found = command("check", checkpoint)
        assert found.code == 2
        assert f"has no {STATE_NAME}" in found.err


class TestFit:
    def test_reads_nothing_and_says_so_by_the_exit_code(self, own: str, check) -> None:
        state = after(hls.from_lance(own, **ORDER), 9)
        delete_data(own)
        found = check(state, own, "--json")
        assert found.code == 0
        assert found.json["fit"]["fits"]
        assert found.json["fit"]["differences"] == []

    def test_a_table_that_has_moved_on_fits_at_the_saved_version(self, own: str, check) -> None:
        state = after(hls.from_lance(own, **ORDER), 9)
        lance.dataset(own).delete("id = 3")
        found = check(state, own, "--json")
        assert found.code == 0
        assert found.json["fit"]["version"] == 1
        assert found.json["fit"]["latest_version"] == 2
        assert found.json["fit"]["notes"] == [
            "the table has moved on: build the dataset with version=1"
        ]
        ds = hls.from_lance(own, **ORDER, version=1)
        ds.load_state_dict(state)  # as the note says

    def test_against_another_version_each_field_is_named(self, own: str, check) -> None:
        state = after(hls.from_lance(own, **ORDER), 9)
        lance.dataset(own).delete("id = 3")
        found = check(state, own, "--version", 2, "--json")
        assert found.code == 1
        with pytest.raises(ValueError, match="does not fit") as raised:
            hls.from_lance(own, **ORDER, version=2).load_state_dict(state)
        names = [line.partition(":")[0] for line in found.json["fit"]["differences"]]
        assert names == ["version", "files", "rows"]
        assert {"version: saved 1, now 2", "rows: saved 1010, now 1009"} < set(
            found.json["fit"]["differences"]
        )
        for line in found.json["fit"]["differences"]:
            assert line in str(raised.value)

    def test_a_version_that_is_gone(self, own: str, check) -> None:
        lance.dataset(own).delete("id = 3")
        state = after(hls.from_lance(own, **ORDER), 9)
        state["examples_iterable"]["fingerprint"]["version"] = 7
        found = check(state, own, "--json")
        assert found.code == 1
        assert found.json["fit"]["differences"][0].startswith("version: saved 7, now `version`")
        assert check(state, own, "--version", 8).code == 2  # not what the state says

    def test_a_moved_table_differs_in_its_place_only(self, own: str, check, tmp_path) -> None:
        state = after(hls.from_lance(own, **ORDER), 9)
        moved = str(tmp_path / "moved.lance")
        shutil.copytree(own, moved)
        found = check(state, moved, "--json")
        assert found.code == 1
        assert found.json["fit"]["differences"] == [f"table: saved {own!r}, now {moved!r}"]
        assert "allow_moved=True" in found.json["fit"]["notes"][0]

    def test_another_table_of_the_same_shape(self, own: str, shared: str, check) -> None:
        state = after(hls.from_lance(own, **ORDER), 9)
        found = check(state, shared)
        assert found.code == 1
        assert "Fits: NO" in found.out
        for name in ("table", "files"):
            assert f"Differs: {name}: saved" in found.out

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"columns": ["text"]}, "`columns` names 'text'"),
            ({"columns": ["id"], "filter": "text = 'text 3'"}, "`filter` cannot be applied"),
            ({"columns": ["id"], "num_splits": 1000}, "`num_splits` must not be larger"),
        ],
    )
    def test_a_table_without_what_the_state_needs(
        self, options: dict, text: str, own: str, check, tmp_path: Path
    ) -> None:
        state = after(hls.from_lance(own, **options), 1)
        other = make_table(tmp_path / "other.lance", 20, 5)
        found = check(state, other, "--json")
        assert found.code == 1
        assert text in found.json["fit"]["differences"][0]

    def test_several_tables(self, own: str, shared: str, check) -> None:
        lance.dataset(own).delete("id = 3")
        state = after(hls.from_lance([shared, own], **ORDER), 9)
        lance.dataset(own).delete("id = 4")
        assert check(state, shared, own).code == 0
        assert check(state, own, shared).code == 1
        one = check(state, shared, "--json")
        assert one.code == 1
        assert one.json["fit"]["differences"][0].startswith("table: saved")

    def test_a_filter_that_the_state_has_shortened_is_not_compared(self, own: str, check) -> None:
        long = " OR ".join(f"id = {i}" for i in range(100))
        state = after(hls.from_lance(own, filter=long), 9)
        found = check(state, own, "--json")
        assert found.code == 0
        assert found.json["fit"]["notes"] == [
            "not compared, since the state has it shortened: filter"
        ]

    def test_a_missing_table_is_wrong_use(self, own: str, check) -> None:
        found = check(after(hls.from_lance(own, **ORDER), 9), own + "x")
        assert found.code == 2
        assert found.out == ""


class TestDamaged:
    @pytest.mark.parametrize(
        ("content", "text"),
        [
            ("", "is no JSON"),
            ('{"epoch": 0, "examples_iter', "is no JSON"),
            ("[" * 100_000, "is no JSON"),
            ("[]", "no state"),
            ("3", "must hold states of Lance datasets"),
            ('{"model": 1}', "must hold states of Lance datasets"),
            ('{"examples_iterable": {}, "epoch": 0}', "holds no state of a Lance table"),
            ('{"_snapshot": 3}', "must be a dict"),
            ('{"_snapshot": {"_worker_snapshots": {"worker_0": 1}}}', "`worker_0` must be a dict"),
            ('{"states": [], "num_workers": 0}', "`states` must be a list"),
            ('{"states": [{}], "sha256": "x"}', "is damaged"),
        ],
    )
    def test_is_exit_code_2_with_the_reason(
        self, content: str, text: str, command: Command, tmp_path: Path
    ) -> None:
        path = tmp_path / "state.json"
        path.write_text(content)
        found = command("check", path)
        assert found.code == 2
        assert found.out == ""
        assert text in found.err

    def test_bytes_that_are_no_text(self, command: Command, tmp_path: Path) -> None:
        (tmp_path / "state.pt").write_bytes(b"PK\x03\x04\xff\xfe")
        found = command("check", tmp_path / "state.pt")
        assert found.code == 2
        assert "is no JSON" in found.err

    def test_no_file_and_a_directory_of_something_else(
        self, command: Command, tmp_path: Path
    ) -> None:
        assert "there is no file" in command("check", tmp_path / "no.json").err
        assert f"has no {STATE_NAME}" in command("check", tmp_path).err

    def test_standard_input(
        self, shared: str, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        states = loader_states(shared, 2, 5)
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(states)))
        assert command("check", "-", "--json").json["sources"][0]["rows_done"] == 100

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"position": 10**6}, "`position` must be an integer in [0, 1010]"),
            ({"position": "3"}, "`position`"),
            ({"state_version": 99}, "newer hf_lance_stream"),
            ({"consumed": "1+2"}, "`consumed`"),
            ({"part": None}, "`part` must be a dict"),
            ({"fingerprint": {"rows": 2**60, "num_splits": 2**50}}, "`num_splits`"),
        ],
    )
    def test_each_field_is_checked(self, change: dict, text: str, shared: str, check) -> None:
        state = after(hls.from_lance(shared, **ORDER), 9)
        state["examples_iterable"] |= change
        found = check(state)
        assert found.code == 2
        assert text in found.err

    @settings(deadline=None, max_examples=150)
    @given(data=st.data())
    def test_whatever_is_changed_is_told_or_refused_in_words(self, shared: str, data) -> None:
        cases = [after(hls.from_lance(shared, **ORDER), 9), loader_states(shared, 2, 2)]
        content = data.draw(st.sampled_from(json.loads(json.dumps(cases))))
        target, key = content, None
        while isinstance(target, dict | list) and target:
            parent = target
            keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
            key = data.draw(st.sampled_from(keys))
            target = parent[key]
            if data.draw(st.booleans()):
                break
        values = (
            st.none() | st.integers(-2, 2**70) | st.text(max_size=3) | st.just([]) | st.just({})
        )
        parent[key] = data.draw(values)
        try:
            found = progress_of(saved_states(content, "it").states)
        except ValueError as error:
            assert str(error)  # noqa: PT017
            return
        assert all(progress.rows_done >= 0 for progress in found)
