"""Lightning on one and two ranks: rows of every epoch, resume at any place of a training."""

import math
import shutil

import pytest
import torch
from jobs.trainer_runs import in_ranks
from ranks import ROWS, SPLITS, STEPS, needs_gloo, script, steps_of, torchrun, write_numbers

pytest.importorskip("pytorch_lightning")

from jobs import lightning_ranks as jobs

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def table(ranks_table):
    return ranks_table


ALL_STEPS = [rows for epoch in range(3) for rows in steps_of(epoch)]
STOPS = [7, STEPS, 2 * STEPS + 5]
ONE, FILTERED = {"batch": 48}, {"batch": 48, "with_filter": True}
KEPT = sum(n % 64 < 20 for step in steps_of(0) for n in step)
"""Rows of epoch 0 that the filter keeps; the tail leaves out others in each epoch."""


@pytest.fixture(scope="module")
def one_rank(table, tmp_path_factory):
    """Directory and runs, by a name."""
    directory = tmp_path_factory.mktemp("one")
    filtered_end = math.ceil(KEPT / 48)
    specs = {"whole": ONE, "filtered": FILTERED}
    for stop in STOPS:
        specs[f"{stop}"], specs[f"{stop}+"] = {**ONE, "stop": stop}, {**ONE, "resume": stop}
        specs[f"{stop} steps+"] = {**ONE, "resume": stop, "max_steps": 3 * STEPS}
    for stop in (3, filtered_end, filtered_end + 2):
        specs[f"f{stop}"] = {**FILTERED, "stop": stop}
        specs[f"f{stop}+"] = {**FILTERED, "resume": stop}
    for name, options in (("broken", ONE), ("fbroken", FILTERED)):
        specs[f"{name}4"] = {**options, "breaks_at": 4}
        specs[f"{name}4+"] = {**options, "resume": 4}
    specs["cut"] = {**ONE, "max_steps": 9, "saves_after": True}
    specs["cut+"] = {**ONE, "resume": "after", "max_steps": 3 * STEPS, "max_epochs": -1}
    specs["limited"] = {**ONE, "limit_train_batches": 5, "max_epochs": 2}
    specs["limited5"] = {**ONE, "limit_train_batches": 5, "stop": 5}
    specs["limited5+"] = {**ONE, "limit_train_batches": 5, "resume": 5, "max_epochs": 2}
    specs["limited filter"] = {**FILTERED, "limit_train_batches": 2, "max_epochs": 2}
    specs["ended"] = {**ONE, "max_epochs": 1, "saves_after": True, "validates": True}
    specs["ended+"] = {**ONE, "resume": "after"}
    specs["broken, other batch"] = {"batch": 24, "resume": 4}
    [found] = in_ranks(
        1, jobs.fits, directory, table, [(_place(directory, k), s) for k, s in specs.items()]
    )
    return dict(zip(specs, found, strict=True)), filtered_end


def _place(directory, name):
    """Runs that save under the same number have directories of their own."""
    kind = "".join(letter for letter in name.split()[0] if letter.isalpha())
    return directory / (kind or "plain")


def check(runs, first, rest, whole="whole"):
    assert runs[first]["seen"] + runs[rest]["seen"] == runs[whole]["seen"], rest
    assert runs[rest]["epochs"] == runs[whole]["epochs"] == 3
    assert len(runs[rest]["seen"]) > 2


def test_every_epoch_has_its_order(one_rank):
    runs, _ = one_rank
    assert runs["whole"]["seen"] == ALL_STEPS
    kept = [row for step in steps_of(0) for row in step if row % 64 < 20]
    seen = [row for batch in runs["filtered"]["seen"] for row in batch]
    assert seen[: len(kept)] == kept
    assert set(seen[len(kept) :]) <= {n for n in range(ROWS) if n % 64 < 20}
    assert seen[len(kept) : 2 * len(kept)] != kept


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("kind", ["", " steps"])
def test_a_training_goes_on_in_an_epoch_and_at_its_end(one_rank, stop, kind):
    check(one_rank[0], f"{stop}", f"{stop}{kind}+")


def test_a_training_of_unknown_length_loses_no_batch(one_rank):
    runs, end = one_rank
    for stop in (3, end, end + 2):
        check(runs, f"f{stop}", f"f{stop}+", "filtered")


@pytest.mark.parametrize("name", ["broken", "fbroken"])
def test_a_batch_whose_step_failed_is_trained_again(one_rank, name):
    runs, _ = one_rank
    check(runs, f"{name}4", f"{name}4+", "filtered" if name == "fbroken" else "whole")
    assert len(runs[f"{name}4"]["seen"]) == 4


def test_a_training_that_max_steps_cut_short_goes_on(one_rank):
    runs, _ = one_rank
    assert runs["cut"]["seen"] + runs["cut+"]["seen"] == ALL_STEPS


def test_short_epochs_go_on_with_the_next_epoch(one_rank):
    runs, _ = one_rank
    assert runs["limited"]["seen"] == steps_of(0)[:5] + steps_of(1)[:5]
    assert runs["limited5+"]["seen"] == steps_of(1)[:5]
    assert len(runs["limited filter"]["seen"]) == 4


def test_a_training_goes_on_after_the_end_of_fit_and_validates_every_row(one_rank):
    runs, _ = one_rank
    assert runs["ended"]["seen"] + runs["ended+"]["seen"] == ALL_STEPS
    validated = runs["ended"]["validated"]
    assert validated[-ROWS:] == list(range(ROWS))


def test_another_number_of_rows_per_step_is_refused(one_rank):
    assert (
        "48 rows per batch of all ranks, now there are 24"
        in one_rank[0]["broken, other batch"]["error"]
    )


@pytest.fixture(scope="module")
def two_ranks(table, tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    filtered = {"with_filter": True, "max_steps": 8}  # no rank may end before the other
    specs = {"whole": {}, "filtered": filtered}
    for stop in STOPS:
        specs[f"{stop}"], specs[f"{stop}+"] = {"stop": stop}, {"resume": stop}
    specs["f3"], specs["f3+"] = {**filtered, "stop": 3}, {**filtered, "resume": 3}
    specs["workers"] = {"workers": 2, "resume": STOPS[2]}
    specs["valid"] = {"validates": True, "max_epochs": 1, "limit_train_batches": 1}
    todo = [(directory / ("f" if "f" in k else "plain"), s) for k, s in specs.items()]
    found = in_ranks(2, jobs.fits, directory, table, todo)
    return directory, [dict(zip(specs, runs, strict=True)) for runs in found]


def test_each_of_two_ranks_has_its_own_place(two_ranks):
    size = SPLITS // 2
    for rank, runs in enumerate(two_ranks[1]):
        own = [[r for n, r in enumerate(s) if n % SPLITS // size == rank] for s in ALL_STEPS]
        assert runs["whole"]["seen"] == own
        for stop in STOPS:
            check(runs, f"{stop}", f"{stop}+")
            assert runs[f"{stop}+"]["epochs"] == 3
        assert runs["f3"]["seen"] + runs["f3+"]["seen"] == runs["filtered"]["seen"]
        assert runs["workers"]["seen"] == own[STOPS[2] :]
    validated = [runs["valid"]["validated"] for runs in two_ranks[1]]
    assert sorted(validated[0][-505:] + validated[1][-505:]) == list(range(ROWS))
    positions = _loader_state(two_ranks[0] / "f" / "3.ckpt")["states"]
    assert positions[0]["examples_iterable"] != positions[1]["examples_iterable"]


def _loader_state(path):
    loops = torch.load(path, weights_only=True)["loops"]
    return loops["fit_loop"]["state_dict"]["combined_loader"][0]


def test_a_training_goes_from_two_ranks_to_one(table, tmp_path, two_ranks):
    shutil.copytree(two_ranks[0], tmp_path / "two")
    specs = [(tmp_path / "two" / "plain", {**ONE, "resume": stop}) for stop in STOPS]
    specs.append((tmp_path / "two" / "f", {**FILTERED, "resume": 3}))
    [found] = in_ranks(1, jobs.fits, tmp_path, table, specs)
    for stop, run in zip(STOPS, found[:3], strict=True):
        assert run["seen"] == ALL_STEPS[stop:]
    assert "filter" in found[3]["error"]


@pytest.mark.slow
def test_the_lightning_script_of_the_readme_runs_and_goes_on(tmp_path):
    write_numbers(tmp_path)
    (tmp_path / "train.py").write_text(script("lightning"))
    torchrun(tmp_path, 2)
    saved = sorted((tmp_path / "run").iterdir())
    assert [path.name for path in saved] == [
        "epoch=0-step=20.ckpt",
        "epoch=1-step=40.ckpt",
        "epoch=1-step=60.ckpt",
        "last.ckpt",
    ]
    expected = _loader_state(saved[1])
    for path in saved[1:]:  # as if it had been killed after the first one
        path.unlink()
    shutil.copy(saved[0], tmp_path / "run" / "last.ckpt")
    torchrun(tmp_path, 2)
    assert _loader_state(saved[1]) == expected
    assert expected["epoch"] == 1
    assert expected["batches"] == 8
