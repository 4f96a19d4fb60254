"""Hugging Face Trainer on several ranks: rows, resume on another number of ranks, evaluation.

Ranks are processes of multiprocessing's forkserver, which start fast, with the environment that
torchrun gives. The scripts of the README run under torchrun itself.
"""

import shutil
import subprocess

import pytest
import torch
from jobs import trainer_ranks as jobs
from jobs.trainer_runs import flat, in_ranks, same_weights, train
from ranks import SPLITS, STEPS, needs_gloo, script, steps_of, torchrun, write_numbers
from transformers import Trainer

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def table(ranks_table):
    return ranks_table


def of_rank(step, rank, world_size):
    """The ids of a global step that one rank has."""
    size = SPLITS // world_size
    return [row for n, row in enumerate(step) if n % SPLITS // size == rank]


ALL_STEPS = [rows for epoch in range(3) for rows in steps_of(epoch)]
TWO = {"per_device_train_batch_size": 24}
ACCUMULATED = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 2}
STOPS = {"in epoch 0": 7, "at an end": STEPS, "in epoch 2": 2 * STEPS + 5}


def specs_of_two_ranks(directory):
    """Uninterrupted runs, and runs cut in two, for 1 and 2 accumulated batches."""
    specs = []
    for name, options in (("1", TWO), ("2", ACCUMULATED)):
        specs.append((directory / name, options))
        for stop in STOPS.values():
            specs.append((directory / name, {**options, "stop": stop}))
            specs.append((directory / name, {**options, "resume": stop}))
    workers = {"dataloader_num_workers": 2}
    for stop in STOPS.values():
        specs.append((directory / "workers", {**TWO, **workers, "stop": stop}))
        specs.append((directory / "workers", {**TWO, **workers, "resume": stop}))
    specs.append((directory / "no dropout", {**TWO, "stop": 7, "dropout": 0.0}))
    # Another number of workers.
    specs.append((directory / "workers", {**TWO, "resume": 7}))
    return specs


@pytest.fixture(scope="module")
def two_ranks(table, tmp_path_factory):
    """What each of two ranks had, by directory and options, and where it was written."""
    directory = tmp_path_factory.mktemp("two")
    specs = specs_of_two_ranks(directory)
    found = in_ranks(2, jobs.trainings, directory, table, [(o, dict(s)) for o, s in specs])
    keys = [
        (o.name, s.get("stop"), s.get("resume"), "dataloader_num_workers" in s) for o, s in specs
    ]
    return directory, [dict(zip(keys, runs, strict=True)) for runs in found]


def test_each_of_two_ranks_gets_its_rows_in_every_epoch(two_ranks):
    for rank, runs in enumerate(two_ranks[1]):
        seen = runs["1", None, None, False]["seen"]
        assert seen == [of_rank(step, rank, 2) for step in ALL_STEPS]
        accumulated = runs["2", None, None, False]["seen"]
        assert [a + b for a, b in zip(accumulated[::2], accumulated[1::2], strict=True)] == seen


@pytest.mark.parametrize("name", ["1", "2", "workers"])
@pytest.mark.parametrize("place", STOPS)
def test_two_ranks_resume_with_equal_rows_and_weights(two_ranks, name, place):
    stop, workers = STOPS[place], name == "workers"
    for runs in two_ranks[1]:
        whole = runs["2" if name == "2" else "1", None, None, False]
        rest = runs[name, None, stop, workers]
        assert runs[name, stop, None, workers]["seen"] + rest["seen"] == whole["seen"]
        assert same_weights(rest, whole)
        assert rest["step"] == 3 * STEPS


def test_two_ranks_may_change_the_number_of_workers(two_ranks):
    for runs in two_ranks[1]:
        whole, rest = runs["1", None, None, False], runs["workers", None, 7, False]
        assert rest["seen"] == whole["seen"][7:]
        assert same_weights(rest, whole)


def test_a_run_goes_from_two_ranks_to_one_and_back(table, tmp_path, two_ranks):
    """With the same global batch: the same rows in every step; the weights differ by rounding.

    Without dropout, of which two ranks draw otherwise than one.
    """
    (tmp_path / "run").mkdir()
    checkpoint = two_ranks[0] / "no dropout" / "checkpoint-7"
    subprocess.run(["cp", "-r", checkpoint, tmp_path / "run"], check=True)
    one = train(table, tmp_path / "run", stop=30, resume=7, dropout=0.0)
    assert one["seen"] == ALL_STEPS[7:30]
    options = {**TWO, "resume": 30, "dropout": 0.0, "dataloader_num_workers": 2}
    found = in_ranks(2, jobs.trainings, tmp_path, table, [(tmp_path / "run", options)])
    reference = train(table, tmp_path / "reference", dropout=0.0)
    for rank, [run] in enumerate(found):
        assert run["seen"] == [of_rank(step, rank, 2) for step in ALL_STEPS[30:]]
        assert run["step"] == reference["step"] == 3 * STEPS
        torch.testing.assert_close(run["weights"], reference["weights"], rtol=1e-4, atol=1e-6)


def test_what_would_read_wrong_rows_is_refused_on_every_rank(table, tmp_path):
    found = in_ranks(2, jobs.refused, tmp_path, 2, table, tmp_path)
    for rank, messages in enumerate(found):
        assert "unequal numbers of batches" in messages["natural"]
        assert "unequal numbers of batches" in messages["keeps"]
        assert messages["own_rank"] == [
            [row for n, row in enumerate(rows) if n % SPLITS // 12 == rank]
            for rows in _double_steps()[:2]
        ]
    assert "already divided" in found[1]["other_ranks"]


def _double_steps():
    rows = [row for step in steps_of(0) for row in step]
    return [rows[i : i + 96] for i in range(0, len(rows), 96)]


# Case 35.


@pytest.mark.parametrize("workers", [0, 2])
def test_case_35_ragged_rows_with_a_padding_collator_train_and_evaluate(tmp_path, workers):
    path = jobs.make_ragged(tmp_path / "ragged.lance", 101)
    found = in_ranks(2, jobs.ragged_training, tmp_path, path, tmp_path, False, None, workers, 4)
    for epoch in range(2):
        steps = [seen[13 * epoch : 13 * (epoch + 1)] for seen, *_ in found]
        rows = [sorted(flat(part)) for part in steps]
        assert not set(rows[0]) & set(rows[1])
        assert len(rows[0]) == len(rows[1]) == 50
    for _, labels, metrics, filtered in found:
        assert labels == list(range(101))  # each once, in order, on every rank
        assert metrics["test_loss"] > 0
        assert filtered == list(range(0, 101, 2))  # also where the length is unknown


def test_case_35_stock_trainer_that_dispatches_cannot_join_ragged_batches(tmp_path):
    path = jobs.make_ragged(tmp_path / "ragged.lance", 101)
    found = in_ranks(2, jobs.ragged_training, tmp_path, path, tmp_path, True, None, 0, 4)
    assert "dispatch_batches=False" in found[0]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_case_35_stock_trainer_with_the_documented_arguments(tmp_path, workers):
    path = jobs.make_ragged(tmp_path / "ragged.lance", 101)
    found = in_ranks(2, jobs.ragged_training, tmp_path, path, tmp_path, True, False, workers, 4)
    for part in (slice(None, 13), slice(13, 26)):
        rows = [sorted(flat(seen[part])) for seen in found]
        assert not set(rows[0]) & set(rows[1])
        assert len(rows[0]) == len(rows[1]) == 50
    assert found[0][:13] != found[0][13:]


@pytest.mark.parametrize("dispatch", [True, False])
def test_stock_trainer_on_two_ranks_reads_every_row_once(table, tmp_path, dispatch):
    options = {
        "trainer": Trainer,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 24,
        "accelerator_config": {"dispatch_batches": dispatch},
    }
    found = in_ranks(2, jobs.trainings, tmp_path, table, [(tmp_path, options)])
    for epoch in range(2):
        part = slice(epoch * STEPS, (epoch + 1) * STEPS)
        seen = [row for [run] in found for batch in run["seen"][part] for row in batch]
        assert sorted(seen) == sorted(row for step in steps_of(epoch) for row in step)


# The scripts of the README, under torchrun.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "stock-trainer"])
def test_a_script_of_the_readme_runs_on_two_ranks_and_goes_on_when_started_again(tmp_path, name):
    (tmp_path / "train.py").write_text(script(name))
    write_numbers(tmp_path)
    for start in range(2):
        torchrun(tmp_path, 2)
        checkpoints = sorted((tmp_path / "run").glob("checkpoint-*"))
        assert checkpoints
        if start == 0:  # as if it had been killed after the first one
            first = min(checkpoints, key=lambda path: int(path.name.split("-")[1]))
            for path in checkpoints:
                if path != first:
                    shutil.rmtree(path)
    assert {path.name for path in checkpoints} > {first.name}
    if name == "trainer":
        assert all((path / "loader_state.json").exists() for path in checkpoints)
