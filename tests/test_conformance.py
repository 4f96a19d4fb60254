"""The same tests on every kind of source: a path, embedded LanceDB, a LanceDB server, and S3.

What a kind yields is compared with what the same arguments give of a plain path, and that with a
scan of Lance.
"""

import pickle
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lance
import lancedb
import pyarrow as pa
import pytest
from helpers import cut, ids, make_table, through_json
from lancedb_server import API_KEY, LanceDBServer
from s3 import BUCKET, S3

import hf_lance_stream as hls

KINDS = ["path", "embedded", "remote"]
ROWS = 1010
SHUFFLED: dict[str, Any] = {"num_splits": 8, "shuffle_seed": 3, "shuffle_clump_size": 16}
ORDERS: dict[str, dict[str, Any]] = {
    "natural": {},
    "splits": {"num_splits": 8},
    "seed": {"shuffle_seed": 5},
    "drop": SHUFFLED,
    "pad": {**SHUFFLED, "num_splits": 48, "tail": "pad"},
    "keep": {**SHUFFLED, "num_splits": 48, "tail": "keep"},
    "epoch": {**SHUFFLED, "epoch": 2},
    "rank": {**SHUFFLED, "rank": 1, "world_size": 2},
    "filter": {"filter": "label != 3"},
    "filter, shuffled": {**SHUFFLED, "filter": "label != 3 AND text LIKE 'text 1%'"},
    "columns": {**SHUFFLED, "columns": ["text", "id"]},
    "nested": {**SHUFFLED, "columns": ["pet.name", "id", "pet.toy.size"]},
    "row ids": {**SHUFFLED, "columns": ["id"], "with_row_id": True},
    "one column of a filter": {"columns": ["text"], "filter": "id > 1000"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[LanceDBServer]:
    with LanceDBServer(root) as one:
        yield one


@pytest.fixture(scope="module")
def pets(server: LanceDBServer) -> str:
    """The path of T(1010, 250) with rows of each kind of place deleted; nobody writes to it."""
    return write_pets(server.path("pets"))


@pytest.fixture
def changing(server: LanceDBServer, request: pytest.FixtureRequest) -> str:
    """The name of a table T(200, 50) for this test alone, at version 1."""
    name = f"changing{abs(hash(request.node.name))}"
    make_table(server.path(name), 200, 50)
    return name


def write_pets(path: str | Path, **options: Any) -> str:
    toys = pa.array([{"size": i / 2} for i in range(ROWS)])
    names = pa.array([f"pet {i}" for i in range(ROWS)])
    pet = pa.StructArray.from_arrays([names, toys], names=["name", "toy"])
    columns = ["id", "text", "label", "vector"]
    make_table(path, ROWS, 250, columns, extra={"pet": pet}, **options)
    table = lance.dataset(str(path), **options)
    table.delete("id % 3 = 0")
    table.delete("id IN (249, 250) OR (id >= 500 AND id < 750)")
    return str(path)


def opened(kind: str, server: LanceDBServer, name: str) -> Any:
    """What a user passes to `from_lance`."""
    if kind == "path":
        return str(server.path(name))
    if kind == "embedded":
        return lancedb.connect(server.root).open_table(name)
    return server.connect().open_table(name)


def builder(kind: str, server: LanceDBServer, name: str, **options: Any) -> Callable[[], Any]:
    return lambda: hls.from_lance(opened(kind, server, name), **options)


# Rows and their order.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", ORDERS.values(), ids=ORDERS)
def test_case_25_rows_and_order_are_those_of_the_path(
    kind: str, options: dict[str, Any], server: LanceDBServer, pets: str
) -> None:
    found = list(hls.from_lance(opened(kind, server, "pets"), **options))
    assert found == list(hls.from_lance(pets, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_case_25_all_live_rows_come_as_a_scan_has_them(
    kind: str, server: LanceDBServer, pets: str
) -> None:
    scanned = lance.dataset(pets).to_table().to_pylist()
    assert len(scanned) == 505
    assert list(hls.from_lance(opened(kind, server, "pets"))) == scanned
    some = lance.dataset(pets).to_table(columns=["id"], filter="label = 2").to_pylist()
    filtered = hls.from_lance(opened(kind, server, "pets"), columns=["id"], filter="label = 2")
    assert list(filtered) == some


@pytest.mark.parametrize("kind", KINDS)
def test_length_features_and_description(kind: str, server: LanceDBServer, pets: str) -> None:
    ds, local = (
        hls.from_lance(table, **SHUFFLED) for table in (opened(kind, server, "pets"), pets)
    )
    assert len(ds) == len(local) == len(list(ds)) == 504
    assert ds.features == local.features
    rest = [line for line in ds.describe().splitlines() if not line.startswith("Table:")]
    assert rest == [line for line in local.describe().splitlines() if "Table:" not in line]
    assert "version 3" in ds.describe()


@pytest.mark.parametrize("kind", KINDS)
def test_torch_batches_are_equal(kind: str, server: LanceDBServer, pets: str) -> None:
    def torch_batches(table: Any) -> list[Any]:
        ds = hls.from_lance(table, columns=["id", "vector"], **SHUFFLED).with_format("torch")
        return [(b["id"].tolist(), b["vector"].tolist()) for b in ds.batch(32)]

    assert torch_batches(opened(kind, server, "pets")) == torch_batches(pets)


# Resume.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, SHUFFLED, {**SHUFFLED, "filter": "label = 1"}])
def test_case_1_resumes_exactly_at_any_row(
    kind: str, options: dict[str, Any], server: LanceDBServer, pets: str
) -> None:
    build = builder(kind, server, "pets", columns=["id"], **options)
    full = ids(build())
    for k in (0, 1, 16, 61, len(full) - 1, len(full)):
        assert cut(build, k) == full


@pytest.mark.parametrize("kind", KINDS)
def test_case_2_a_state_of_other_arguments_is_refused(
    kind: str, server: LanceDBServer, pets: str
) -> None:
    state = builder(kind, server, "pets", **SHUFFLED)().state_dict()
    other = builder(kind, server, "pets", **{**SHUFFLED, "shuffle_seed": 4})()
    with pytest.raises(ValueError, match="shuffle_seed: saved 3, now 4"):
        other.load_state_dict(state)


def test_a_state_goes_from_one_kind_to_another_when_asked(server: LanceDBServer, pets: str) -> None:
    full = ids(hls.from_lance(pets, **SHUFFLED))
    ds = builder("remote", server, "pets", **SHUFFLED)()
    seen = [row["id"] for row in islice(ds, 100)]
    state = through_json(ds.state_dict())
    local = hls.from_lance(pets, **SHUFFLED)
    with pytest.raises(ValueError, match="table: saved 'db://farm/pets', now "):
        local.load_state_dict(state)
    with pytest.warns(UserWarning, match="table: saved"):
        local.load_state_dict(state, strict=False)
    assert seen + ids(local) == full


# Versions.


def change(path: Path) -> None:
    table = lance.dataset(str(path))
    table.delete("id % 2 = 0")
    make_table(path, 30, 30, start=200, mode="append")
    lance.dataset(str(path)).optimize.compact_files()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, SHUFFLED, {**SHUFFLED, "filter": "id > 20"}])
def test_case_23_a_table_that_changes_meanwhile_does_not_show(
    kind: str, options: dict[str, Any], server: LanceDBServer, changing: str
) -> None:
    full = ids(hls.from_lance(str(server.path(changing)), **options))
    table = opened(kind, server, changing)
    ds = hls.from_lance(table, read_budget=1, **options)
    rows = iter(ds)
    seen = [next(rows)["id"] for _ in range(10)]
    change(server.path(changing))
    assert seen + [row["id"] for row in rows] == full
    assert ids(ds) == full
    new = ids(hls.from_lance(opened(kind, server, changing)))
    assert new == [*range(1, 200, 2), *range(200, 230)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_at_its_own_version(
    kind: str, server: LanceDBServer, changing: str
) -> None:
    build = builder(kind, server, changing, **SHUFFLED)
    ds = build()
    full = ids(ds)
    seen = [row["id"] for row in islice(ds, 50)]
    state = through_json(ds.state_dict())
    change(server.path(changing))
    new = build()
    assert ids(new) != full
    new.load_state_dict(state)
    assert seen + ids(new) == full


@pytest.mark.parametrize("kind", KINDS)
def test_version_takes_a_number_a_tag_and_a_branch(
    kind: str, server: LanceDBServer, changing: str
) -> None:
    path = server.path(changing)
    lance.dataset(str(path)).tags.create("first", 1)
    change(path)
    table = opened(kind, server, changing)
    for version in (1, "first"):
        assert ids(hls.from_lance(table, version=version)) == list(range(200))
    assert len(hls.from_lance(table)) == 130
    lance.dataset(str(path)).create_branch("side", 1).insert(pa.table({"id": [7, 8, 9]}))
    assert ids(hls.from_lance(table, version="side")) == [*range(200), 7, 8, 9]
    assert ids(hls.from_lance(table, version=("side", 1))) == list(range(200))
    assert len(hls.from_lance(table)) == 130  # the user's table is where it was


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_made_anew_is_not_taken_for_the_old_one(
    kind: str, server: LanceDBServer, changing: str
) -> None:
    ds = builder(kind, server, changing, **SHUFFLED)()
    next(iter(ds))
    state = ds.state_dict()
    shutil.rmtree(server.path(changing))
    make_table(server.path(changing), 200, 50)
    with pytest.raises(ValueError, match="files"):
        builder(kind, server, changing, **SHUFFLED)().load_state_dict(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_is_tagged_and_untagged(kind: str, server: LanceDBServer, changing: str) -> None:
    ds = builder(kind, server, changing)()
    assert list(hls.pin(ds, tag="run-7").values()) == [1]
    assert lance.dataset(str(server.path(changing))).tags.list()["run-7"]["version"] == 1
    change(server.path(changing))
    with pytest.raises(ValueError, match=r"'run-7' of .* is that of version 1"):
        hls.pin(builder(kind, server, changing)(), tag="run-7")
    hls.unpin(ds, tag="run-7")
    assert lance.dataset(str(server.path(changing))).tags.list() == {}


# Processes.


def loader_of(ds: Any, num_workers: int, **options: Any) -> Any:
    return hls.stateful_dataloader(ds, batch_size=16, num_workers=num_workers, **options)


def batches(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


@pytest.mark.parametrize("kind", KINDS)
def test_case_29_workers_read_the_same_batches_and_resume(
    kind: str, server: LanceDBServer, pets: str
) -> None:
    options = {**SHUFFLED, "columns": ["id"], "filter": "label != 3"}
    build = builder(kind, server, "pets", **options)
    loader = loader_of(build(), 2, multiprocessing_context="forkserver")
    seen = batches(islice(loader, 7))
    new = loader_of(build(), 2, multiprocessing_context="forkserver")
    new.load_state_dict(through_json(loader.state_dict()))
    del loader
    assert seen + batches(new) == batches(loader_of(hls.from_lance(pets, **options), 0))


def test_case_29_spawned_workers_read_a_server(server: LanceDBServer, pets: str) -> None:
    ds = builder("remote", server, "pets", columns=["id"], **SHUFFLED)()
    here = batches(loader_of(hls.from_lance(pets, columns=["id"], **SHUFFLED), 0))
    assert batches(loader_of(ds, 2, multiprocessing_context="spawn")) == here


@pytest.mark.parametrize("kind", KINDS)
def test_case_29_a_pickle_opens_the_table_anew(
    kind: str, server: LanceDBServer, pets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = builder(kind, server, "pets", columns=["id"], **SHUFFLED)()
    rows = iter(ds)
    seen = [next(rows)["id"] for _ in range(20)]
    data = pickle.dumps(ds)  # in mid-pass
    monkeypatch.setenv("LANCEDB_API_KEY", API_KEY)
    new = pickle.loads(data)
    assert ids(new) == ids(hls.from_lance(pets, columns=["id"], **SHUFFLED))
    assert seen + [row["id"] for row in rows] == ids(new)


# Errors.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"columns": ["txet"]}, ValueError, "`columns` names 'txet'.*did you mean 'text'"),
        ({"columns": ["pet.nam"]}, ValueError, "`columns` names 'pet.nam'.*'pet.name'"),
        ({"filter": "lable = 1"}, ValueError, "`filter` cannot be applied.*lable = 1.*label"),
        ({"filter": "label = "}, ValueError, "`filter` cannot be applied.*label = "),
        ({"version": 99}, FileNotFoundError, "`version`.* has no version 99"),
        ({"version": "nope"}, FileNotFoundError, "`version`.* has no version 'nope'"),
        ({"version": ("nope", 1)}, FileNotFoundError, r"`version`.* has no version \('nope', 1\)"),
        ({"version": 1.5}, ValueError, "`version` must be"),
        ({"filter": "id < 0", "num_splits": 8}, ValueError, "num_splits"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_refused_alike(
    kind: str,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
    server: LanceDBServer,
    pets: str,
) -> None:
    with pytest.raises(error, match=words):
        builder(kind, server, "pets", **options)()


@pytest.mark.parametrize("kind", KINDS)
def test_case_17_a_filter_that_nothing_matches_gives_no_rows(
    kind: str, server: LanceDBServer, pets: str
) -> None:
    assert list(builder(kind, server, "pets", filter="id < 0")()) == []


# A LanceDB database in an object store.


@pytest.fixture(scope="module")
def s3(root: Path) -> Iterator[S3]:
    with S3() as store:
        write_pets(store.uri("pets.lance"), storage_options=store.options)
        yield store


def test_embedded_on_s3_gives_the_same_rows_resumes_and_feeds_workers(s3: S3, pets: str) -> None:
    database = lancedb.connect(f"s3://{BUCKET}", storage_options=s3.options)
    table = database.open_table("pets")

    def build(**options: Any) -> Any:
        return hls.from_lance(table, **options)

    for options in (ORDERS["natural"], ORDERS["pad"], ORDERS["nested"]):
        assert list(build(**options)) == list(hls.from_lance(pets, **options))
    only = {**SHUFFLED, "columns": ["id"], "filter": "label != 3"}
    full = ids(hls.from_lance(pets, **only))
    assert cut(lambda: build(**only), 61) == full
    here = batches(loader_of(hls.from_lance(pets, **only), 0))
    assert batches(loader_of(build(**only), 2)) == here
