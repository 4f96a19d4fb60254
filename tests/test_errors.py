"""Refusals: each names the argument, the value and a way out, before a row is read."""

import asyncio
import copy
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
from datasets import Features, Value, concatenate_datasets, interleave_datasets, load_dataset
from datasets.distributed import split_dataset_by_node
from helpers import ids, make_table, through_json

import hf_lance_stream as hls


def load(source: str, **options: Any) -> Any:
    return load_dataset("lance_stream", data_files=source, split="train", streaming=True, **options)


both_ways = pytest.mark.parametrize("build", [hls.from_lance, load], ids=["from_lance", "load"])


def assert_refused(
    words: list[str],
    call: Callable[[], Any],
    error: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> None:
    """`call` raises `error` with a message that every regex of `words` matches."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    missing = [word for word in words if not re.search(word, message, re.DOTALL)]
    assert not missing, f"no {missing} in: {message}"
    assert "/home/runner" not in message  # where Lance was compiled


@pytest.fixture
def unreadable(tmp_path: Path) -> str:
    """T(100, 25) with id, text and label, whose data files are gone: reading a row fails."""
    path = make_table(tmp_path / "pets.lance", 100, 25, ["id", "text", "label"])
    for file in (tmp_path / "pets.lance" / "data").iterdir():
        file.unlink()
    return path


# Sources.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: the table pets.lance, and things that are no table."""
    make_table(tmp_path / "pets.lance", 10, 5)
    (tmp_path / "empty").mkdir()
    (tmp_path / "db").mkdir()
    for name in ("cats", "dogs"):
        make_table(tmp_path / "db" / f"{name}.lance", 10, 5)
    (tmp_path / "notes.txt").write_text("not a table")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SOURCES: list[tuple[Any, type[Exception], list[str]]] = [
    ("nowhere.lance", FileNotFoundError, [r"no table at .*nowhere\.lance"]),
    ("pest.lance", FileNotFoundError, [r"pest\.lance", r"did you mean .*/pets\.lance"]),
    (Path("pest.lance"), FileNotFoundError, [r"pest\.lance", r"did you mean .*/pets\.lance"]),
    ("file:///nowhere/x.lance", FileNotFoundError, [r"file:///nowhere/x\.lance"]),
    ("empty", ValueError, [r"/empty' is not a Lance table", "_versions"]),
    ("notes.txt", ValueError, [r"/notes\.txt' is not a Lance table"]),
    ("db", ValueError, [r"/db' is not", r"\['cats\.lance', 'dogs\.lance'\]", "name one"]),
    ("foo://bucket/x.lance", ValueError, [r"foo://bucket/x\.lance", "scheme"]),
    ("db://name", ValueError, [r"must name a table of the database", r"db://name"]),
]


@pytest.mark.parametrize(("source", "error", "words"), SOURCES, ids=[str(s[0]) for s in SOURCES])
@both_ways
def test_what_is_no_table_is_refused(
    here: Path, build: Any, source: Any, error: type[Exception], words: list[str]
) -> None:
    assert_refused(words, lambda: build(source), error)


def test_a_directory_inside_a_table_is_refused(here: Path) -> None:
    words = [r"/pets\.lance/data' is not a Lance table"]
    assert_refused(words, lambda: hls.from_lance("pets.lance/data"))


@pytest.mark.parametrize(("source", "error"), [s[:2] for s in SOURCES], ids=lambda s: str(s)[:30])
def test_what_is_no_table_is_refused_by_the_name_of_the_argument(
    here: Path, source: Any, error: type[Exception]
) -> None:
    assert_refused(["`source`"], lambda: hls.from_lance(source), error)


@pytest.mark.parametrize(
    "source",
    [3, None, b"pets.lance", {}, {"train": "pets.lance"}, [None], ["pets.lance", 3]],
    ids=str,
)
def test_a_source_of_another_type_is_refused(here: Path, source: Any) -> None:
    kind = type(source[-1] if isinstance(source, list) else source).__name__
    words = ["`source`", rf"got {kind}", r"path or URI", r"lance\.LanceDataset"]
    assert_refused(words, lambda: hls.from_lance(source))


def test_an_arrow_table_is_refused_as_a_source() -> None:
    assert_refused(["`source`", "got Table"], lambda: hls.from_lance(pa.table({"id": [1]})))


def test_an_empty_list_of_tables_is_refused() -> None:
    assert_refused(["`source`", "at least one table", "empty"], lambda: hls.from_lance([]))


def test_an_asynchronous_lancedb_table_is_refused(here: Path) -> None:
    async def open_table() -> Any:
        return await (await lancedb.connect_async(str(here / "db"))).open_table("cats")

    table = asyncio.run(open_table())
    assert_refused(["`source`", "AsyncTable"], lambda: hls.from_lance(table))


def test_a_password_in_a_uri_is_not_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"host/x\.lance") as caught:
        hls.from_lance("foo://user:secret@host/x.lance")
    assert "secret" not in str(caught.value)


# Versions.


def from_path(path: str, **options: Any) -> Any:
    return hls.from_lance(path, **options)


def from_handle(path: str, **options: Any) -> Any:
    return hls.from_lance(lance.dataset(path), **options)


def from_lancedb(path: str, **options: Any) -> Any:
    return hls.from_lance(
        lancedb.connect(str(Path(path).parent)).open_table(Path(path).stem), **options
    )


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (99, [r"pets\.lance", "99", "tag"]),
        (0, [r"pets\.lance", "version 0|version=0", "tag"]),
        (-1, ["-1"]),
        ("silver", [r"pets\.lance", "'silver'", "tag"]),
        ("", ["''"]),
        (1.5, [r"1\.5"]),
        (True, ["True"]),
        ([1], [r"\[1\]"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("build", [from_path, load, from_handle, from_lancedb])
def test_a_version_that_does_not_exist_is_refused(
    unreadable: str, build: Any, version: Any, words: list[str]
) -> None:
    assert_refused(
        ["`version`", *words],
        lambda: build(unreadable, version=version),
        (FileNotFoundError, ValueError),
    )


# Options.

OPTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"columns": ["txet"]}, ["`columns`", "'txet'", "did you mean 'text'", r"\['id', 'text'"]),
    ({"columns": ["id", "lable"]}, ["`columns`", "'lable'", "did you mean 'label'"]),
    ({"columns": ["text.x"]}, ["`columns`", r"'text\.x'", r"\['id', 'text'"]),
    ({"columns": [""]}, ["`columns`", "''", r"\['id', 'text'"]),
    ({"columns": ["id", "text", "id"]}, ["`columns`", "repeat", r"\['id'\]"]),
    ({"columns": "text"}, ["`columns`", "'text'", "list"]),
    ({"columns": ""}, ["`columns`", "''", "list"]),
    ({"columns": []}, ["`columns`", r"\[\]", "list", "None"]),
    ({"columns": [1]}, ["`columns`", r"\[1\]", "list"]),
    ({"columns": ["_rowid"]}, ["`columns`", "'_rowid'", "with_row_id=True"]),
    ({"filter": "id ="}, ["`filter`", "'id ='", "sql parser error", "Expected: an expression"]),
    ({"filter": "id IS IN (1)"}, ["`filter`", r"'id IS IN \(1\)'", "parser error"]),
    (
        {"filter": "lable = 3"},
        ["`filter`", "'lable = 3'", "No field named lable", "label'"],
    ),
    ({"filter": "id"}, ["`filter`", "'id'", "boolean"]),
    ({"filter": "id > 'x'"}, ["`filter`", "id > 'x'", "Int64"]),
    ({"filter": ""}, ["`filter`", "''", "SQL", "None"]),
    ({"filter": "  "}, ["`filter`", "'  '", "SQL", "None"]),
    ({"filter": 3}, ["`filter`", "=3", "SQL", "None"]),
    ({"filter": ["id = 3"]}, ["`filter`", r"\['id = 3'\]", "SQL"]),
    ({"num_splits": 0}, ["`num_splits`", r"\b0\b", r"\[1, ", "leave it out"]),
    ({"num_splits": -4}, ["`num_splits`", "-4", r"\[1, ", "leave it out"]),
    ({"num_splits": 2.0}, ["`num_splits`", r"2\.0", "integer"]),
    ({"num_splits": "4"}, ["`num_splits`", "'4'", "integer"]),
    ({"num_splits": True}, ["`num_splits`", "True", "integer"]),
    ({"num_splits": 101}, ["`num_splits`", "num_splits=101", "rows=100", "at most 100"]),
    (
        {"num_splits": 101, "shuffle_seed": 1, "shuffle_clump_size": 4, "tail": "pad"},
        ["`num_splits`", "num_splits=101", "rows=100", "at most 100"],
    ),
    ({"shuffle_seed": -1}, ["`shuffle_seed`", "-1", r"\[0, 2\*\*64\)"]),
    ({"shuffle_seed": 2**64}, ["`shuffle_seed`", str(2**64), r"\[0, 2\*\*64\)"]),
    ({"shuffle_seed": 1.0}, ["`shuffle_seed`", r"1\.0", "integer"]),
    ({"shuffle_seed": True}, ["`shuffle_seed`", "True", "integer"]),
    ({"shuffle_seed": "42"}, ["`shuffle_seed`", "'42'", "integer"]),
    ({"shuffle_clump_size": 0}, ["`shuffle_clump_size`", "=0", "None to shuffle single rows"]),
    ({"shuffle_clump_size": -1}, ["`shuffle_clump_size`", "-1", "None to shuffle single rows"]),
    ({"shuffle_clump_size": 1.5}, ["`shuffle_clump_size`", r"1\.5", "integer"]),
    ({"shuffle_clump_size": True}, ["`shuffle_clump_size`", "True", "integer"]),
    ({"tail": "trim"}, ["`tail`", "'trim'", "'drop', 'pad', 'keep'", "None"]),
    ({"tail": ""}, ["`tail`", "''", "'drop', 'pad', 'keep'"]),
    ({"tail": False}, ["`tail`", "False", "'drop', 'pad', 'keep'"]),
    ({"epoch": -1}, ["`epoch`", "-1", r"\[0, "]),
    ({"epoch": 2**63}, ["`epoch`", str(2**63), r"\[0, "]),
    ({"epoch": 1.5}, ["`epoch`", r"1\.5", "integer"]),
    ({"epoch": None}, ["`epoch`", "None", "integer"]),
    ({"rank": 0}, ["both", "rank=0", "world_size=None"]),
    ({"world_size": 2}, ["both", "rank=None", "world_size=2"]),
    ({"rank": 2, "world_size": 2}, ["`rank`", r"rank=2", r"\[0, 2\)"]),
    ({"rank": -1, "world_size": 2}, ["`rank`", r"rank=-1", r"\[0, 2\)"]),
    ({"rank": "0", "world_size": 2}, ["`rank`", "'0'", "integer"]),
    ({"rank": 0, "world_size": 0}, ["`world_size`", "world_size=0", r"\[1, "]),
    ({"rank": 0, "world_size": 2.0}, ["`world_size`", r"2\.0", "integer"]),
    (
        {"rank": 0, "world_size": 5, "num_splits": 48},
        ["num_splits=48", "world_size=5", r"1, 2, 3, 4, 6, 8, 12, 16, 24, 48", "`num_splits`.*50"],
    ),
    (
        {"rank": 0, "world_size": 3, "shuffle_seed": 1},
        ["num_splits=64", "world_size=3", r"1, 2, 4, 8, 16, 32, 64", "`num_splits`.*63 or 66"],
    ),
    ({"rank": 0, "world_size": 3}, ["natural shards", "4 shards", "world_size=3", "num_splits=48"]),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=[str(o[0]) for o in OPTIONS])
@both_ways
def test_an_option_that_does_not_fit_is_refused_before_a_row_is_read(
    unreadable: str, build: Any, options: dict[str, Any], words: list[str]
) -> None:
    assert_refused(words, lambda: build(unreadable, **options))


@pytest.mark.parametrize(
    "columns",
    [3, {"id", "text"}, iter(["id"]), (c for c in ["id"])],
    ids=lambda c: type(c).__name__,
)
def test_columns_that_are_no_list_are_refused(unreadable: str, columns: Any) -> None:
    assert_refused(["`columns`", "list"], lambda: hls.from_lance(unreadable, columns=columns))


@pytest.mark.parametrize(
    ("options", "got"),
    [("key", "a str"), (3, "a int"), (["key"], "a list"), ({"timeout": 9}, "{'timeout': 9}")],
    ids=str,
)
def test_storage_options_that_are_no_dict_of_str_are_refused(
    unreadable: str, options: Any, got: str
) -> None:
    assert_refused(
        ["`storage_options`", got],
        lambda: hls.from_lance(unreadable, storage_options=options),
    )


@pytest.mark.parametrize("split", [3, ["train"], "two words"], ids=str)
def test_a_split_that_is_no_name_is_refused(unreadable: str, split: Any) -> None:
    assert_refused(
        ["[Ss]plit", re.escape(repr(split))], lambda: hls.from_lance(unreadable, split=split)
    )


@pytest.mark.parametrize(
    ("rows", "options", "world_size"),
    [
        (1000, {}, 3),
        (1000, {"shuffle_seed": 1}, 3),
        (1000, {"num_splits": 48}, 7),
        (10, {}, 3),
        (10, {"shuffle_seed": 1}, 3),
        (10, {"shuffle_seed": 1}, 10_000),
    ],
    ids=str,
)
def test_a_suggested_number_of_splits_works(
    tmp_path: Path, rows: int, options: dict[str, Any], world_size: int
) -> None:
    path = make_table(tmp_path / "pets.lance", rows, -(-rows // 4))
    with pytest.raises(ValueError, match="num_splits") as caught:
        hls.from_lance(path, rank=0, world_size=world_size, **options)
    found = re.search(r"such as (?:num_splits=)?([\d or]+)", str(caught.value))
    suggested = [int(number) for number in re.findall(r"\d+", found[1])] if found else []
    assert bool(suggested) == (world_size <= rows), str(caught.value)
    for number in suggested:
        hls.from_lance(path, rank=0, world_size=world_size, **options | {"num_splits": number})


def test_splits_that_ranks_do_not_divide_are_refused_however_they_are_divided(
    unreadable: str,
) -> None:
    ds = hls.from_lance(unreadable, num_splits=48)
    words = ["num_splits=48", "5", r"1, 2, 3, 4, 6, 8, 12, 16, 24, 48", "`num_splits`.*50"]
    assert_refused(words, lambda: split_dataset_by_node(ds, rank=0, world_size=5))
    assert_refused(words, lambda: split_dataset_by_node(ds.map(dict), rank=0, world_size=5))
    assert_refused(words, lambda: ds.shard(num_shards=5, index=0))
    natural = ["4 shards", "world_size=3", "num_splits=48"]
    assert_refused(
        natural, lambda: split_dataset_by_node(hls.from_lance(unreadable), rank=0, world_size=3)
    )


@pytest.mark.parametrize("rank", [4, 5, -1])
def test_a_rank_out_of_range_is_refused_by_split_dataset_by_node(table: str, rank: int) -> None:
    ds = hls.from_lance(table, num_splits=8)
    words = ["rank", rf"{rank}\b", "4"]
    assert_refused(words, lambda: ids(split_dataset_by_node(ds, rank=rank, world_size=4)))


METHODS: list[tuple[Callable[[Any], Any], list[str]]] = [
    (lambda ds: ds.shuffle(), ["`seed`", "shuffle\\(seed=42\\)"]),
    (lambda ds: ds.shuffle(seed=-1), ["`seed`", "-1", r"\[0, 2\*\*64\)"]),
    (lambda ds: ds.shuffle(seed=2**64), ["`seed`", str(2**64), r"\[0, 2\*\*64\)"]),
    (lambda ds: ds.shuffle(seed="1"), ["`seed`", "'1'", "integer"]),
    (lambda ds: ds.shuffle(generator=3), ["`generator`", "3"]),
    (lambda ds: ds.shuffle(generator=np.random.default_rng()), ["seed", "shuffle\\(seed=42\\)"]),
    (lambda ds: ds.shuffle(seed=1, shuffle_clump_size=0), ["`shuffle_clump_size`", "=0", "None"]),
    (lambda ds: ds.shard(0, 0), ["`num_shards`", "=0"]),
    (lambda ds: ds.shard(4, 4), ["`index`", "=4", r"\[0, 4\)"]),
    (lambda ds: ds.shard(4, -1), ["`index`", "=-1", r"\[0, 4\)"]),
    (lambda ds: ds.reshard(num_splits=0), ["`num_splits`", "=0"]),
    (lambda ds: ds.reshard(num_splits=101), ["`num_splits`", "=101", "rows=100"]),
    (lambda ds: ds.shard(4, 0).reshard(num_splits=8), ["`num_splits`", "=8", "reshard before"]),
    (lambda ds: ds.set_epoch(-1), ["`epoch`", "-1"]),
    (lambda ds: ds.set_epoch("1"), ["`epoch`", "'1'", "integer"]),
    (lambda ds: next(ds.iter(0)), ["`batch_size`", "=0"]),
    (lambda ds: ds.select_columns("txet"), ["txet", "'id', 'text', 'label'"]),
]


@pytest.mark.parametrize(("call", "words"), METHODS, ids=range(len(METHODS)))
def test_an_argument_of_a_method_that_does_not_fit_is_refused(
    unreadable: str, call: Callable[[Any], Any], words: list[str]
) -> None:
    assert_refused(words, lambda: call(hls.from_lance(unreadable, num_splits=8)))


# Empty tables and selections.


@pytest.fixture
def empty(tmp_path: Path) -> str:
    return make_table(tmp_path / "empty.lance", 0, 25, ["id", "text"])


@both_ways
def test_splits_of_an_empty_table_are_refused(empty: str, build: Any) -> None:
    words = ["`num_splits`", "num_splits=4", "rows=0", "leave it out"]
    assert_refused(words, lambda: build(empty, num_splits=4))
    assert_refused(words, lambda: build(empty, num_splits=4, shuffle_seed=1))


@both_ways
def test_splits_of_an_empty_selection_are_refused(table: str, build: Any) -> None:
    words = ["`num_splits`", "num_splits=4", "rows=0", "leave it out"]
    assert_refused(words, lambda: build(table, filter="id = -1", num_splits=4))
    words = ["`num_splits`", "num_splits=4", "rows=3", "at most 3"]
    assert_refused(words, lambda: build(table, filter="id < 3", num_splits=4))


EMPTY = [
    {},
    {"shuffle_seed": 1},
    {"shuffle_seed": 1, "shuffle_clump_size": 4, "tail": "pad"},
    {"tail": "drop", "epoch": 3},
    {"columns": ["id"], "with_row_id": True},
    {"rank": 0, "world_size": 1},
]


@pytest.mark.parametrize("options", EMPTY, ids=str)
@pytest.mark.parametrize("selection", [False, True], ids=["empty table", "empty selection"])
@both_ways
def test_an_empty_dataset_has_features_and_no_rows(
    empty: str, table: str, build: Any, selection: bool, options: dict[str, Any]
) -> None:
    ds = build(table, filter="id < 0", **options) if selection else build(empty, **options)
    assert ds.features["id"] == Value("int64")
    assert (len(ds), bool(ds)) == (0, True)
    assert ds.num_shards >= 1
    empties = [
        ds,
        ds.with_format("torch"),
        ds.with_format("numpy"),
        ds.with_format("arrow"),
        ds.map(lambda row: row),
        ds.map(lambda rows: rows, batched=True, batch_size=3),
        ds.with_format("torch").map(lambda row: row),
        ds.filter(lambda row: True),
        ds.select_columns(["id"]),
        ds.rename_column("id", "key"),
        ds.take(3),
        ds.skip(3),
        ds.repeat(2),
        ds.batch(3),
        ds.shuffle(seed=2),
        ds.shard(1, 0),
        ds.reshard(),
        interleave_datasets([ds, ds]),
        concatenate_datasets([ds, ds]),
    ]
    assert [list(other) for other in empties] == [[]] * len(empties)
    assert [list(other.iter(3)) for other in empties] == [[]] * len(empties)
    state = through_json(ds.state_dict())
    ds.load_state_dict(state)
    assert list(ds) == []
    assert "num_rows: 0" in repr(ds)


def test_an_empty_selection_is_no_error_for_any_rank(table: str) -> None:
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            for options in ({}, {"shuffle_seed": 1}):
                ds = hls.from_lance(
                    table, filter="id < 0", rank=rank, world_size=world_size, **options
                )
                assert ids(ds) == []


# States.


def state_after(ds: Any, k: int = 10) -> dict[str, Any]:
    """The state after k rows, through JSON."""
    rows = iter(ds)
    for _ in islice(rows, k):
        pass
    return through_json(ds.state_dict())


def inner(state: dict[str, Any]) -> dict[str, Any]:
    """The state of ours in the state of a dataset."""
    found: dict[str, Any] = state["examples_iterable"]
    assert found["type"] == "LanceExamplesIterable"
    return found


SHUFFLED = {"shuffle_seed": 1, "shuffle_clump_size": 4, "num_splits": 8}
FIELDS: list[tuple[dict[str, Any], dict[str, Any], str, list[str]]] = [
    ({}, {"filter": "id >= 0"}, "filter", ["None", "'id >= 0'"]),
    ({"filter": "id > 1"}, {"filter": "id < 98"}, "filter", ["'id > 1'", "'id < 98'"]),
    ({}, {"filter": "id < 90"}, "rows", ["100", "90"]),
    ({}, {"columns": ["id"]}, "columns", ['"text"', "'.\"id\".'"]),
    ({}, {"columns": ["text", "id"]}, "columns", ['"id", "text"', '"text", "id"']),
    ({}, {"shuffle_seed": 1}, "shuffle_seed", ["None", "1"]),
    (SHUFFLED, SHUFFLED | {"shuffle_seed": 2}, "shuffle_seed", ["1", "2"]),
    (SHUFFLED, SHUFFLED | {"shuffle_clump_size": 5}, "shuffle_clump_size", ["4", "5"]),
    (SHUFFLED, SHUFFLED | {"shuffle_clump_size": None}, "shuffle_clump_size", ["4", "1"]),
    (SHUFFLED, SHUFFLED | {"num_splits": 16}, "num_splits", ["8", "16"]),
    ({}, {"num_splits": 4}, "num_splits", ["None", "4"]),
    (SHUFFLED | {"tail": "keep"}, SHUFFLED | {"tail": "pad"}, "tail", ["'keep'", "'pad'"]),
    (SHUFFLED, SHUFFLED | {"tail": "pad"}, "tail", ["", "'pad'"]),
]
STEPS: dict[str, Callable[[Any], Any]] = {
    "no step": lambda ds: ds,
    "map": lambda ds: ds.map(lambda row: row),
    "torch": lambda ds: ds.with_format("torch"),
    "take": lambda ds: ds.take(50),
}


@pytest.mark.parametrize(("saved", "now", "field", "values"), FIELDS, ids=range(len(FIELDS)))
@pytest.mark.parametrize("step", STEPS)
def test_a_state_of_another_order_or_selection_is_refused_by_the_field(
    tmp_path: Path,
    step: str,
    saved: dict[str, Any],
    now: dict[str, Any],
    field: str,
    values: list[str],
) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25, ["id", "text"])
    state = state_after(STEPS[step](hls.from_lance(path, **saved)))
    ds = STEPS[step](hls.from_lance(path, **now))
    line = rf"{field}[^\n]*: saved [^\n]*{values[0]}[^\n]*, now [^\n]*{values[-1]}"
    assert_refused([line, "strict=False"], lambda: ds.load_state_dict(state))
    assert ids(ds) == ids(STEPS[step](hls.from_lance(path, **now)))  # as if nothing had happened


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("order", "saved", "now", "words"),
    [
        (SHUFFLED, (0, 2), (1, 2), ["splits 0 to 3", "splits 4 to 7", "merge_state_dicts"]),
        (SHUFFLED, (0, 2), (0, 1), ["splits 0 to 3", "splits 0 to 7", "merge_state_dicts"]),
        ({}, (0, 2), (1, 2), ["2 natural shards", "`num_splits`"]),
        ({}, (0, 2), (0, 4), ["2 natural shards", "1 natural shard", "`num_splits`"]),
    ],
)
def test_a_state_of_another_rank_is_refused_with_both_parts(
    tmp_path: Path,
    step: str,
    order: dict[str, Any],
    saved: tuple[int, int],
    now: tuple[int, int],
    words: list[str],
) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)

    def build(rank: int, world_size: int) -> Any:
        return STEPS[step](hls.from_lance(path, rank=rank, world_size=world_size, **order))

    state = state_after(build(*saved))
    ds = build(*now)
    assert_refused(words, lambda: ds.load_state_dict(state))
    assert ids(ds) == ids(build(*now))  # as if nothing had happened


def test_a_state_of_another_table_is_refused_with_both_places(tmp_path: Path) -> None:
    one, two = (make_table(tmp_path / f"{name}.lance", 100, 25) for name in ("one", "two"))
    state = state_after(hls.from_lance(one))
    words = [r"table: saved '.*/one\.lance', now '.*/two\.lance'", "strict=False"]
    assert_refused(words, lambda: hls.from_lance(two).load_state_dict(state))
    words = [r"table: saved '.*/one\.lance', now .*/one\.lance.*/two\.lance", r"version: saved 1"]
    assert_refused(words, lambda: hls.from_lance([one, two]).load_state_dict(state))
    both = state_after(hls.from_lance([one, two]))
    words = [
        r"version: saved '\[1, 1\]', now 1",
        r"each table at its version, lance\.dataset\(uri, version=…\)",
    ]
    assert_refused(words, lambda: hls.from_lance(one).load_state_dict(both))


@pytest.mark.parametrize("change", ["append", "delete", "compact"])
def test_a_state_of_another_version_than_the_one_named_is_refused_and_the_ways_out_work(
    tmp_path: Path, change: str
) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    full = ids(hls.from_lance(path, shuffle_seed=1))
    state = state_after(hls.from_lance(path, shuffle_seed=1), 30)
    if change == "append":
        make_table(path, 10, 25, start=100, mode="append")
    elif change == "delete":
        lance.dataset(path).delete("id = 3")
    else:
        lance.dataset(path).optimize.compact_files(target_rows_per_fragment=1000)
    latest = lance.dataset(path).version
    ds = hls.from_lance(path, shuffle_seed=1, version=latest)
    words = [rf"version: saved 1, now {latest}", "version=1", "strict=False"]
    assert_refused(words, lambda: ds.load_state_dict(state))
    for ways_out in ({"version": 1}, {}):
        old = hls.from_lance(path, shuffle_seed=1, **ways_out)
        old.load_state_dict(state)
        assert ids(old) == full[30:]


def test_all_fields_that_differ_are_named_at_once(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25, ["id", "text"])
    state = state_after(hls.from_lance(path, **SHUFFLED))
    ds = hls.from_lance(path, columns=["id"], shuffle_seed=3, num_splits=4, filter="id > 9")
    fields = ["filter", "columns", "rows", "num_splits", "shuffle_seed", "shuffle_clump_size"]
    assert_refused([rf"\n  {field}: " for field in fields], lambda: ds.load_state_dict(state))


def test_without_strict_a_state_that_differs_warns_and_continues_at_its_position(
    tmp_path: Path,
) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    state = state_after(hls.from_lance(path, shuffle_seed=1), 30)
    ds = hls.from_lance(path, shuffle_seed=2)
    with pytest.warns(UserWarning, match=r"shuffle_seed: saved 1, now 2"):
        ds.load_state_dict(state, strict=False)
    assert ids(ds) == ids(hls.from_lance(path, shuffle_seed=2))[30:]
    short = hls.from_lance(path, filter="id < 20")
    with (
        pytest.warns(UserWarning, match="rows"),
        pytest.raises(ValueError, match=r"`position`.*30"),
    ):
        short.load_state_dict(state, strict=False)


def set_inner(**values: Any) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> dict[str, Any]:
        inner(state).update(values)
        return state

    return change


def drop_inner(name: str) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> dict[str, Any]:
        del inner(state)[name]
        return state

    return change


def set_outer(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state | values


def set_fingerprint(**values: Any) -> Callable[[dict[str, Any]], Any]:
    def change(state: dict[str, Any]) -> dict[str, Any]:
        inner(state)["fingerprint"].update(values)
        return state

    return change


def plain_state(step: Callable[[Any], Any] = lambda ds: ds) -> dict[str, Any]:
    """A state of a dataset of `datasets` that has nothing to do with Lance."""
    return state_after(step(datasets.Dataset.from_dict({"id": range(100)}).to_iterable_dataset()))


DAMAGES: list[tuple[str, Callable[[dict[str, Any]], Any], list[str]]] = [
    ("negative position", set_inner(position=-1), ["`position`", "-1", r"\[0, \d+\]"]),
    ("position too large", set_inner(position=101), ["`position`", "101", r"\[0, 100\]"]),
    ("position a str", set_inner(position="10"), ["`position`", "'10'", "integer"]),
    ("position a float", set_inner(position=10.0), ["`position`", r"10\.0", "integer"]),
    ("position a bool", set_inner(position=True), ["`position`", "True", "integer"]),
    ("position null", set_inner(position=None), ["`position`", "None", "integer"]),
    ("no position", drop_inner("position"), ["`position`", "None", "integer"]),
    ("chunk_rows 0", set_inner(chunk_rows=0), ["`chunk_rows`", r"\b0\b"]),
    ("chunk_rows a str", set_inner(chunk_rows="64"), ["`chunk_rows`", "'64'"]),
    ("no fingerprint", drop_inner("fingerprint"), ["`fingerprint`", "None", "dict"]),
    ("fingerprint a list", set_inner(fingerprint=[1]), ["`fingerprint`", r"\[1\]", "dict"]),
    ("fingerprint empty", set_inner(fingerprint={}), ["table: saved None", "rows: saved None"]),
    ("no part", drop_inner("part"), ["`part`", "None", "dict"]),
    ("no state_version", drop_inner("state_version"), ["`state_version`", "None", "unchanged"]),
    ("state_version a str", set_inner(state_version="1"), ["`state_version`", "'1'"]),
    ("state_version 0", set_inner(state_version=0), ["`state_version`", r"\b0\b"]),
    ("state_version true", set_inner(state_version=True), ["`state_version`", "True"]),
    ("a newer format", set_inner(state_version=2), ["newer", r"\b2\b", "up to 1", "upgrade"]),
    (
        "a newer format with a key that is new",
        set_inner(state_version=7, consumed=[1, 2], fingerprint={"table": 3}),
        ["newer", r"\b7\b", "up to 1", "upgrade"],
    ),
    ("another order version", set_fingerprint(order_version=2), ["order_version: saved 2, now 1"]),
    ("a field that is new", set_fingerprint(mix="x"), ["mix: saved 'x', now None"]),
    ("rows a float", set_fingerprint(rows=100.0), ["rows: saved 100.0, now 100"]),
    ("no type", drop_inner("type"), [r"\bstate", "not a state|other steps", "Lance"]),
    (
        "another type",
        set_inner(type="ArrowExamplesIterable"),
        [r"\bstate", "another kind|other steps", "Lance"],
    ),
    ("no epoch", lambda s: {"examples_iterable": s["examples_iterable"]}, ["`state_dict`"]),
    ("negative epoch", set_outer(epoch=-1), ["`epoch`", "-1", "state"]),
    ("epoch a str", set_outer(epoch="0"), ["`epoch`", "'0'", "state"]),
    ("epoch null", set_outer(epoch=None), ["`epoch`", "None", "state"]),
    ("another epoch outside than inside", set_outer(epoch=3), ["epoch: saved 0, now 3"]),
    ("no examples", lambda s: {"epoch": 0}, ["`state_dict`", r"\{'epoch': 0\}"]),
    ("examples null", set_outer(examples_iterable=None), [r"\bstate", "None"]),
    ("None", lambda s: None, ["`state_dict`", "None", r"state_dict\(\)"]),
    ("a list", lambda s: [s], ["`state_dict`", r"\[\{", r"state_dict\(\)"]),
    ("a str", lambda s: str(s), ["`state_dict`", r"state_dict\(\)"]),
    ("an empty dict", lambda s: {}, ["`state_dict`", r"\{\}", r"state_dict\(\)"]),
    ("only the inner state", inner, ["`state_dict`", "LanceExamplesIterable"]),
    (
        "a state of a plain dataset",
        lambda s: plain_state(),
        [r"\bstate", "another kind|other steps", "Lance"],
    ),
    (
        "a state of a plain dataset with map",
        lambda s: plain_state(lambda ds: ds.map(lambda row: row)),
        [r"\bstate", "another kind|other steps", "Lance"],
    ),
]


@pytest.mark.parametrize(("name", "damage", "words"), DAMAGES, ids=[d[0] for d in DAMAGES])
def test_a_damaged_state_is_refused(
    tmp_path: Path, name: str, damage: Callable[[dict[str, Any]], Any], words: list[str]
) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    ds = hls.from_lance(path, shuffle_seed=1)
    full = ids(ds)
    state = damage(state_after(ds))
    before = copy.deepcopy(state)
    assert_refused(words, lambda: ds.load_state_dict(state))
    assert state == before
    assert ds.epoch == 0
    assert ids(ds) == full  # as if nothing had happened


@pytest.mark.parametrize("k", [0, 1, 99, 100])
def test_a_state_at_either_end_is_not_damaged(tmp_path: Path, k: int) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    ds = hls.from_lance(path, shuffle_seed=1)
    state = state_after(ds, k)
    new = hls.from_lance(path, shuffle_seed=1)
    new.load_state_dict(state)
    assert ids(new) == ids(ds)[k:]


def test_a_loaded_state_stays_as_it_is_and_loads_again(tmp_path: Path) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    ds = hls.from_lance(path, shuffle_seed=1)
    full = ids(ds)
    state = state_after(ds, 33)
    before = copy.deepcopy(state)
    for _ in range(2):
        new = hls.from_lance(path, shuffle_seed=1)
        new.load_state_dict(state)
        assert ids(new) == full[33:]
        assert state == before
    new.load_state_dict(state)
    inner(state)["position"] = 90  # what the caller does with it later is of no effect
    assert ids(new) == full[33:]


# A state of a dataset with other steps has its position somewhere else: it cannot be continued.

CHAINS: dict[str, Callable[[Any], Any]] = {
    "no step": lambda ds: ds,
    "map": lambda ds: ds.map(lambda row: row),
    "take": lambda ds: ds.take(60),
    "skip": lambda ds: ds.skip(5),
    "repeat": lambda ds: ds.repeat(2),
    "interleave": lambda ds: interleave_datasets([ds, ds]),
    "concatenate": lambda ds: concatenate_datasets([ds, ds]),
    "map, take": lambda ds: ds.map(lambda row: row).take(60),
}


OTHER_STEPS = [(a, b) for a in CHAINS for b in list(CHAINS)[:5] if a != b]


@pytest.mark.parametrize(("saved", "now"), OTHER_STEPS)
def test_a_state_of_other_steps_is_refused(tmp_path: Path, saved: str, now: str) -> None:
    """Or continued exactly, where both datasets have one row for each row of the table."""
    path = make_table(tmp_path / "pets.lance", 100, 25)
    state = state_after(CHAINS[saved](hls.from_lance(path, shuffle_seed=1)))
    ds = CHAINS[now](hls.from_lance(path, shuffle_seed=1))
    full = ids(CHAINS[now](hls.from_lance(path, shuffle_seed=1)))
    if {saved, now} == {"no step", "map"}:
        try:
            ds.load_state_dict(state)
        except ValueError:
            assert ids(ds) == full
        else:
            assert ids(ds) == full[10:]
        return
    assert_refused(["state"], lambda: ds.load_state_dict(state))
    assert ids(ds) == full  # as if nothing had happened


@pytest.mark.parametrize(("saved", "now"), [("no step", "torch"), ("torch", "no step")])
def test_a_state_fits_with_another_format(tmp_path: Path, saved: str, now: str) -> None:
    path = make_table(tmp_path / "pets.lance", 100, 25)
    state = state_after(STEPS[saved](hls.from_lance(path, shuffle_seed=1)), 33)
    ds = STEPS[now](hls.from_lance(path, shuffle_seed=1))
    ds.load_state_dict(state)
    assert ids(ds) == ids(hls.from_lance(path, shuffle_seed=1))[33:]


def test_features_of_another_kind_are_refused_by_load_dataset_too(unreadable: str) -> None:
    features = Features({"id": Value("int64"), "txet": Value("string"), "label": Value("int64")})
    words = ["`features`", "txet", "did you mean 'text'"]
    assert_refused(words, lambda: load(unreadable, features=features))
