"""Hugging Face Trainer in one process: rows, epochs, resume, evaluation, refusals.

What several ranks do is in `test_trainer_torchrun.py`.
"""

import inspect
import json
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import lance
import oracle
import pyarrow as pa
import pytest
import tokenizers
import torch
from datasets.distributed import split_dataset_by_node
from helpers import ids, make_table
from jobs.trainer_runs import Model, StopAt, arguments, dataset, flat, same_weights, train
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

import hf_lance_stream as hls
from hf_lance_stream.ranks import part_of_rank
from hf_lance_stream.trainer import StatefulTrainer, StatefulTrainerMixin

ROWS, SPLITS, CLUMP, BATCH = 1010, 24, 16, 48
STEPS = 21  # of an epoch, of 48 rows each

pytestmark = pytest.mark.filterwarnings(
    # What transformers and accelerate do.
    "ignore:'pin_memory' argument is set as true but no accelerator:UserWarning",
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """The models are too small for more, which would wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """T(1010, 250)."""
    path = tmp_path_factory.mktemp("table") / "t.lance"
    return make_table(path, ROWS, 250, ["id", "vector", "score"])


def expected(epoch, size=BATCH, tail="drop"):
    """The batches of an epoch by the design."""
    rows = oracle.deal(oracle.cut(oracle.sequence(ROWS, CLUMP, 1, epoch), SPLITS, tail))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


# An odd number of batches where two make a step: the last step of an epoch has one.
SETTINGS = {1: {}, 2: {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 16}}
ENDS = {1: [STEPS, 2 * STEPS], 2: [32, 64]}


@pytest.fixture(scope="module")
def whole(table, tmp_path_factory):
    """The uninterrupted run, for 1 and 2 accumulated batches."""
    directory = tmp_path_factory.mktemp("whole")
    return {n: train(table, directory, **options) for n, options in SETTINGS.items()}


def test_case_21_and_36_every_epoch_has_its_rows_in_an_order_of_its_own(whole):
    for accumulated, size in ((1, 48), (2, 16)):
        batches = [batch for epoch in range(3) for batch in expected(epoch, size)]
        assert whole[accumulated]["seen"] == batches
        assert whole[accumulated]["step"] == ENDS[accumulated][0] * 3
        assert whole[accumulated]["epoch"] == 3
    assert expected(0) != expected(1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("place", ["in epoch 0", "at an end", "in epoch 2"])
def test_a_resumed_run_has_the_rows_and_weights_of_the_uninterrupted_one(
    table, tmp_path, whole, workers, accumulated, place
):
    end, second = ENDS[accumulated]
    stop = {"in epoch 0": 7, "at an end": end, "in epoch 2": second + 5}[place]
    options = {"dataloader_num_workers": workers, **SETTINGS[accumulated]}
    first = train(table, tmp_path, stop=stop, **options)
    rest = train(table, tmp_path, resume=stop, **options)
    assert first["step"] == stop
    assert first["seen"] + rest["seen"] == whole[accumulated]["seen"]
    assert same_weights(rest, whole[accumulated])
    assert (rest["step"], rest["epoch"]) == (whole[accumulated]["step"], 3)


def test_a_chain_of_runs_of_one_step_each_is_the_uninterrupted_run(table, tmp_path):
    options = {"per_device_train_batch_size": 336, "num_train_epochs": 2}
    reference = train(table, tmp_path / "reference", **options)
    assert reference["step"] == 6
    seen = []
    for step in range(1, 7):
        run = train(table, tmp_path / "chain", stop=step, resume=step > 1, **options)
        assert run["step"] == step
        seen += run["seen"]
    assert seen == reference["seen"]
    assert same_weights(run, reference)


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 50, "num_train_epochs": 1},
        {"num_train_epochs": 2.5},
        {"dataloader_drop_last": True, "per_device_train_batch_size": 100},
        {
            "dataloader_num_workers": 2,
            "dataloader_persistent_workers": True,
            "dataloader_prefetch_factor": 3,
        },
        {"ignore_data_skip": True},
        {"save_only_model": False, "dataloader_pin_memory": True, "group_by_length": None},
    ],
    ids=lambda options: ",".join(options),
)
def test_arguments_of_trainer_keep_the_resume_exact(table, tmp_path, options):
    options = {k: v for k, v in options.items() if v is not None}
    reference = train(table, tmp_path / "reference", **options)
    first = train(table, tmp_path / "run", stop=24, **options)
    rest = train(table, tmp_path / "run", resume=24, **options)
    assert first["seen"] + rest["seen"] == reference["seen"]
    assert same_weights(rest, reference)
    assert rest["step"] == reference["step"]
    if "dataloader_drop_last" in options:
        assert {len(batch) for batch in reference["seen"]} == {100}


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_checkpoints_are_rotated_whole_and_the_best_model_is_loaded(table, tmp_path, strategy):
    """With an evaluation during the training, on another table."""
    other = make_table(tmp_path / "eval.lance", 50, 20, ["id", "vector", "score"])
    options = {
        "eval_dataset": hls.from_lance(other),
        "eval_strategy": strategy,
        "save_strategy": strategy,
        "save_steps": 10,
        "eval_steps": 10,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 2,
    }
    reference = train(table, tmp_path / "reference", **options)
    stop = 30 if strategy == "steps" else 2 * STEPS
    train(table, tmp_path / "run", stop=stop, **options)
    checkpoints = sorted((tmp_path / "run").glob("checkpoint-*"))
    assert len(checkpoints) <= 2
    assert all((path / "loader_state.json").exists() for path in checkpoints)
    assert not list(tmp_path.rglob("*.unfinished"))
    rest = train(table, tmp_path / "run", resume=True, **options)
    assert rest["seen"] == reference["seen"][stop:]
    assert same_weights(rest, reference)
    losses = [
        [(line["step"], line["eval_loss"]) for line in run["log"] if "eval_loss" in line]
        for run in (rest, reference)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 3


class _Order(StatefulTrainer):
    """Notes which files a checkpoint has when it is pushed to the hub."""

    pushed: tuple[str, ...] = ()

    def _push_from_checkpoint(self, checkpoint_folder):
        self.pushed += tuple(path.name for path in Path(checkpoint_folder).iterdir())


def test_the_state_is_there_before_the_push_and_before_trainer_writes_its_own(
    table, tmp_path, monkeypatch
):
    trainer = _Order(
        Model(),
        arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2),
        train_dataset=dataset(table),
    )
    trainer.args.push_to_hub = True
    trainer.train()
    assert "loader_state.json" in trainer.pushed

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("hf_lance_stream.checkpoint.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        train(table, tmp_path / "full", stop=2)
    left = {path.name for path in (tmp_path / "full" / "checkpoint-2").iterdir()}
    assert not left & {"loader_state.json", "trainer_state.json"}


# Random state and steps that are not over.


def _noisy(rows):
    batch = default_data_collator(rows)
    batch["noise"] = torch.rand(len(rows))
    return batch


def test_a_collator_that_draws_random_numbers_draws_the_same_after_a_resume(table, tmp_path):
    options = {"data_collator": _noisy, "num_train_epochs": 2, "remove_unused_columns": False}
    reference = train(table, tmp_path, **options)
    for stop in (5, STEPS, 30):
        train(table, tmp_path, stop=stop, **options)
        rest = train(table, tmp_path, resume=stop, **options)
        assert rest["seen"] == reference["seen"][stop:]
        assert same_weights(rest, reference)


class _SaveInAStep(TrainerCallback):
    """Save when the rows of a step are there but not trained on, as a SIGTERM may do."""

    trainer = None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 9:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            control.should_training_stop = True


def _as_it_is(ds):
    return ds


def _filtered(ds):
    return ds.filter(lambda row: True)


@pytest.mark.parametrize(("build", "workers"), [(_as_it_is, 0), (_filtered, 0), (_filtered, 2)])
def test_a_checkpoint_saved_within_a_step_does_the_step_again(table, tmp_path, build, workers):
    options = {"max_steps": 30, "dataloader_num_workers": workers, "build": build}
    reference = train(table, tmp_path / "reference", **options)
    callback = _SaveInAStep()
    trainer = StatefulTrainer(
        Model(),
        arguments(tmp_path, max_steps=30, dataloader_num_workers=workers),
        train_dataset=build(dataset(table)),
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.train()
    rest = train(table, tmp_path, resume=9, **options)
    assert rest["seen"] == reference["seen"][9:]


# Datasets whose length is unknown.


@pytest.mark.parametrize(
    ("stop", "workers"), [(7, 0), (10, 0), (15, 0), (20, 0), (21, 0), (10, 2), (15, 2)]
)
def test_case_8_a_run_of_several_passes_without_length_resumes_exactly(tmp_path, stop, workers):
    """T(40, 10) in batches of 4: ten steps per pass, of which Trainer does not know."""
    small = make_table(tmp_path / "small.lance", 40, 10, ["id", "vector", "score"])
    options = {
        "ds": {"num_splits": 4, "shuffle_clump_size": 2},
        "build": lambda ds: ds.filter(lambda row: row["id"] >= 0),
        "per_device_train_batch_size": 4,
        "max_steps": 25,
        "dataloader_num_workers": workers,
    }
    reference = train(small, tmp_path / "reference", **options)
    train(small, tmp_path / "run", stop=stop, **options)
    rest = train(small, tmp_path / "run", resume=stop, **options)
    assert rest["seen"] == reference["seen"][stop:]
    assert rest["step"] == 25
    assert same_weights(rest, reference)
    passes = [flat(reference["seen"][n : n + 10]) for n in (0, 10)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(40))
    assert passes[0] != passes[1]


# Another number of workers.


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0)])
def test_the_number_of_workers_may_change(table, tmp_path, whole, before, after):
    train(table, tmp_path, stop=8, dataloader_num_workers=before)
    rest = train(table, tmp_path, resume=8, dataloader_num_workers=after)
    assert rest["seen"] == whole[1]["seen"][8:]
    assert same_weights(rest, whole[1])


def test_workers_of_a_batched_map_may_not_change_and_the_map_is_named(table, tmp_path):
    options = {
        "build": lambda ds: ds.map(lambda rows: rows, batched=True, batch_size=10),
        "max_steps": 30,
    }
    train(table, tmp_path, stop=8, **options)
    with pytest.raises(ValueError, match="batched"):
        train(table, tmp_path, resume=8, dataloader_num_workers=2, **options)


# States that are not those of the checkpoint.


@pytest.fixture(scope="module")
def checkpoint(table, tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    train(table, directory, stop=4)
    train(table, directory, stop=5)
    return directory


def _copy(checkpoint, directory):
    subprocess.run(["cp", "-r", f"{checkpoint}/.", directory], check=True)
    return directory / "checkpoint-5" / "loader_state.json"


def _change(path, **new):
    path.write_text(json.dumps(json.loads(path.read_text()) | new))


def _truncate(path):
    path.write_text(path.read_text()[:-20])


def _move_on(path):
    path.write_text(path.read_text().replace('"position": 240', '"position": 288'))


DAMAGES = {
    "missing": (Path.unlink, "is missing"),
    "truncated": (_truncate, "is damaged"),
    "empty": (lambda path: path.write_text(""), "is damaged"),
    "no dict": (lambda path: path.write_text("[]"), "is damaged"),
    "other position": (_move_on, "is damaged"),
    "other checksum": (lambda path: _change(path, sha256="0"), "is damaged"),
    "of another step": (
        lambda path: path.write_text((path.parent.parent / "checkpoint-4" / path.name).read_text()),
        "is of step 4, the checkpoint of step 5",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_missing_or_damaged_state_is_refused_with_a_way_out(table, tmp_path, checkpoint, damage):
    path = _copy(checkpoint, tmp_path)
    text = path.read_text()
    change, message = DAMAGES[damage]
    change(path)
    assert not path.exists() or path.read_text() != text
    with pytest.raises(ValueError, match=message) as caught:
        train(table, tmp_path, resume=5)
    assert "ignore_data_skip=True" in str(caught.value)
    assert "resume from another checkpoint" in str(caught.value)


def test_the_way_out_of_a_missing_state_starts_the_epoch_anew_and_says_so(
    table, tmp_path, checkpoint, whole
):
    _copy(checkpoint, tmp_path).unlink()
    with pytest.warns(UserWarning, match="seen again"):
        rest = train(table, tmp_path, resume=5, ignore_data_skip=True)
    assert rest["seen"][:STEPS] == whole[1]["seen"][:STEPS]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_device_train_batch_size": 24}, "rows_per_step: saved 48, now 24"),
        ({"dataloader_drop_last": True, "per_device_train_batch_size": 50}, "rows_per_step"),
        ({"gradient_accumulation_steps": 2}, "rows_per_step: saved 48, now 96"),
        ({"ds": {"shuffle_seed": 2}}, "shuffle_seed"),
        ({"ds": {"shuffle_clump_size": 8}}, "clump"),
        ({"ds": {"filter": "id < 500"}}, "filter: saved None, now 'id < 500'"),
        ({"ds": {"num_splits": 12}}, "num_splits: saved 24, now 12"),
    ],
    ids=str,
)
def test_a_run_of_other_rows_is_refused_by_name(table, checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        train(table, checkpoint, resume=5, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_at_its_version_of_a_table_that_has_moved_on(
    tmp_path, table, whole, workers, caplog
):
    path = str(tmp_path / "t.lance")
    shutil.copytree(table, path)
    options = {"dataloader_num_workers": workers}
    train(path, tmp_path / "run", stop=5, **options)
    lance.dataset(path).delete("id % 2 = 0")
    rest = train(path, tmp_path / "run", resume=5, **options)
    assert rest["seen"] == whole[1]["seen"][5:]  # all three epochs
    assert rest["step"] == 3 * STEPS
    assert f"{path} at version 1, not at 2" in caplog.text
    latest = lance.dataset(path).version
    with pytest.raises(ValueError, match=r"does not fit `train_dataset`(.|\n)*here with version=1"):
        train(path, tmp_path / "run", resume=5, ds={"version": latest}, **options)


def test_a_run_whose_version_is_gone_is_told_to_tag_it(tmp_path):
    path = make_table(tmp_path / "t.lance", 1010, 250, ["id", "vector", "score"])
    train(path, tmp_path / "run", stop=5)
    more = make_table(tmp_path / "more.lance", 480, 250, ["id", "vector", "score"])
    lance.write_dataset(lance.dataset(more).to_table(), path, mode="append")
    lance.dataset(path).cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    with pytest.raises(
        ValueError,
        match=r"does not fit `train_dataset`.*version 1 of .*t\.lance, which is gone.*hls\.pin",
    ):
        train(path, tmp_path / "run", resume=5)


def test_a_moved_table_goes_on_where_the_user_says_so(table, tmp_path, checkpoint, whole):
    moved = str(tmp_path / "moved.lance")
    shutil.copytree(table, moved)
    with pytest.raises(ValueError, match=r"trainer\.loader_state_allow_moved = True"):
        train(moved, checkpoint, resume=5)
    exact = type("Exact", (StatefulTrainer,), {"loader_state_allow_moved": True})
    rest = train(moved, checkpoint, resume=5, trainer=exact)
    assert rest["seen"] == whole[1]["seen"][5:]
    lenient = type("Lenient", (StatefulTrainer,), {"loader_state_strict": False})
    with pytest.warns(UserWarning, match="continuing at the position of a state that differs"):
        rest = train(moved, checkpoint, resume=5, trainer=lenient)
    assert rest["seen"] == whole[1]["seen"][5:]


def test_bases_in_the_wrong_order_are_refused():
    with pytest.raises(TypeError, match="must come before the trainer"):
        type("Wrong", (Trainer, StatefulTrainerMixin), {})


def test_a_loader_of_the_users_own_that_has_no_state_is_told(table, tmp_path):
    class Own(StatefulTrainer):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(self.train_dataset.with_format("torch"), 48)

    with pytest.warns(UserWarning, match="no loader state"):
        train(table, tmp_path, stop=2, trainer=Own)
    assert not (tmp_path / "checkpoint-2" / "loader_state.json").exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("loader_state.json", lambda path: (path.unlink(), path.mkdir())),
        ("trainer_state.json", Path.unlink),
    ],
)
def test_what_is_no_file_of_a_checkpoint_is_missing(tmp_path, checkpoint, name, change):
    path = _copy(checkpoint, tmp_path).parent
    change(path / name)
    trainer = StatefulTrainer(Model(), arguments(tmp_path))
    with pytest.raises(ValueError, match=f"{name} is missing"):
        trainer._restore(None, path)


def test_as_many_rows_per_step_in_other_batches_go_on_with_the_rest(table, checkpoint, whole):
    rest = train(
        table,
        checkpoint,
        resume=5,
        per_device_train_batch_size=24,
        gradient_accumulation_steps=2,
    )
    assert flat(rest["seen"]) == flat(whole[1]["seen"][5:])


class _StopEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 4


def test_an_epoch_that_was_stopped_early_is_refused_on_resume(table, tmp_path):
    train(table, tmp_path, stop=8, callbacks=[_StopEpoch()])
    with pytest.raises(ValueError, match="stopped early"):
        train(table, tmp_path, resume=8)


def test_resuming_without_a_checkpoint_says_so(table, tmp_path):
    tmp_path.joinpath("run").mkdir()
    with pytest.raises(ValueError, match="No valid checkpoint"):
        train(table, tmp_path / "run", resume=True)


# Settings.


def test_settings_of_accelerate_that_change_the_batches_are_refused_or_said(table, tmp_path):
    with pytest.raises(ValueError, match="`split_batches` must be False"):
        train(table, tmp_path, max_steps=1, accelerator_config={"split_batches": True})
    with pytest.warns(UserWarning, match="dispatch_batches=True has no effect"):
        run = train(table, tmp_path, max_steps=2, accelerator_config={"dispatch_batches": True})
    assert run["seen"] == expected(0)[:2]


def test_a_dataset_is_divided_exactly_once(table):
    ds = dataset(table)
    mine = ids(ds.shard(4, 1))
    assert ids(part_of_rank(ds, 1, 4)) == mine
    divided = [
        ds.shard(4, 1),
        split_dataset_by_node(ds, 1, 4),
        dataset(table, rank=1, world_size=4),
    ]
    for one in divided:
        assert ids(part_of_rank(one, 1, 4)) == mine
        assert ids(part_of_rank(one.map(lambda row: row), 1, 4)) == mine
        assert ids(part_of_rank(one, 0, 1)) == mine  # a part, of a user with one process
        for rank, world_size in ((0, 4), (1, 2), (1, 8)):
            with pytest.raises(ValueError, match="already divided"):
                part_of_rank(one, rank, world_size)
    with pytest.raises(ValueError, match="num_splits"):
        part_of_rank(ds, 0, 5)


@pytest.mark.parametrize(
    ("copies", "places"),
    [
        ({}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ({"tp": 2}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ({"tp": 2, "cp": 2}, [(0, 1)] * 4),
    ],
)
def test_members_of_a_model_parallel_group_are_one_rank(copies, places):
    for index, place in enumerate(places):
        trainer = SimpleNamespace(
            args=SimpleNamespace(process_index=index, world_size=4),
            get_tp_size=lambda: copies.get("tp", 1),
            get_cp_size=lambda: copies.get("cp", 1),
            get_sp_size=lambda: copies.get("sp", 1),
        )
        assert StatefulTrainerMixin._data_rank(trainer) == place
    trainer.get_sp_size = lambda: 2
    with pytest.raises(ValueError, match="sequence parallelism"):
        StatefulTrainerMixin._data_rank(trainer)


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path):
    wide = make_table(tmp_path / "wide.lance", 100, 50, ["id", "text", "vector", "score"])
    run = train(wide, tmp_path, max_steps=2, ds={"num_splits": 4})
    assert len(run["seen"]) == 2


def test_other_datasets_are_left_to_trainer(table, tmp_path):
    rows = [{"id": n, "vector": [float(n)] * 4, "score": n} for n in range(20)]
    trainer = StatefulTrainer(Model(), arguments(tmp_path, max_steps=3), train_dataset=rows)
    assert trainer.train().global_step == 3
    assert sorted(flat(trainer.model.seen)[:20]) == list(range(20))


# Evaluation.


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("build", [_as_it_is, _filtered])
def test_every_row_is_evaluated_once_and_in_order(table, tmp_path, build, workers):
    options = arguments(tmp_path, per_device_eval_batch_size=64, dataloader_num_workers=workers)
    trainer = StatefulTrainer(Model(), options, eval_dataset=build(hls.from_lance(table)))
    found = trainer.predict(trainer.eval_dataset).predictions[1]
    assert found.tolist() == list(range(ROWS))
    assert trainer.evaluate()["eval_loss"] > 0


def test_evaluating_changes_nothing_in_the_training(table, tmp_path, whole):
    run = train(
        table, tmp_path, eval_dataset=hls.from_lance(table), eval_strategy="steps", eval_steps=7
    )
    assert run["seen"] == whole[1]["seen"]
    assert same_weights(run, whole[1])


# Trainer without the mixin.


@pytest.mark.parametrize("dispatch", [True, False, None])
def test_stock_trainer_in_one_process_reads_the_right_rows(table, tmp_path, dispatch, whole):
    config = {"dispatch_batches": dispatch}
    run = train(table, tmp_path, trainer=Trainer, accelerator_config=config)
    assert run["seen"] == whole[1]["seen"]


def test_who_has_imported_trainer_gets_the_warning_without_importing_ours(table):
    program = (
        "import sys, transformers, hf_lance_stream as hls; transformers.Trainer; "
        f"hls.from_lance({str(table)!r}); assert 'hf_lance_stream.trainer' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_stock_trainer_reads_all_again_on_resume_and_we_say_so(table, tmp_path, whole):
    options = {"trainer": Trainer, "accelerator_config": {"dispatch_batches": False}}
    train(table, tmp_path, stop=30, **options)
    with pytest.warns(UserWarning, match="9 batches of this epoch again"):
        rest = train(table, tmp_path, resume=30, **options)
    assert rest["seen"] == whole[1]["seen"][30:]
    with pytest.raises(ValueError, match="is missing"):
        train(table, tmp_path, resume=30)


# A language model.


@pytest.fixture(scope="module")
def documentation(tmp_path_factory):
    """A table of the paragraphs of Python's own documentation, and a tokenizer trained on it."""
    texts = [text for page in topics.values() for text in page.split("\n\n") if len(text) > 80]
    path = str(tmp_path_factory.mktemp("documentation") / "texts.lance")
    lance.write_dataset(pa.table({"text": texts}), path, max_rows_per_file=500)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        texts, tokenizers.trainers.BpeTrainer(vocab_size=400, show_progress=False)
    )
    return path, tokenizer


def _language_model(documentation, output, *, stop=None, resume=None, workers=0):
    """Losses of the steps, and weights, of a training on packed blocks of 64 tokens."""
    path, tokenizer = documentation

    def pack(rows):
        tokens = [n for text in rows["text"] for n in tokenizer.encode(text).ids]
        blocks = [tokens[i : i + 64] for i in range(0, len(tokens) - 63, 64)]
        return {"input_ids": blocks, "labels": blocks}

    ds = hls.from_lance(path, num_splits=8, shuffle_seed=1, shuffle_clump_size=4)
    ds = ds.map(pack, batched=True, batch_size=32, remove_columns=["text"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    model = LlamaForCausalLM(config)
    options = arguments(
        output,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        max_steps=80,
        dataloader_num_workers=workers,
        logging_strategy="steps",
        logging_steps=1,
        label_names=["labels"],
    )
    trainer = StatefulTrainer(model, options, train_dataset=ds, callbacks=[StopAt(stop)])
    trainer.train(f"{output}/checkpoint-{resume}" if resume else None)
    losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    return losses, {"weights": model.state_dict()}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loss_curve_of_a_resumed_language_model_lies_on_that_of_the_uninterrupted_one(
    documentation, tmp_path, workers
):
    losses, model = _language_model(documentation, tmp_path / "whole", workers=workers)
    first, _ = _language_model(documentation, tmp_path, stop=27, workers=workers)
    rest, resumed = _language_model(documentation, tmp_path, resume=27, workers=workers)
    assert list(first) == list(range(1, 28))
    assert {step: losses[step] for step in first} == first
    assert rest == losses  # the log of the checkpoint goes on
    assert same_weights(resumed, model)
    assert sum(losses[step] for step in range(71, 81)) / 10 < losses[1] - 1


# What is relied on.


def test_contract_private_parts_of_transformers_and_accelerate():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(Trainer._get_dataloader) == [
        "self",
        "dataset",
        "description",
        "batch_size",
        "sampler_fn",
        "is_training",
        "dataloader_key",
    ]
    assert names(Trainer._save_rng_state) == ["self", "output_dir"]
    assert names(Trainer._load_rng_state) == ["self", "checkpoint"]
    assert names(Trainer._get_collator_with_removed_columns)[1:] == [
        "data_collator",
        "description",
    ]
    assert names(Trainer.get_batch_samples)[1:] == ["epoch_iterator", "num_batches", "device"]
    for method in (
        Trainer.get_train_dataloader,
        Trainer.get_eval_dataloader,
        Trainer.get_test_dataloader,
    ):
        assert "self._get_dataloader(" in inspect.getsource(method)

    # On every rank, before the file that makes the checkpoint one, the push and the rotation.
    source = inspect.getsource(Trainer._save_checkpoint)
    places = [
        source.index(text)
        for text in (
            "self._save_rng_state(output_dir)",
            "self.state.save_to_json(",
            "self._push_from_checkpoint(",
            "rotate_checkpoints(",
        )
    ]
    assert all(first < second for first, second in pairwise(places))

    # From 5.25 on in a method of its own, before in _run_epoch; by the name of the module in both.
    place = getattr(Trainer, "get_resumed_dataloader", Trainer._run_epoch)
    assert re.search(r"\bskip_first_batches\((train_)?dataloader, ", inspect.getsource(place))
    assert "skip_first_batches" in place.__code__.co_names
    assert "callback_handler.train_dataloader = train_dataloader" in inspect.getsource(
        Trainer._prepare_for_training
    )


def test_the_package_does_not_import_transformers_until_it_is_asked_to():
    code = (
        "import sys, hf_lance_stream as hls; assert 'transformers' not in sys.modules; "
        "hls.trainer.StatefulTrainer; assert 'transformers' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
