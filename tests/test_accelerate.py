"""Hugging Face accelerate: training loops on one and two processes, evaluation on up to three."""

import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from jobs import accelerate_ranks as jobs
from jobs.trainer_runs import in_ranks
from ranks import (
    GLOBAL_BATCH,
    ROWS,
    SPLITS,
    STEPS,
    needs_gloo,
    script,
    steps_of,
    torchrun,
    write_numbers,
)

import hf_lance_stream as hls
from hf_lance_stream.rank_states import RankStates

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def table(ranks_table):
    return ranks_table


ALL_STEPS = [rows for epoch in range(jobs.EPOCHS) for rows in steps_of(epoch)]
STOPS = [7, STEPS, 2 * STEPS + 5]
FILTERED_STOPS = [3, 11, 17]  # in epoch 0, and later


def specs(directory, batch):
    """Uninterrupted runs, and runs cut in two: with and without a filter; workers."""
    kinds = [(False, 0, STOPS), (True, 0, FILTERED_STOPS)]
    if batch != GLOBAL_BATCH:
        kinds.append((True, 2, FILTERED_STOPS[1:2]))
    found = []
    for with_filter, workers, stops in kinds:
        options = {"with_filter": with_filter, "workers": workers, "batch": batch}
        output = directory / f"{with_filter}_{workers}"
        found.append((output, options))
        for stop in stops:
            found += [(output, {**options, "stop": stop}), (output, {**options, "resume": stop})]
    return found


def run_all(world_size, table, directory, batch):
    """What each rank had, by filter, workers, stop and resume."""
    todo = specs(directory, batch)
    keys = [(o["with_filter"], o["workers"], o.get("stop"), o.get("resume")) for _, o in todo]
    found = in_ranks(world_size, jobs.trainings, directory, table, todo)
    return [dict(zip(keys, runs, strict=True)) for runs in found]


@pytest.fixture(scope="module")
def one_rank(table, tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    return directory, run_all(1, table, directory, 48)


@pytest.fixture(scope="module")
def two_ranks(table, tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    return directory, run_all(2, table, directory, 24)


def check_resumes(runs):
    """Every run cut in two has the rows and the random state of the whole one."""
    cut = [key for key in runs if key[2] is not None]
    assert len(cut) >= 6
    for with_filter, workers, stop, _ in cut:
        whole = runs[with_filter, workers, None, None]
        first = runs[with_filter, workers, stop, None]
        rest = runs[with_filter, workers, None, stop]
        assert len(whole["seen"]) > stop
        assert first["seen"] + rest["seen"] == whole["seen"], (with_filter, workers, stop)
        assert rest["drawn"] == whole["drawn"]


def test_one_process_has_every_row_and_resumes_exactly(one_rank):
    [runs] = one_rank[1]
    assert runs[False, 0, None, None]["seen"] == ALL_STEPS
    check_resumes(runs)


def test_two_processes_have_their_own_rows_and_resume_exactly(two_ranks):
    size = SPLITS // 2
    for rank, runs in enumerate(two_ranks[1]):
        own = [[r for n, r in enumerate(s) if n % SPLITS // size == rank] for s in ALL_STEPS]
        assert runs[False, 0, None, None]["seen"] == own
        check_resumes(runs)


def test_the_filter_makes_the_two_processes_uneven(two_ranks):
    """Else the test above would not tell a state of one rank from that of the other."""
    directory, runs = two_ranks
    filtered = [found[True, 0, None, None]["seen"] for found in runs]
    rows = [[row for batch in seen for row in batch] for seen in filtered]
    assert len(rows[0]) != len(rows[1])
    assert sorted(rows[0] + rows[1])[:6] == [0, 0, 0, 1, 1, 1]
    path = directory / "True_0" / "3" / "custom_checkpoint_0.pkl"
    states = _load(path)["states"]
    positions = [state["examples_iterable"] for state in states]
    assert len(states) == 2
    assert positions[0] != positions[1]


def _load(path):
    return torch.load(path, weights_only=True)


def test_a_run_goes_from_two_processes_to_one_and_back(table, tmp_path, two_ranks, one_rank):
    for stop in STOPS:
        shutil.copytree(two_ranks[0] / "False_0" / str(stop), tmp_path / "two" / str(stop))
        shutil.copytree(one_rank[0] / "False_0" / str(stop), tmp_path / "one" / str(stop))
    todo = [(tmp_path / "two", {"resume": stop, "batch": 48}) for stop in STOPS]
    filtered = {"with_filter": True, "resume": 3, "batch": 48}
    todo.append((two_ranks[0] / "True_0", filtered))
    [runs] = in_ranks(1, jobs.trainings, tmp_path, table, todo)
    for stop, run in zip(STOPS, runs[:3], strict=True):
        assert run["seen"] == ALL_STEPS[stop:]
    assert "filter" in runs[3]
    todo = [(tmp_path / "one", {"resume": stop, "batch": 24, "workers": 1}) for stop in STOPS[:1]]
    found = in_ranks(2, jobs.trainings, tmp_path, table, todo)
    for rank, [run] in enumerate(found):
        assert run["seen"] == two_ranks[1][rank][False, 0, None, STOPS[0]]["seen"]


def test_accumulate_steps_at_the_end_of_an_epoch(table, tmp_path):
    [found] = in_ranks(1, jobs.accumulation, tmp_path, table)
    assert found[0] == found[1] == [n % 4 == 3 for n in range(20)] + [True]
    for steps in found[2:]:
        assert len(steps) % 4
        assert steps == [n % 4 == 3 for n in range(len(steps) - 1)] + [True]


@pytest.mark.parametrize("world_size", [1, 2])
def test_prepare_leaves_a_plain_loader_as_it_is(table, tmp_path, world_size):
    found = in_ranks(world_size, jobs.prepared, tmp_path, table)
    size = SPLITS // world_size
    for rank, (is_same, seen, messages, left, uneven) in enumerate(found):
        assert is_same
        rows = [row for step in steps_of(0) for row in step]
        own = [row for n, row in enumerate(rows) if n % SPLITS // size == rank]
        assert [row for batch in seen for row in batch] == own
        assert any("leaves a loader" in message for message in left)
        assert len(messages) == (3 if world_size > 1 else 0)
        assert ["unequal numbers" in message for message in uneven] == [True] * (world_size - 1)
    if world_size > 1:
        assert "must be divided by its processes" in messages[0]
        assert messages[1].startswith("the dataset is already divided")
        assert "must be whole" in messages[2]


# Evaluation: (keeps ids divisible by, rows, workers, batch size of one process).
EVALUATIONS = [
    (None, None, 0, 16),
    (None, 101, 0, 8),
    (None, 96, 0, 8),  # whole batches on 1, 2 and 3 processes
    (None, 97, 1, 8),  # one row too many
    (None, 1, 0, 8),  # fewer rows than processes
    (3, None, 0, 16),  # the number of rows is not known before
    (3, 101, 1, 8),
    (5, 480, 0, 8),
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_evaluation_has_every_row_once_in_order(table, tmp_path, world_size):
    found = in_ranks(world_size, jobs.evaluations, tmp_path, table, EVALUATIONS)
    for results in found:
        for (divisor, rows, *_), (ids, _) in zip(EVALUATIONS, results, strict=True):
            assert ids == [n for n in range(rows or ROWS) if n % (divisor or 1) == 0]
    sizes = [[sizes for _, sizes in results] for results in found]
    assert all(of_rank == sizes[0] for of_rank in sizes)  # so that no process waits for another


# One object for the states of all ranks.


def test_the_states_of_all_ranks_are_refused_where_they_do_not_fit(table):
    def states(seed=1):
        ds = hls.from_lance(table, num_splits=4, shuffle_seed=seed)
        return RankStates(hls.stateful_dataloader(ds, 16))

    saved = states().state_dict()
    assert pickle.loads(pickle.dumps(saved)) == saved
    states().load_state_dict(saved)
    for wrong in ({}, {**saved, "version": 2}, {**saved, "states": None}, saved["states"][0], 3):
        with pytest.raises(ValueError, match=r"must be what RankStates.state_dict\(\)"):
            states().load_state_dict(wrong)
    with pytest.raises(ValueError, match="shuffle_seed"):
        states(seed=2).load_state_dict(saved)


def test_importing_the_package_imports_neither_accelerate_nor_lightning():
    code = (
        "import sys, hf_lance_stream, hf_lance_stream.lightning; "
        "names = {'accelerate', 'lightning', 'pytorch_lightning', 'transformers'}; "
        "print(sorted(names & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]", run.stderr


# The scripts of the README, under torchrun.


@pytest.mark.slow
def test_the_accelerate_script_of_the_readme_runs_and_goes_on(tmp_path):
    write_numbers(tmp_path)
    (tmp_path / "train.py").write_text(script("accelerate"))
    torchrun(tmp_path, 2)
    saved = sorted((tmp_path / "run").iterdir())
    assert [path.name for path in saved] == ["checkpoint_000001", "checkpoint_000002"]
    expected = _load(saved[1] / "custom_checkpoint_0.pkl")
    assert [state["epoch"] for state in expected["states"]] == [1, 1]
    shutil.rmtree(saved[1])  # as if it had been killed after the first one
    torchrun(tmp_path, 2)
    assert sorted((tmp_path / "run").iterdir()) == saved
    assert _load(saved[1] / "custom_checkpoint_0.pkl") == expected


@pytest.mark.slow
def test_the_evaluation_script_of_the_readme_counts_every_row(tmp_path):
    write_numbers(tmp_path)
    (tmp_path / "train.py").write_text(script("evaluation"))
    assert torchrun(tmp_path, 2).split()[:2] == ["1000", "rows,"]
