"""The builder "lance_stream" of `datasets`, its registration, and what it relies on there."""

import inspect
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import lance
import lancedb
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
from datasets import Features, Value, load_dataset, packaged_modules
from datasets.load import DatasetModule, PackagedDatasetModuleFactory
from helpers import cut, ids, make_table

import hf_lance_stream as hls
from hf_lance_stream import builder


def stream(**options: Any) -> Any:
    return load_dataset("lance_stream", streaming=True, **options)


def whole(**options: Any) -> Any:
    return load_dataset("lance_stream", **options)


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """The directory "tables" with 0.lance, 1.lance and 2.lance: ids from 0, 100 and 200."""
    directory = tmp_path / "tables"
    directory.mkdir()
    for i in range(3):
        make_table(directory / f"{i}.lance", 20, 7, start=100 * i)
    return directory


def ids_from(*firsts: int) -> list[int]:
    return [i for first in firsts for i in range(first, first + 20)]


# Options.


OPTIONS: list[dict[str, Any]] = [
    {},
    {"columns": ["label", "id"]},
    {"filter": "label != 3"},
    {"num_splits": 7},
    {"shuffle_seed": 3},
    {"shuffle_seed": 3, "shuffle_clump_size": 16},
    {"shuffle_seed": 3, "epoch": 2},
    {"num_splits": 7, "tail": "pad"},
    {"num_splits": 7, "tail": "keep"},
    {"num_splits": 7, "tail": "drop"},
    {"version": 1},
    {"version": "gold"},
    {"with_row_id": True},
    {"blobs": "lazy"},
    {"pickle_credentials": True},
    {"features": Features({"id": Value("int32"), "text": Value("string"), "label": Value("int8")})},
    {"num_splits": 8, "rank": 1, "world_size": 4},
    {"num_splits": 8, "shuffle_seed": 3, "batch_size": 4},
    {"num_splits": 8, "read_budget": 1000},
    {"num_splits": 8, "on_bad_rows": "skip"},
    {"num_splits": 8, "blobs": "lazy"},
    {"num_splits": 8, "shuffle_seed": 3, "rank": 3, "world_size": 4, "columns": ["id"]},
]


@pytest.fixture
def versions(tmp_path: Path) -> str:
    """T(100, 25) at version 1, tagged gold, then twice appended to."""
    path = make_table(tmp_path / "pets.lance", 100, 25, ["id", "text", "label"])
    lance.dataset(path).tags.create("gold", 1)
    for first in (100, 110):
        make_table(path, 10, 25, ["id", "text", "label"], start=first, mode="append")
    return path


def test_the_options_tested_are_all_there_are() -> None:
    tested = {name for options in OPTIONS for name in options}
    elsewhere = {"source", "storage_options", "split", "transform"}
    assert tested | elsewhere == set(inspect.signature(hls.from_lance).parameters)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_means_what_it_means_to_from_lance(
    versions: str, options: dict[str, Any]
) -> None:
    ours = stream(data_files=versions, split="train", **options)
    direct = hls.from_lance(versions, **options)
    assert type(ours) is type(direct) is hls.LanceIterableDataset
    assert ours.state_dict() == direct.state_dict()  # table, version, order, part, …
    assert ours.features == direct.features
    assert (len(ours), ours.num_shards, ours.epoch) == (
        len(direct),
        direct.num_shards,
        direct.epoch,
    )
    assert list(ours) == list(direct)


def test_storage_options_reach_lance_and_only_lance(
    versions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def recorder(uri: str, **options: Any) -> lance.LanceDataset:
        seen.append(options["storage_options"])
        return lance.LanceDataset(uri, version=options["version"])

    monkeypatch.setattr(lance, "dataset", recorder)
    options = {"region": "here", "file": {"timeout": "9s"}, "s3": {"key": "other"}}
    ds = stream(data_files=f"file://{versions}", storage_options=options, split="train")
    assert seen == [{"region": "here", "timeout": "9s"}]
    assert len(ids(pickle.loads(pickle.dumps(ds)))) == 120
    assert seen[1:] == [{"region": "here", "timeout": "9s"}]  # in another process too


def test_a_resume_through_load_dataset_is_exact(versions: str) -> None:
    def build() -> Any:
        return stream(data_files=versions, split="train", shuffle_seed=1, epoch=2)

    full = ids(build())
    for k in (0, 1, 50, 119, 120):
        assert cut(build, k) == full


def test_a_state_moves_between_from_lance_and_load_dataset(versions: str) -> None:
    ds = stream(data_files=versions, split="train", shuffle_seed=1)
    rows = iter(ds)
    seen = [next(rows)["id"] for _ in range(33)]
    direct = hls.from_lance(versions, shuffle_seed=1)
    direct.load_state_dict(ds.state_dict())
    assert seen + ids(direct) == ids(hls.from_lance(versions, shuffle_seed=1))


@pytest.mark.parametrize(
    ("name", "near"),
    [("shufle_seed", "shuffle_seed"), ("column", "columns"), ("filters", "filter")],
)
def test_an_unknown_option_is_refused_with_the_nearest(table: str, name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"no option `{name}`; did you mean `{near}`\?"):
        stream(data_files=table, **{name: 3})


def test_an_option_like_no_other_is_refused_with_all_there_are(table: str) -> None:
    with pytest.raises(ValueError, match=r"no option `zzz`.*'columns'.*'shuffle_seed'"):
        stream(data_files=table, zzz=3)


# Splits and tables.


def test_without_split_there_is_a_dict_of_splits(tables: Path) -> None:
    files = {"train": str(tables / "0.lance"), "validation": [str(tables / "1.lance")]}
    for split in ({}, {"split": None}):
        loaded = stream(data_files=files, **split)
        assert isinstance(loaded, datasets.IterableDatasetDict)
        assert {name: ids(ds) for name, ds in loaded.items()} == {
            "train": ids_from(0),
            "validation": ids_from(100),
        }
        assert all(type(ds) is hls.LanceIterableDataset for ds in loaded.values())
        assert [str(ds.split) for ds in loaded.values()] == ["train", "validation"]


def test_a_split_by_name_and_a_sum_of_splits(tables: Path) -> None:
    files = {"train": str(tables / "0.lance"), "test": str(tables / "1.lance")}
    assert ids(stream(data_files=files, split="test")) == ids_from(100)
    assert ids(stream(data_files=files, split="train+test")) == ids_from(0, 100)
    assert ids(whole(data_files=files, split="train+test")) == ids_from(0, 100)
    with pytest.raises(ValueError, match=r"tset.*\['train', 'test'\]"):
        stream(data_files=files, split="tset")


def test_each_split_has_its_own_features(tmp_path: Path) -> None:
    files = {
        "train": make_table(tmp_path / "a.lance", 5, 5, ["id", "label"]),
        "test": make_table(tmp_path / "b.lance", 5, 5, ["id"]),
    }
    loaded = stream(data_files=files)
    assert [ds.column_names for ds in loaded.values()] == [["id", "label"], ["id"]]
    assert ids(loaded["test"]) == list(range(5))


def test_an_impossible_option_for_one_split_names_the_numbers(tables: Path) -> None:
    files = {"train": str(tables / "0.lance"), "test": make_table(tables / "t.lance", 3, 3)}
    with pytest.raises(ValueError, match=r"num_splits=10, rows=3"):
        stream(data_files=files, num_splits=10)


def test_tables_of_one_split_are_read_in_the_order_given(tables: Path) -> None:
    names = [str(tables / f"{i}.lance") for i in (2, 0, 1)]
    assert ids(stream(data_files=names, split="train")) == ids_from(200, 0, 100)
    assert ids(stream(data_files={"test": names}, split="test")) == ids_from(200, 0, 100)
    assert sorted(ids(stream(data_files=names, split="train", shuffle_seed=1))) == ids_from(
        0, 100, 200
    )


SPELLINGS: dict[str, tuple[Callable[[Path], dict[str, Any]], list[int]]] = {
    "a str": (lambda t: {"data_files": str(t / "1.lance")}, [100]),
    "a slash at the end": (lambda t: {"data_files": f"{t}/1.lance/"}, [100]),
    "a relative path": (lambda t: {"data_files": "tables/1.lance"}, [100]),
    "a path from home": (lambda t: {"data_files": "~/tables/1.lance"}, [100]),
    "a Path": (lambda t: {"data_files": t / "1.lance"}, [100]),
    "a list of Paths": (lambda t: {"data_files": [t / "1.lance", t / "0.lance"]}, [100, 0]),
    "a Path for a split": (lambda t: {"data_files": {"train": t / "1.lance"}}, [100]),
    "a tuple": (lambda t: {"data_files": (str(t / "1.lance"), str(t / "0.lance"))}, [100, 0]),
    "a URL": (lambda t: {"data_files": f"file://{t}/1.lance"}, [100]),
    "URLs": (lambda t: {"data_files": [f"file://{t}/{i}.lance" for i in (2, 0)]}, [200, 0]),
    "a glob": (lambda t: {"data_files": f"{t}/*.lance"}, [0, 100, 200]),
    "a relative glob": (lambda t: {"data_files": "tables/[12].lance"}, [100, 200]),
    "a glob in all depths": (lambda t: {"data_files": f"{t.parent}/**/*.lance"}, [0, 100, 200]),
    "two globs": (lambda t: {"data_files": [f"{t}/[12].l*", f"{t}/0*"]}, [100, 200, 0]),
    "files in the table": (lambda t: {"data_files": f"{t}/1.lance/**"}, [100]),
    "a manifest": (lambda t: {"data_files": f"{t}/1.lance/_versions/*.manifest"}, [100]),
    "data_dir and a name": (lambda t: {"data_files": "1.lance", "data_dir": str(t)}, [100]),
    "data_dir and a glob": (lambda t: {"data_files": "*.lance", "data_dir": str(t)}, [0, 100, 200]),
    "a table as data_dir": (lambda t: {"data_dir": str(t / "1.lance")}, [100]),
    "a database": (lambda t: {"data_dir": str(t), "table": "1"}, [100]),
    "a Path as data_dir": (lambda t: {"data_dir": t, "table": "1"}, [100]),
    "a database as a URL": (lambda t: {"data_dir": f"file://{t}", "table": "1"}, [100]),
}


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_way_to_name_tables(
    tables: Path, monkeypatch: pytest.MonkeyPatch, spelling: str, streaming: bool
) -> None:
    monkeypatch.chdir(tables.parent)
    monkeypatch.setenv("HOME", str(tables.parent))
    spell, firsts = SPELLINGS[spelling]
    ds = load_dataset("lance_stream", split="train", streaming=streaming, **spell(tables))
    assert ids(ds) == ids_from(*firsts)


def test_a_lancedb_database_with_the_name_of_a_table(tmp_path: Path) -> None:
    db = lancedb.connect(str(tmp_path / "db"))
    for name, first in (("pets", 0), ("birds", 100)):
        db.create_table(name, pa.table({"id": np.arange(first, first + 20)}))
    database = str(tmp_path / "db")
    assert ids(stream(data_dir=database, table="birds", split="train")) == ids_from(100)
    with pytest.raises(ValueError, match=r"`table`.*\['birds', 'pets'\]"):
        stream(data_dir=database)
    with pytest.raises(FileNotFoundError, match=r"no table 'brids'; did you mean 'birds'\?"):
        stream(data_dir=database, table="brids")
    db.drop_table("pets")
    assert ids(stream(data_dir=database, split="train")) == ids_from(100)  # the only one


def test_a_table_without_the_ending_lance_is_found_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    make_table(tmp_path / "db" / "pets", 20, 7)
    assert ids(stream(data_dir=str(tmp_path / "db"), table="pets", split="train")) == ids_from(0)
    assert ids(stream(data_dir=str(tmp_path / "db"), split="train")) == ids_from(0)


# What is not a table.


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"data_files": "tables/3.lance"}, FileNotFoundError, r"3\.lance'; did you mean"),
        ({"data_files": "tables/x*.lance"}, FileNotFoundError, r"`data_files`.*tables/x\*\.lance"),
        ({"data_files": "tables"}, ValueError, r"tables.*'0\.lance', '1\.lance'.*name one"),
        ({"data_files": "file:///a/*.lance"}, ValueError, r"`data_files`.*glob.*a/\*\.lance"),
        ({"data_files": "file:///nothing/x.lance"}, FileNotFoundError, r"/nothing/x\.lance"),
        ({"data_files": "empty"}, ValueError, r"empty' is not a Lance table"),
        ({"data_files": []}, ValueError, r"data_files.*\[\]"),
        ({"data_files": 3}, ValueError, r"data_files.*3"),
        ({"data_files": [None]}, ValueError, r"data_files.*None"),
        ({"data_files": "tables/0.lance", "table": "0"}, ValueError, r"`table`.*`data_dir`.*'0'"),
        ({"data_dir": "nowhere"}, FileNotFoundError, r"`data_dir`.*nowhere"),
        ({"data_dir": "tables"}, ValueError, r"`table`.*'tables'.*\['0', '1', '2'\]"),
        ({"data_dir": "empty"}, ValueError, r"data_dir='empty' holds no Lance table"),
        ({"data_dir": "tables", "table": "3"}, FileNotFoundError, r"no table '3'.*\['0', '1', '2'"),
        ({"data_dir": "s3://bucket/db"}, ValueError, r"`table`.*s3://bucket/db"),
    ],
    ids=str,
)
def test_what_names_no_table_is_refused(
    tables: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    (tables.parent / "empty").mkdir()
    monkeypatch.chdir(tables.parent)
    with pytest.raises(error, match=words):
        stream(**options)


# Listing. An audit hook sees every listing of a directory by Python code, but not Lance's own.

_listed: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _listed is not None and event in ("os.listdir", "os.scandir"):
        _listed.append(os.path.abspath(arguments[0]))


sys.addaudithook(_hook)


@contextmanager
def listings() -> Iterator[list[str]]:
    """Directories listed meanwhile."""
    global _listed
    found = _listed = []
    try:
        yield found
    finally:
        _listed = None


def test_listings_are_noticed(tables: Path) -> None:
    """The tests below would see a listing, whichever way it is done."""
    import fsspec

    for way in (
        os.listdir,
        lambda path: list(os.scandir(path)),
        lambda path: list(Path(path).iterdir()),
        lambda path: list(Path(path).glob("*")),
        lambda path: fsspec.filesystem("file").ls(str(path)),
        lambda path: fsspec.filesystem("file").glob(f"{path}/*"),
    ):
        with listings() as found:
            way(tables)
        assert str(tables) in found


@pytest.mark.parametrize(
    "spelling",
    [
        "a str",
        "a URL",
        "a Path",
        "a glob",
        "a database",
        "a table as data_dir",
        "data_dir and a glob",
    ],
)
def test_no_directory_of_a_table_is_listed(
    tables: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    monkeypatch.chdir(tables.parent)
    with listings() as found:
        ds = stream(split="train", **SPELLINGS[spelling][0](tables))
        next(iter(ds))
    assert [path for path in found if ".lance" in path] == []


@pytest.mark.parametrize("pattern", ["tables/**", "**/*.lance", "**"])
def test_a_glob_in_all_depths_stops_at_tables(
    tables: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.chdir(tables.parent)
    with listings() as found:
        ds = stream(split="train", data_files=pattern)
    assert ids(ds) == ids_from(0, 100, 200)
    assert [path for path in found if ".lance" in path] == []


@pytest.mark.parametrize("options", [{}, {"shuffle_seed": 1}, {"table": "0"}], ids=str)
def test_naming_nothing_is_refused_without_a_scan_of_the_working_directory(
    tables: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tables.parent)
    with listings() as found, pytest.raises(ValueError, match=r"data_files=.*data_dir and table"):
        stream(**options)
    assert [path for path in found if path.startswith(str(tables.parent))] == []


# streaming=False.


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.get("version") != "gold"], ids=str)
def test_a_map_style_dataset_has_the_same_rows_in_the_same_order(
    versions: str, options: dict[str, Any]
) -> None:
    loaded = whole(data_files=versions, split="train", **options)
    assert isinstance(loaded, datasets.Dataset)
    streamed = stream(data_files=versions, split="train", **options)
    assert loaded.to_list() == list(streamed)
    assert loaded.features == streamed.features


def test_a_map_style_dataset_has_all_splits_and_tables(tables: Path) -> None:
    names = [str(tables / f"{i}.lance") for i in range(3)]
    loaded = whole(data_files={"train": names[::-1], "test": names[1]})
    assert {name: ids(ds) for name, ds in loaded.items()} == {
        "train": ids_from(200, 100, 0),
        "test": ids_from(100),
    }
    assert ids(whole(data_files=names[0], split="train[5:8]")) == [5, 6, 7]


def test_a_map_style_dataset_has_images(tmp_path: Path) -> None:
    file = io.BytesIO()
    PIL.Image.new("RGB", (2, 2), (9, 0, 0)).save(file, "PNG")
    path = make_table(tmp_path / "i.lance", 2, 2, extra={"c": pa.array([file.getvalue(), None])})
    rows = list(whole(data_files=path, split="train"))
    assert rows[0]["c"].getpixel((0, 0)) == (9, 0, 0)
    assert rows[1]["c"] is None


def append(path: str) -> None:
    make_table(path, 5, 5, start=50, mode="append")


def delete(path: str) -> None:
    lance.dataset(path).delete("id = 3")


def replace(path: str) -> None:
    shutil.rmtree(path)
    make_table(path, 20, 7, start=1000)  # again version 1 with 20 rows


@pytest.mark.parametrize("change", [append, delete, replace])
def test_the_cache_of_a_map_style_dataset_is_rebuilt_when_the_table_changes(
    tables: Path, change: Callable[[str], None]
) -> None:
    path = str(tables / "0.lance")
    assert ids(whole(data_files=path, split="train")) == ids_from(0)
    change(path)
    expected = lance.dataset(path).to_table()["id"].to_pylist()
    assert expected != ids_from(0)
    assert ids(whole(data_files=path, split="train")) == expected


def test_the_cache_of_a_map_style_dataset_is_used_while_nothing_changes(tables: Path) -> None:
    path = str(tables / "0.lance")
    first = whole(data_files=path, split="train", shuffle_seed=1)
    again = whole(data_files=path, split="train", shuffle_seed=1)
    assert first.cache_files == again.cache_files
    other = whole(data_files=path, split="train", shuffle_seed=2)
    assert other.cache_files != first.cache_files
    assert ids(other) != ids(first)


# Other processes.

CHILD = """
import pickle, sys
datasets_and_states = pickle.load(open(sys.argv[1], "rb"))
assert "hf_lance_stream" in sys.modules  # and nobody here imported it
for ds, state in datasets_and_states:
    if state is not None:
        ds.load_state_dict(state)
    print([int(row["id"]) for row in ds])
import datasets
ds = datasets.load_dataset("lance_stream", data_files=sys.argv[2], split="train", streaming=True)
print([row["id"] for row in ds])
"""


def test_a_new_process_needs_no_more_than_the_pickle(tables: Path, tmp_path: Path) -> None:
    path = str(tables / "1.lance")
    plain = hls.from_lance(path, shuffle_seed=1, filter="id != 103")
    begun = stream(data_files=path, split="train", shuffle_seed=1)
    seen = [row["id"] for row in islice(begun, 7)]
    torch = hls.from_lance(path).with_format("torch").select_columns("id")
    payload = [(plain, None), (begun, begun.state_dict()), (torch, None)]
    (tmp_path / "pickle").write_bytes(pickle.dumps(payload))
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "pickle"), path],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(Path(hls.__file__).parents[1])},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0] == ids(plain)
    assert seen + lines[1] == ids(stream(data_files=path, split="train", shuffle_seed=1))
    assert lines[2:] == [ids_from(100), ids_from(100)]


# Registration.


@pytest.fixture
def default() -> Iterator[None]:
    """Our builder is the default for .lance meanwhile."""
    hls.register(default=True)
    yield
    hls.register(default=False)


@pytest.mark.usefixtures("default")
def test_as_the_default_it_loads_paths_that_hold_tables(
    tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tables.parent)
    for path in (str(tables / "1.lance"), "tables/1.lance"):
        ds = load_dataset(path, split="train", streaming=True)
        assert type(ds) is hls.LanceIterableDataset
        assert ids(ds) == ids_from(100)
        assert ids(load_dataset(path, split="train")) == ids_from(100)
    ds = load_dataset("tables", split="train", streaming=True)
    assert type(ds) is hls.LanceIterableDataset
    assert ids(ds) == ids_from(0, 100, 200)
    options = {"shuffle_seed": 1, "num_splits": 5, "columns": ["id"]}
    assert ids(load_dataset("tables/1.lance", split="train", streaming=True, **options)) == ids(
        hls.from_lance("tables/1.lance", **options)
    )


@pytest.mark.usefixtures("default")
def test_as_the_default_it_finds_the_splits_that_directories_name(tmp_path: Path) -> None:
    for split, first in (("train", 0), ("test", 100)):
        (tmp_path / "data" / split).mkdir(parents=True)
        make_table(tmp_path / "data" / split / "pets.lance", 20, 7, start=first)
    loaded = load_dataset(str(tmp_path / "data"), streaming=True)
    assert {name: ids(ds) for name, ds in loaded.items()} == {
        "train": ids_from(0),
        "test": ids_from(100),
    }


@pytest.mark.usefixtures("default")
def test_as_the_default_it_leaves_the_builtin_builder_its_name(tables: Path) -> None:
    files = f"{tables}/1.lance/**"
    ds = load_dataset("lance", data_files=files, split="train", streaming=True)
    assert type(ds) is datasets.IterableDataset
    assert ids(ds) == ids_from(100)


def test_the_default_is_opt_in_and_given_back(tables: Path) -> None:
    def kind() -> type:
        return type(load_dataset(str(tables / "1.lance"), split="train", streaming=True))

    assert kind() is datasets.IterableDataset
    hls.register(default=True)
    try:
        hls.register()  # leaves it as it is
        assert kind() is hls.LanceIterableDataset
    finally:
        hls.register(default=False)
    assert kind() is datasets.IterableDataset
    hls.register()
    assert kind() is datasets.IterableDataset


def test_registering_again_changes_nothing(tables: Path) -> None:
    registry = packaged_modules._PACKAGED_DATASETS_MODULES
    before = dict(registry)
    for _ in range(3):
        hls.register()
    assert registry == before
    assert ids(stream(data_files=str(tables / "1.lance"), split="train")) == ids_from(100)


# Contracts: what `builder` relies on in `datasets`. If one fails after an upgrade, so does ours.


def test_contract_packaged_builders_are_a_dict_of_module_and_hash() -> None:
    registry = packaged_modules._PACKAGED_DATASETS_MODULES
    assert registry["lance"][0] == "datasets.packaged_modules.lance.lance"
    assert all(
        len(entry) == 2 and all(isinstance(part, str) for part in entry)
        for entry in registry.values()
    )
    assert registry["lance_stream"][0] == "hf_lance_stream.builder"


def test_contract_the_registry_is_the_one_load_dataset_reads() -> None:
    assert datasets.load._PACKAGED_DATASETS_MODULES is packaged_modules._PACKAGED_DATASETS_MODULES
    assert datasets.load._EXTENSION_TO_MODULE is packaged_modules._EXTENSION_TO_MODULE


def test_contract_the_builtin_lance_builder_owns_the_extension() -> None:
    assert packaged_modules._EXTENSION_TO_MODULE[".lance"] == ("lance", {})
    for registry in (
        packaged_modules._MODULE_TO_EXTENSIONS,
        packaged_modules._MODULE_TO_METADATA_EXTENSIONS,
        packaged_modules._MODULE_TO_METADATA_FILE_NAMES,
    ):
        assert registry["lance"]
        assert registry["lance_stream"] == registry["lance"]
    assert ".lance" in packaged_modules._MODULE_TO_EXTENSIONS["lance"]


def test_contract_the_module_factory_has_name_data_files_and_data_dir() -> None:
    factory = PackagedDatasetModuleFactory("json", data_dir="d", data_files="f")
    assert (factory.name, factory.data_dir, factory.data_files) == ("json", "d", "f")
    assert list(inspect.signature(builder._original_get_module).parameters) == ["self"]
    assert builder._original_get_module.__module__ == "datasets.load"


def test_contract_a_dataset_module_is_made_of_path_hash_and_builder_arguments() -> None:
    module = DatasetModule("hf_lance_stream.builder", "0" * 64, {"data_files": None})
    assert (module.module_path, module.hash) == ("hf_lance_stream.builder", "0" * 64)
    assert module.builder_kwargs == {"data_files": None}


def test_contract_builders_make_streams_split_by_split_through_one_hook() -> None:
    hook = datasets.DatasetBuilder._as_streaming_dataset_single
    assert list(inspect.signature(hook).parameters)[:2] == ["self", "splits_generator"]
    ours = inspect.signature(builder.LanceStream._as_streaming_dataset_single).parameters
    assert list(inspect.signature(hook).parameters) == list(ours)
    called = inspect.getsource(datasets.DatasetBuilder.as_streaming_dataset)
    assert "_as_streaming_dataset_single" in called


def test_contract_builder_configs_are_made_through_one_hook() -> None:
    theirs = inspect.signature(datasets.DatasetBuilder._create_builder_config).parameters
    assert list(theirs)[:2] == ["self", "config_name"]
    assert "custom_features" in theirs


def write_json(path: Path) -> str:
    path.write_text("".join(json.dumps({"id": i}) + "\n" for i in range(5)))
    return str(path)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_other_packaged_builders_still_work(tables: Path, streaming: bool) -> None:
    file = write_json(tables.parent / "rows.jsonl")
    assert ids(load_dataset("json", data_files=file, split="train", streaming=streaming)) == [
        0,
        1,
        2,
        3,
        4,
    ]
    files = f"{tables}/1.lance/**"
    ds = load_dataset("lance", data_files=files, split="train", streaming=streaming)
    assert ids(ds) == ids_from(100)
    assert not isinstance(ds, hls.LanceIterableDataset)


def test_a_file_that_is_missing_is_still_the_other_builders_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        load_dataset("json", data_files=str(tmp_path / "nothing.jsonl"))
