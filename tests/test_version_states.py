"""Names of versions, states that go on at theirs, tables at another place, tags of a run."""

import itertools
import logging
import multiprocessing
import os
import pickle
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import datasets
import lance
import lancedb
import pyarrow as pa
import pytest
from helpers import ids, make_table, through_json
from s3 import S3
from torchdata.stateful_dataloader import StatefulDataLoader

import hf_lance_stream as hls
from hf_lance_stream import refs
from hf_lance_stream.source import open_source

multiprocessing.set_forkserver_preload(["torch", "datasets", "lance", "hf_lance_stream"])

SHUFFLED: dict[str, Any] = {"num_splits": 4, "shuffle_seed": 3, "shuffle_clump_size": 4}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """T(100, 25)."""
    return make_table(tmp_path / "pets.lance", 100, 25)


def grow(path: str) -> int:
    """Append 60 rows, delete a third of all; the latest version."""
    make_table(path, 60, 25, start=100, mode="append")
    lance.dataset(path).delete("id % 3 = 0")
    return int(lance.dataset(path).version)


def clean_up(path: str) -> None:
    lance.dataset(path).cleanup_old_versions(
        older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
    )


def cut(ds: Any, rows: int) -> tuple[list[int], dict[str, Any]]:
    """The first rows of a pass and the state after them."""
    seen = [int(row["id"]) for row in itertools.islice(iter(ds), rows)]
    return seen, through_json(ds.state_dict())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hf_lance_stream.versions"]


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The URIs that Lance is asked to open."""
    uris: list[str] = []
    original = lance.dataset

    def recorder(uri: Any, *args: Any, **options: Any) -> lance.LanceDataset:
        uris.append(str(uri))
        return original(uri, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(lance, "dataset", recorder)
        yield uris


# Names.


@pytest.fixture
def branched(path: str) -> str:
    """A table with version 1 tagged gold, two branches, and a tag of one of them."""
    main = lance.dataset(path)
    main.tags.create("gold", 1)
    trial = main.create_branch("trial", 1)
    trial.delete("id < 90")
    main.create_branch("work/deep", 1).delete("id >= 5")
    make_table(path, 10, 25, start=100, mode="append")  # version 2 of main too
    main.tags.create("trial-2", ("trial", 2))
    return path


NAMES = {
    1: list(range(100)),
    "gold": list(range(100)),
    None: list(range(110)),
    "main": list(range(110)),
    "trial": list(range(90, 100)),
    ("trial", 2): list(range(90, 100)),
    ("trial", 1): list(range(100)),
    ("trial", None): list(range(90, 100)),
    ("main", 1): list(range(100)),
    "trial-2": list(range(90, 100)),
    "work/deep": list(range(5)),
}
SOURCES = {
    "path": lambda path: path,
    "uri": lambda path: f"file://{path}",
    "lance": lance.dataset,
    "lancedb": lambda path: lancedb.connect(str(Path(path).parent)).open_table("pets"),
    "branch": lambda path: f"{path}/tree/work/deep",
}


@pytest.mark.parametrize("version", NAMES, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_a_version_is_a_number_a_tag_a_branch_or_a_version_of_a_branch(
    branched: str, source: str, version: Any
) -> None:
    if source == "branch" and version in (1, None):
        want = {1: NAMES[1], None: NAMES["work/deep"]}[version]  # those of that branch
    else:
        want = NAMES[version]
    ds = hls.from_lance(SOURCES[source](branched), version=version)
    assert ids(ds) == want
    assert ids(pickle.loads(pickle.dumps(ds))) == want  # opened anew, as in a worker


@pytest.mark.parametrize("reference", ["trial-2", ("trial", 2)])
def test_a_handle_that_was_checked_out_on_a_branch_is_reopened_there(
    branched: str, reference: Any
) -> None:
    handle = lance.dataset(branched).checkout_version(reference)
    ds = hls.from_lance(handle)
    assert ids(ds) == ids(pickle.loads(pickle.dumps(ds))) == list(range(90, 100))
    main = hls.from_lance(handle, version="main")
    assert ids(main) == ids(pickle.loads(pickle.dumps(main))) == list(range(110))


def test_the_manifest_of_lance_tells_the_branch_of_a_handle(branched: str) -> None:
    """Contract: the private place that the branch of an open table is read from."""
    main = lance.dataset(branched)
    assert refs._branch_of(main) == "main"
    for name in ("trial", "work/deep"):
        branch = main.checkout_version((name, None))
        assert refs._branch_of(branch) == name
        assert branch.uri == main.uri  # else the handle would tell
        assert main.create_branch(f"{name}-2", (name, None)).uri == f"{branched}/tree/{name}-2"


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("glod", r"`version`: .*pets\.lance' has no version 'glod'.*did you mean 'gold'"),
        ("trail", "did you mean 'trial'.*its tags and branches: .*'gold', 'trial', 'trial-2'"),
        (("trail", 1), "did you mean 'trial'"),
        (("gold", 1), "its .*branches: .*'trial', 'work/deep'"),
        (("trial", 9), "no version .*'trial', 9"),
        (("trial",), "`version` must be"),
        (("trial", "1"), "`version` must be"),
        (("trial", -1), "`version` must be"),
        ((None, 1), "`version` must be"),
        (["trial", 1], "`version` must be"),
    ],
    ids=str,
)
def test_a_name_that_is_none_lists_near_ones(branched: str, version: Any, words: str) -> None:
    with pytest.raises((FileNotFoundError, ValueError), match=words):
        hls.from_lance(branched, version=version)


def test_a_state_tells_branches_apart(branched: str) -> None:
    _, state = cut(hls.from_lance(branched, version="trial"), 3)
    for version in (None, 2, "work/deep"):  # version 2 of each
        ds = hls.from_lance(branched, version=version)
        with pytest.raises(ValueError, match=r"table: saved '.*/tree/trial', now "):
            ds.load_state_dict(state)
    for spelling in (branched + "/tree/trial", lance.dataset(branched + "/tree/trial")):
        ds = hls.from_lance(spelling)
        ds.load_state_dict(state)
        assert ids(ds) == list(range(93, 100))


def test_a_branch_that_moved_on_is_read_at_the_saved_version_of_the_branch(branched: str) -> None:
    _, state = cut(hls.from_lance(branched, version="trial"), 3)
    lance.dataset(f"{branched}/tree/trial").delete("id = 95")
    ds = hls.from_lance(branched, version="trial")
    assert len(ds) == 9
    ds.load_state_dict(state)
    assert ids(ds) == list(range(93, 100))
    with pytest.raises(ValueError, match="version: saved 2, now 3"):
        hls.from_lance(branched, version=("trial", 3)).load_state_dict(state)


def test_load_dataset_takes_branches(branched: str) -> None:
    for version in ("trial", ("trial", 2)):
        ds = datasets.load_dataset(
            "lance_stream", data_files=branched, split="train", streaming=True, version=version
        )
        assert ids(ds) == list(range(90, 100))


# States.


def test_case_2_and_24_the_saved_version_is_read_on_in_later_epochs_too_and_said_once(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = hls.from_lance(path, **SHUFFLED)
    seen, state = cut(whole, 30)
    latest = grow(path)
    ds = hls.from_lance(path, **SHUFFLED)
    assert len(ds) == len(hls.from_lance(path, **SHUFFLED, version=latest)) != 100
    ds.load_state_dict(state)
    assert len(ds) == 100
    assert f"Table: {path}, version 1" in ds.describe()
    assert "(version 1)" in repr(ds)
    assert seen + ids(ds) == ids(whole)
    for epoch in (1, 2):
        ds.set_epoch(epoch)
        whole.set_epoch(epoch)
        assert ids(ds) == ids(whole)
    again, later = cut(ds, 10)
    new = hls.from_lance(path, **SHUFFLED)
    new.load_state_dict(later)
    assert again + ids(new) == ids(ds)
    said = warnings_of(caplog)
    assert len(said) == 2  # once for each load
    for word in (path, "at version 1", f"not at {latest}", "version=1 to silence"):
        assert word in said[0]
    caplog.clear()
    named = hls.from_lance(path, **SHUFFLED, version=1)
    named.load_state_dict(state)
    assert not warnings_of(caplog)


def test_a_version_that_was_named_stays_and_a_refusal_changes_nothing(path: str) -> None:
    _, state = cut(hls.from_lance(path, **SHUFFLED), 30)
    latest = grow(path)
    lance.dataset(path).tags.create("now", latest)
    for version in (latest, "now", ("main", latest)):
        ds = hls.from_lance(path, **SHUFFLED, version=version)
        with pytest.raises(ValueError, match=f"version: saved 1, now {latest}"):
            ds.load_state_dict(state)
        assert ids(ds) == ids(hls.from_lance(path, **SHUFFLED))
    ds = hls.from_lance(path, num_splits=4, shuffle_seed=4)
    with pytest.raises(ValueError, match="shuffle_seed: saved 3, now 4"):
        ds.load_state_dict(state)
    assert ids(ds) == ids(hls.from_lance(path, num_splits=4, shuffle_seed=4))


def test_a_state_refused_after_its_version_was_opened_leaves_the_dataset_at_its_own(
    path: str,
) -> None:
    _, state = cut(hls.from_lance(path, **SHUFFLED), 30)
    state["examples_iterable"]["position"] = 10**6
    latest = grow(path)
    ds = hls.from_lance(path, **SHUFFLED)
    with pytest.raises(ValueError, match="`position` must be an integer in"):
        ds.load_state_dict(state)
    for _ in range(2):
        assert f"version {latest}" in ds.describe()
        assert ids(ds) == ids(hls.from_lance(path, **SHUFFLED))


def test_strict_false_goes_on_in_the_version_of_the_dataset(path: str) -> None:
    _, state = cut(hls.from_lance(path), 30)
    make_table(path, 10, 25, start=100, mode="append")
    ds = hls.from_lance(path)
    with pytest.warns(UserWarning, match="version: saved 1, now 2"):
        ds.load_state_dict(state, strict=False)
    assert ids(ds) == list(range(30, 110))


@pytest.mark.parametrize("workers", [None, 0, 2])
def test_case_24_a_version_that_is_gone_is_named_with_the_advice_to_tag(
    path: str, workers: int | None
) -> None:
    def build() -> Any:
        ds = hls.from_lance(path, **SHUFFLED)
        return ds if workers is None else hls.stateful_dataloader(ds, 5, workers)

    first = build()
    _ = next(iter(first))
    state = through_json(first.state_dict())
    latest = grow(path)
    clean_up(path)
    new = build()
    words = rf"version 1 of .*pets\.lance, which is gone.*hls\.pin.*in version {latest}"
    with pytest.raises(FileNotFoundError, match=words):
        new.load_state_dict(state)
    whole = ids(hls.from_lance(path, **SHUFFLED))
    assert [int(i) for i in flat(new)] == whole  # as if nothing had happened


def flat(rows: Any) -> Iterator[int]:
    for row in rows:
        yield from row["id"].tolist() if hasattr(row["id"], "tolist") else [row["id"]]


def test_another_table_at_the_same_place_is_refused_by_name(path: str) -> None:
    lance.dataset(path).delete("id = 99")
    _, state = cut(hls.from_lance(path), 30)
    shutil.rmtree(path)
    make_table(path, 100, 25)
    for latest in (1, 2, 3):  # before that version, at it, after it
        ds = hls.from_lance(path)
        words = {
            1: "version 2 of .*pets.lance, which is gone",
            2: "files: saved '.*', now '",
            3: "with other files than .*: files: saved '.*', now '.*it was made anew",
        }[latest]
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            ds.load_state_dict(state)
        lance.dataset(path).delete("id = 99" if latest == 1 else "id = 3")


@pytest.mark.parametrize("version", ["2", -1, True, [1], "[1]", None, 1.0])
def test_a_damaged_version_in_a_state_is_refused(path: str, version: Any) -> None:
    _, state = cut(hls.from_lance(path), 30)
    state["examples_iterable"]["fingerprint"]["version"] = version
    grow(path)
    with pytest.raises(ValueError, match=r"versions of 1 tables cannot be found|version: saved"):
        hls.from_lance(path).load_state_dict(state)


WRAPS = {
    "map": lambda ds: ds.map(lambda row: {"id": row["id"]}),
    "filter": lambda ds: ds.filter(lambda row: row["id"] % 4),
    "take and skip": lambda ds: ds.skip(5).take(70),
    "torch": lambda ds: ds.with_format("torch"),
    "a rank": lambda ds: ds.shard(2, 1),
    "batched map": lambda ds: ds.map(lambda rows: {"id": [*rows["id"]] * 2}, batched=True),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_state_under_other_steps_goes_on_at_its_version(path: str, wrap: Any) -> None:
    whole = wrap(hls.from_lance(path, **SHUFFLED))
    seen, state = cut(whole, 21)
    grow(path)
    ds = wrap(hls.from_lance(path, **SHUFFLED))
    ds.load_state_dict(state)
    assert seen + ids(ds) == ids(whole) == ids(ds)
    assert ids(ds.take(3)) == ids(whole)[:3]  # made after the state was loaded


def test_tables_read_as_one_and_sources_mixed_each_go_on_at_their_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two, three = (
        make_table(tmp_path / f"{n}.lance", 60, 20, start=1000 * n) for n in range(3)
    )
    grow(two)

    def build() -> Any:
        return datasets.interleave_datasets(
            [
                hls.from_lance([one, two], **SHUFFLED),
                hls.from_lance(three, shuffle_seed=1).map(lambda row: row),
            ],
            stopping_strategy="all_exhausted",
        )

    whole = build()
    want = ids(whole)
    seen, state = cut(whole, 41)
    make_table(two, 5, 25, start=5000, mode="append")
    grow(three)
    ds = build()
    ds.load_state_dict(state)
    assert seen + ids(ds) == want == ids(ds)
    [said] = warnings_of(caplog)
    assert f"{two} at version 3, not at 4" in said
    assert f"{three} at version 1, not at 3" in said
    assert one not in said
    with pytest.raises(ValueError, match="version: saved 1, now 3"):
        datasets.interleave_datasets(
            [
                hls.from_lance([one, two], **SHUFFLED),
                hls.from_lance(three, shuffle_seed=1, version=3).map(lambda row: row),
            ],
            stopping_strategy="all_exhausted",
        ).load_state_dict(state)


@pytest.mark.parametrize("mix", [datasets.interleave_datasets, datasets.concatenate_datasets])
def test_a_source_of_a_mix_that_is_at_its_start_goes_on_at_its_version_too(
    tmp_path: Path, mix: Any
) -> None:
    """`datasets` keeps no state of it: before the first row, and where a pass begins anew."""
    one, two = (make_table(tmp_path / f"{n}.lance", 10 + n, 4, start=100 * n) for n in range(2))
    options: dict[str, Any] = {}
    if mix is datasets.interleave_datasets:
        options["stopping_strategy"] = "all_exhausted"

    def build(**more: Any) -> Any:
        return mix([hls.from_lance(one, **more), hls.from_lance(two, **more)], **options)

    want = ids(build())
    states = [cut(build(), k) for k in range(len(want))]
    later = build()
    later.set_epoch(1)  # then a concatenation has a source for each fragment
    seen_later, state_later = cut(later, 13)
    for path in (one, two):
        make_table(path, 5, 25, start=5000, mode="append")
    for seen, state in states:
        ds = build()
        ds.load_state_dict(state)
        assert seen + ids(ds) == want == ids(ds), len(seen)
        with pytest.raises(ValueError, match="version: saved 1, now 2"):
            build(version=2).load_state_dict(state)
    ds = build()
    ds.load_state_dict(state_later)
    assert seen_later + ids(ds) == ids(later) == ids(ds)


def test_the_versions_of_very_many_tables_are_not_in_a_state_and_that_is_said(
    tmp_path: Path,
) -> None:
    path = make_table(tmp_path / "t.lance", 3, 3)
    _, state = cut(hls.from_lance([path] * 120), 5)
    make_table(path, 3, 3, mode="append")
    with pytest.raises(ValueError, match=r"versions of 120 tables .*lance\.dataset\(uri, version"):
        hls.from_lance([path] * 120).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("with_filter", [False, True], ids=["counted", "asked"])
def test_a_loader_goes_on_at_the_saved_version_with_its_length(
    path: str, workers: int, with_filter: bool
) -> None:
    """Its batches are counted here, or only its workers know where they are."""

    def build() -> Any:
        ds = hls.from_lance(path, **SHUFFLED)
        if with_filter:
            ds = ds.filter(lambda row: row["id"] % 7 != 0)
        return hls.stateful_dataloader(ds, 5, workers)

    def batches(loader: Any) -> list[list[int]]:
        return [batch["id"].tolist() for batch in loader]

    first = build()
    rows = iter(first)
    seen = [next(rows)["id"].tolist() for _ in range(3)]
    state = through_json(first.state_dict())
    seen += [batch["id"].tolist() for batch in rows]
    grow(path)
    loader = build()
    loader.load_state_dict(state)
    if not with_filter:
        assert len(loader) == 20
    assert batches(loader) == seen[3:]
    assert batches(loader) == seen
    if not with_filter:
        merged = hls.merge_state_dicts([state])
        other = hls.stateful_dataloader(hls.from_lance(path, **SHUFFLED), 10)
        other.load_state_dict(merged)
        assert list(itertools.chain(*batches(other))) == list(itertools.chain(*seen[3:]))


def test_stock_workers_that_refuse_a_state_say_why(path: str) -> None:
    def build() -> StatefulDataLoader:
        ds = hls.from_lance(path, **SHUFFLED)
        return StatefulDataLoader(ds, 5, num_workers=2, multiprocessing_context="forkserver")

    first = build()
    _ = next(iter(first))
    state = first.state_dict()
    grow(path)
    clean_up(path)
    new = build()
    new.load_state_dict(state)
    with pytest.raises(FileNotFoundError, match=r"version 1 of .*which is gone.*hls\.pin"):
        list(new)


def test_accelerate_goes_on_at_the_saved_version(path: str, tmp_path: Path) -> None:
    from accelerate import Accelerator

    from hf_lance_stream.accelerate import stateful_dataloader

    def build() -> tuple[Any, Any]:
        accelerator = Accelerator(cpu=True)
        return accelerator, stateful_dataloader(accelerator, hls.from_lance(path, **SHUFFLED), 5)

    accelerator, loader = build()
    rows = iter(loader)
    seen = [next(rows)["id"].tolist() for _ in range(3)]
    accelerator.save_state(str(tmp_path / "saved"))
    seen += [batch["id"].tolist() for batch in rows]
    grow(path)
    accelerator, loader = build()
    accelerator.load_state(str(tmp_path / "saved"))
    assert len(loader) == 20
    assert [batch["id"].tolist() for batch in loader] == seen[3:]
    assert [batch["id"].tolist() for batch in loader] == seen


@pytest.mark.filterwarnings("ignore")  # those of Lightning
@pytest.mark.parametrize("change", ["longer", "shorter"])
@pytest.mark.parametrize("limit", [1.0, 18, 0.5], ids=str)
def test_lightning_goes_on_at_the_saved_version_with_its_number_of_batches(
    path: str, tmp_path: Path, change: str, limit: Any
) -> None:
    """Lightning counts the batches before it loads the state."""
    lightning = pytest.importorskip("pytorch_lightning")
    from jobs.lightning_ranks import OPTIONS, Module

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    def fit(stop: int | None = None, resume: Any = None, breaks_at: int | None = None) -> Any:
        module = Module(path, tmp_path, False, 0, 5, stop, breaks_at)
        trainer = lightning.Trainer(
            max_epochs=2,
            max_steps=-1 if stop is None else stop,
            limit_train_batches=limit,
            limit_val_batches=0,
            **OPTIONS,
        )
        trainer.fit(module, ckpt_path=resume)
        return module.seen, trainer.num_training_batches

    whole, batches = fit()
    seen, _ = fit(stop=3)
    if change == "longer":
        make_table(path, 100, 25, start=100, mode="append")
    else:
        lance.dataset(path).delete("id >= 50")
    rest, found = fit(resume=tmp_path / "3.ckpt")
    assert seen + rest == whole
    assert found == batches


# Tables at another place.


def test_a_copy_at_another_place_goes_on_where_that_is_allowed(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lance.dataset(path).delete("id = 7")
    whole = hls.from_lance(path, **SHUFFLED)
    seen, state = cut(whole, 30)
    moved = str(tmp_path / "moved.lance")
    shutil.copytree(path, moved)
    for version in (2, 3):  # the copy as it was, then moved on
        new = hls.from_lance(moved, **SHUFFLED)
        with opened(monkeypatch) as uris:
            with pytest.raises(ValueError, match=r"table: saved .*(.|\n)*allow_moved=True"):
                new.load_state_dict(state)
            assert not uris
            new.load_state_dict(state, allow_moved=True)
            assert set(uris) == ({moved} if version == 3 else set())  # never that of the state
        assert seen + ids(new) == ids(whole) == ids(new)
        assert f"Table: {moved}, version 2" in new.describe()
        _, later = cut(new, 5)
        again = hls.from_lance(moved, **SHUFFLED)
        again.load_state_dict(later)  # its states are of the new place
        assert ids(again) == ids(whole)[5:]
        lance.dataset(moved).delete("id = 8")


def test_a_copy_that_has_become_another_table_is_refused_where_moving_is_allowed(
    path: str, tmp_path: Path
) -> None:
    copies = [str(tmp_path / f"{n}.lance") for n in range(3)]
    for copy in copies:
        shutil.copytree(path, copy)
    lance.dataset(path).delete("id = 7")
    lance.dataset(copies[0]).delete("id = 8")  # as many rows, and the same data files
    lance.dataset(copies[1]).update({"id": "id"}, where="id = 7")
    _, state = cut(hls.from_lance(path), 30)
    for copy, words in zip(copies, ("files: saved", "files: saved", "which is gone"), strict=True):
        ds = hls.from_lance(copy)
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            ds.load_state_dict(state, allow_moved=True)
        assert len(ds) == len(hls.from_lance(copy))
    other = make_table(tmp_path / "other.lance", 100, 25)
    lance.dataset(other).delete("id = 7")
    with pytest.raises(ValueError, match=r"table: saved .*(.|\n)*files: saved"):
        hls.from_lance(other).load_state_dict(state, allow_moved=True)
    with pytest.raises(ValueError, match="filter: saved None"):
        hls.from_lance(path, filter="id > 3").load_state_dict(state, allow_moved=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("with_filter", [False, True], ids=["counted", "asked"])
def test_a_loader_goes_on_with_a_table_that_was_moved(
    path: str, tmp_path: Path, workers: int, with_filter: bool
) -> None:
    def build(path: str) -> Any:
        ds = hls.from_lance(path, **SHUFFLED)
        if with_filter:
            ds = ds.filter(lambda row: row["id"] % 7 != 0)
        return hls.stateful_dataloader(ds, 5, workers)

    first = build(path)
    rows = iter(first)
    seen = [next(rows)["id"].tolist() for _ in range(3)]
    state = through_json(first.state_dict())
    seen += [batch["id"].tolist() for batch in rows]
    moved = str(tmp_path / "moved.lance")
    os.rename(path, moved)
    grow(moved)
    loader = build(moved)
    with pytest.raises(ValueError, match="table: saved"):
        loader.load_state_dict(state)
    loader.load_state_dict(state, allow_moved=True)
    assert [batch["id"].tolist() for batch in loader] == seen[3:]


# Tags of a run.


def test_case_24_a_pinned_version_survives_a_clean_up_and_its_states_go_on(path: str) -> None:
    whole = hls.from_lance(path, **SHUFFLED)
    assert hls.pin(whole, tag="run-7") == {path: 1}
    seen, state = cut(whole, 30)
    latest = grow(path)
    lance.write_dataset(pa.table({"id": range(50)}), path, mode="overwrite")
    clean_up(path)
    with pytest.raises(RuntimeError, match=r"delete the following tag.*run-7"):
        lancedb.connect(str(Path(path).parent)).open_table("pets").optimize(
            cleanup_older_than=timedelta(milliseconds=1)
        )
    for version in (None, 1, "run-7"):
        ds = hls.from_lance(path, **SHUFFLED, version=version)
        ds.load_state_dict(state)
        assert seen + ids(ds) == ids(hls.from_lance(path, **SHUFFLED, version=1))
    with pytest.raises(FileNotFoundError):
        hls.from_lance(path, version=latest)
    assert hls.unpin(ds, tag="run-7") == {path: 1}
    assert hls.unpin(ds, tag="run-7") == {}
    clean_up(path)
    with pytest.raises(FileNotFoundError):
        hls.from_lance(path, version=1)


def test_pinning_again_is_the_same_and_a_tag_of_another_version_is_refused_by_name(
    path: str,
) -> None:
    ds = hls.from_lance(path)
    for _ in range(2):
        assert hls.pin(ds.map(lambda row: row).with_format("torch").take(5), "run") == {path: 1}
    grow(path)
    new = hls.from_lance(path)
    for change in (hls.pin, hls.unpin):
        with pytest.raises(
            ValueError, match=r"`tag`: 'run' of .*pets.lance is that of version 1, "
        ):
            change(new, "run")
    assert hls.pin(new, "other") == {path: 3}
    assert {k: v["version"] for k, v in lance.dataset(path).tags.list().items()} == {
        "run": 1,
        "other": 3,
    }
    for bad in ("a b", "", "a/b", None, 7):
        with pytest.raises(ValueError, match="`tag`"):
            hls.pin(ds, bad)
    with pytest.raises(ValueError, match="`ds` must be a dataset of Lance tables"):
        hls.pin(datasets.Dataset.from_dict({"a": [1]}), "run")


def test_every_table_and_branch_is_pinned_or_none(branched: str, tmp_path: Path) -> None:
    other = make_table(tmp_path / "other.lance", 10, 25)
    both = datasets.concatenate_datasets(
        [hls.from_lance([other, branched]), hls.from_lance(other, shuffle_seed=1)]
    )
    assert hls.pin(both, "run") == {other: 1, branched: 2}
    trial = hls.from_lance(branched, version="trial")
    assert hls.pin(trial, "on-trial") == {f"{branched}/tree/trial": 2}
    found = lance.dataset(branched).tags.list()["on-trial"]
    assert (found["branch"], found["version"]) == ("trial", 2)
    assert hls.pin(hls.from_lance(branched, version="on-trial"), "on-trial")
    with pytest.raises(ValueError, match="that of version 2 of branch 'trial', and version 2"):
        hls.pin(hls.from_lance(branched), "on-trial")
    mixed = hls.from_lance(
        [lance.dataset(other), lance.dataset(branched), branched + "/tree/trial"]
    )
    with pytest.raises(ValueError, match=r"'mixed' of .*trial is that of version 2"):
        hls.pin(mixed, "mixed")
    assert "mixed" not in lance.dataset(other).tags.list()
    assert "mixed" not in lance.dataset(branched).tags.list()


def test_ranks_that_pin_at_the_same_time_agree(path: str) -> None:
    found: list[Any] = []

    def run() -> None:
        ds = hls.from_lance(path)
        barrier.wait()
        try:
            found.append(hls.pin(ds, "run"))
        except Exception as error:
            found.append(error)

    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{path: 1}] * 8


def test_a_run_on_an_object_store_is_pinned_and_goes_on_at_its_version() -> None:
    with S3() as s3:
        uri, options = s3.uri("pets.lance"), s3.options
        make_table(uri, 100, 25, storage_options=options)

        def build(**more: Any) -> Any:
            return hls.from_lance(uri, **SHUFFLED, storage_options=options, **more)

        whole = build()
        assert hls.pin(whole, "run") == {uri: 1}
        want, (_, state) = ids(whole), cut(whole, 30)
        make_table(uri, 10, 25, start=100, mode="append", storage_options=options)
        latest = lance.dataset(uri, storage_options=options)
        latest.create_branch("trial", 1, storage_options=options)
        latest.cleanup_old_versions(
            older_than=timedelta(0), delete_unverified=True, error_if_tagged_old_versions=False
        )
        ds = build()
        ds.load_state_dict(state)
        assert ids(ds) == want[30:]
        assert (
            ids(pickle.loads(pickle.dumps(build(version="run", pickle_credentials=True)))) == want
        )
        assert (
            ids(pickle.loads(pickle.dumps(build(version="trial", pickle_credentials=True)))) == want
        )
        with pytest.raises(FileNotFoundError, match="did you mean 'trial'"):
            build(version="trail")


def test_the_digest_of_a_table_tells_deletions_apart(path: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy.lance")
    shutil.copytree(path, copy)
    assert open_source(path).files_digest == open_source(copy).files_digest
    lance.dataset(path).delete("id = 7")
    lance.dataset(copy).delete("id = 8")
    assert open_source(path).files_digest != open_source(copy).files_digest


def test_a_tag_may_not_have_the_name_of_a_branch(path: str) -> None:
    lance.dataset(path).create_branch("trial")
    with pytest.raises(ValueError, match=r"`tag`: 'trial' of .* is the name of a branch"):
        hls.pin(hls.from_lance(path), "trial")
    assert "trial" not in lance.dataset(path).tags.list()
