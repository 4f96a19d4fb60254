"""Tables of a LanceDB server: what is sent, faults and resume after them, keys, names and blobs."""

import asyncio
import json
import logging
import pickle
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from typing import Any

import blob_tables
import datasets
import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
import torch
from helpers import ids, make_table, through_json
from lancedb_server import API_KEY, LanceDBServer

import hf_lance_stream as hls
from hf_lance_stream import remote
from hf_lance_stream.remote import RemoteTable

ROWS = 400
SHUFFLED: dict[str, Any] = {"num_splits": 8, "shuffle_seed": 3, "shuffle_clump_size": 4}
AT_ONCE = {"retry_config": {"retries": 0, "connect_retries": 0, "read_retries": 0}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanceDBServer]:
    with LanceDBServer(tmp_path_factory.mktemp("server")) as one:
        make_table(one.path("pets"), ROWS, 100, ["id", "text", "vector"])
        yield one


@pytest.fixture
def server(running: LanceDBServer) -> Iterator[LanceDBServer]:
    """A server without faults, with the table pets of 400 rows; its log is empty."""
    running.requests.clear()
    yield running
    running.faults.clear()
    running.fault = None


def stream(server: LanceDBServer, **options: Any) -> Any:
    return hls.from_lance(server.connect().open_table("pets"), **options)


def the_table(ds: Any) -> RemoteTable:
    (table,) = ds._ex_iterable.source.tables
    assert isinstance(table, RemoteTable)
    return table


def local_ids(server: LanceDBServer, **options: Any) -> list[int]:
    return ids(hls.from_lance(str(server.path("pets")), **options))


# What is sent.


def test_every_request_for_rows_has_the_version_and_only_the_wanted_columns(
    server: LanceDBServer,
) -> None:
    assert ids(stream(server, columns=["id"], **SHUFFLED)) == local_ids(server, **SHUFFLED)
    queries = server.calls("query")
    assert queries
    for body in queries:
        assert body["version"] == 1
        assert body["columns"] == ["id", "_rowoffset"]
        assert re.fullmatch(r"_rowoffset IN \([\d, ]+\)", body["filter"])


def test_a_filter_is_sent_once_and_selects_offsets(server: LanceDBServer) -> None:
    wanted = {"filter": "id % 7 = 3", **SHUFFLED}
    assert ids(stream(server, columns=["id"], **wanted)) == local_ids(server, **wanted)
    filters = [body for body in server.calls("query") if body["filter"] == "id % 7 = 3"]
    assert [(body["columns"], body["version"]) for body in filters] == [(["_rowoffset"], 1)]


def test_making_a_dataset_asks_for_no_rows(server: LanceDBServer) -> None:
    assert len(stream(server, columns=["id"], shuffle_seed=1)) == ROWS
    assert server.calls("query") == []


def test_large_reads_are_cut_and_repeats_are_asked_for_once(
    server: LanceDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_ROWS_PER_REQUEST", 64)
    table = the_table(stream(server))
    offsets = np.random.default_rng(0).integers(0, ROWS, 1000)
    server.requests.clear()
    rows = table.take(offsets, ["id", "_rowid"])
    assert rows.column("id").to_pylist() == offsets.tolist()
    assert rows.column_names == ["id", "_rowid"]
    numbers = [list(map(int, re.findall(r"\d+", b["filter"]))) for b in server.calls("query")]
    assert max(map(len, numbers)) == 64
    assert sorted(chain(*numbers)) == np.unique(offsets).tolist()


def test_requests_are_counted(server: LanceDBServer) -> None:
    ds = stream(server, columns=["id"], **SHUFFLED)
    ids(ds)
    assert ds.stats().requests == len(server.calls("query"))


def test_row_ids_are_those_of_lance(server: LanceDBServer) -> None:
    ds = stream(server, columns=["id"], with_row_id=True, **SHUFFLED)
    local = hls.from_lance(str(server.path("pets")), columns=["id"], with_row_id=True, **SHUFFLED)
    assert list(ds) == list(local)


def test_natural_shards_are_64_and_go_to_workers_and_ranks(server: LanceDBServer) -> None:
    assert stream(server).num_shards == 64
    shards = [ids(stream(server, rank=rank, world_size=4)) for rank in range(4)]
    assert [*chain(*shards)] == list(range(ROWS))
    make_table(server.path("three"), 3, 3)
    assert hls.from_lance(server.connect().open_table("three")).num_shards == 3


# The contract with lancedb: what `remote` relies on.


def test_contract_a_table_pickles_to_the_words_of_its_connection(server: LanceDBServer) -> None:
    table = server.connect().open_table("pets")
    table.checkout(1)
    state = table.__getstate__()
    assert (state["name"], state["namespace_path"], state["branch"]) == ("pets", [], None)
    connection = json.loads(state["connection_state"])
    assert connection == json.loads(server.connect().serialize())
    assert connection["api_key"] == API_KEY
    assert connection["db_url"] == server.uri
    assert lancedb.deserialize_conn(json.dumps(connection)).open_table("pets").count_rows() == ROWS


def test_contract_take_offsets_gives_offsets_and_no_order(server: LanceDBServer) -> None:
    table = server.connect().open_table("pets")
    wanted = list(range(0, ROWS, 3))
    rows = table.take_offsets(wanted).select(["id", "_rowoffset"]).to_arrow()
    assert rows.column("id") == rows.column("_rowoffset").cast(pa.int64())
    found = rows.column("id").to_pylist()
    assert found != wanted
    assert sorted(found) == wanted


# Faults.


def test_a_fault_that_passes_is_retried_and_nothing_shows(server: LanceDBServer) -> None:
    ds = stream(server, columns=["id"], **SHUFFLED)
    server.faults.extend([503, 500])
    assert ids(ds) == local_ids(server, **SHUFFLED)
    assert not server.faults


@pytest.mark.parametrize("fault", ["cut", "short", "wrong"])
def test_an_answer_that_is_not_what_was_asked_for_is_asked_for_again(
    server: LanceDBServer, fault: str
) -> None:
    ds = stream(server, columns=["id"], **SHUFFLED)
    server.faults.extend(["work", fault])
    assert ids(ds) == local_ids(server, **SHUFFLED)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (500, "500 Internal Server Error"),
        ("cut", "error decoding response body"),
        ("short", "asked for .* gave"),
        ("wrong", "asked for .* gave"),
    ],
)
def test_a_fault_that_stays_is_a_clear_error_and_the_state_resumes_after_it(
    server: LanceDBServer, fault: Any, reason: str
) -> None:
    table = server.connect(**AT_ONCE).open_table("pets")

    def build() -> Any:
        return hls.from_lance(table, columns=["id"], read_budget=8 * 8 * 3, **SHUFFLED)

    ds, seen = build(), []

    def read() -> None:
        for row in ds:
            seen.append(row["id"])
            if len(seen) == 100:
                server.fault = fault

    with pytest.raises(OSError, match=reason) as caught:
        read()
    state = through_json(ds.state_dict())
    assert "db://farm/pets" in str(caught.value)
    assert re.search(r"row \d+|rows between \d+ and \d+", str(caught.value))
    assert 100 <= len(seen) < ROWS
    server.fault = None
    new = build()
    new.load_state_dict(state)
    assert seen + ids(new) == local_ids(server, **SHUFFLED)


def test_a_server_that_does_not_answer_is_an_error_in_the_time_of_the_client(
    server: LanceDBServer,
) -> None:
    config = {**AT_ONCE, "timeout_config": {"read_timeout": 0.5, "timeout": 0.5}}
    table = server.connect(**config).open_table("pets")
    ds = hls.from_lance(table, columns=["id"], **SHUFFLED)
    server.fault = "hang"
    begin = time.monotonic()
    with pytest.raises(OSError, match=r"could not read .* of db://farm/pets at version 1"):
        next(iter(ds))
    assert time.monotonic() - begin < 15


def test_a_filter_that_is_not_answered_whole_is_an_error(server: LanceDBServer) -> None:
    server.faults.append("short")
    with pytest.raises(OSError, match=r"has 57 rows that match .* but gave 56"):
        stream(server, filter="id % 7 = 3")


def test_a_server_at_fault_is_no_wrong_filter(server: LanceDBServer) -> None:
    server.fault = 500
    table = server.connect(**AT_ONCE).open_table("pets")
    with pytest.raises(OSError, match="could not apply filter='id > 3' of db://farm/pets"):
        hls.from_lance(table, filter="id > 3")


def test_case_24_a_version_that_is_gone_is_named_with_the_advice_to_tag(
    server: LanceDBServer,
) -> None:
    make_table(server.path("cleaned"), 50, 50)
    ds = hls.from_lance(server.connect().open_table("cleaned"), columns=["id"])
    make_table(server.path("cleaned"), 50, 50, mode="overwrite")
    table = lance.dataset(str(server.path("cleaned")))
    table.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
    with pytest.raises(OSError, match=r"db://farm/cleaned at version 1: .*not found.*tag"):
        next(iter(ds))


def test_a_server_that_lists_no_versions_will_do(
    server: LanceDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(LanceDBServer, "version_list")
    monkeypatch.setattr("lancedb_server._CALLS", {"describe", "count_rows", "query"})
    assert ids(stream(server, **SHUFFLED)) == local_ids(server, **SHUFFLED)


# Keys.


def through_from_lance(server: LanceDBServer, **options: Any) -> Any:
    return hls.from_lance(f"{server.uri}/pets", storage_options=server.options, **options)


def through_data_dir(server: LanceDBServer, **options: Any) -> Any:
    return datasets.load_dataset(
        "lance_stream",
        data_dir=server.uri,
        table="pets",
        split="train",
        streaming=True,
        storage_options=server.options,
        **options,
    )


def through_data_files(server: LanceDBServer, **options: Any) -> Any:
    return datasets.load_dataset(
        "lance_stream",
        data_files=f"{server.uri}/pets",
        split="train",
        streaming=True,
        storage_options=server.options,
        **options,
    )


WAYS = [stream, through_from_lance, through_data_dir, through_data_files]


@pytest.mark.parametrize("way", WAYS)
def test_a_table_is_opened_by_its_uri_or_by_its_database(server: LanceDBServer, way: Any) -> None:
    assert ids(way(server, **SHUFFLED)) == local_ids(server, **SHUFFLED)


def test_the_key_and_the_host_come_from_the_environment_too(
    server: LanceDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANCEDB_API_KEY", API_KEY)
    options = {"host_override": server.host}
    assert len(ids(hls.from_lance(f"{server.uri}/pets", storage_options=options))) == ROWS


@pytest.mark.parametrize("way", WAYS)
def test_case_29_the_key_is_in_no_pickle_state_text_or_log(
    server: LanceDBServer, way: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    ds = way(server, **SHUFFLED)
    rows = iter(ds)
    next(rows)
    server.fault = 403
    with pytest.raises(OSError, match="403") as caught:
        list(way(server, **SHUFFLED))
    texts = [
        repr(ds),
        str(ds),
        ds.describe(),
        repr(ds._ex_iterable.source),
        json.dumps(ds.state_dict()),
    ]
    error: BaseException | None = caught.value
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    texts += [record.getMessage() for record in caplog.records]
    for text in texts:
        assert API_KEY not in text
    for data in (pickle.dumps(ds), pickle.dumps(ds.map(str))):
        assert API_KEY.encode() not in data


def test_a_pickle_without_the_key_says_what_it_needs(
    server: LanceDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = pickle.loads(pickle.dumps(stream(server, **SHUFFLED)))
    with pytest.raises(OSError, match=r"api_key.*not in the pickle: set LANCEDB_API_KEY"):
        next(iter(new))
    monkeypatch.setenv("LANCEDB_API_KEY", "sk-wrong-key")
    with pytest.raises(OSError, match=r"401.*not in the pickle: set LANCEDB_API_KEY"):
        next(iter(new))
    monkeypatch.setenv("LANCEDB_API_KEY", API_KEY)
    assert ids(new) == local_ids(server, **SHUFFLED)


def test_a_pickle_has_the_key_when_asked_and_for_a_child_that_is_started(
    server: LanceDBServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pickle.loads(pickle.dumps(stream(server, pickle_credentials=True, **SHUFFLED)))
    assert ids(asked) == local_ids(server, **SHUFFLED)
    table = the_table(stream(server))
    with pytest.raises(ValueError, match="the API key is missing"):
        _ = pickle.loads(pickle.dumps(table)).handle
    monkeypatch.setattr("hf_lance_stream.remote.is_starting_child", lambda: True)
    assert pickle.loads(pickle.dumps(table)).handle.count_rows() == ROWS


def test_extra_headers_and_the_password_of_a_host_are_secret(server: LanceDBServer) -> None:
    config = {"extra_headers": {"authorization": "Bearer very-secret"}}
    host = server.host.replace("http://", "http://user:very-secret@")
    database = lancedb.connect(
        server.uri, api_key=API_KEY, host_override=host, client_config=config
    )
    ds = hls.from_lance(database.open_table("pets"))
    assert len(ids(ds)) == ROWS
    assert b"very-secret" not in pickle.dumps(ds)
    assert the_table(pickle.loads(pickle.dumps(ds))).left_out == (
        "api_key",
        "host_override",
        "authorization",
    )
    server.fault = 403
    with pytest.raises(OSError, match="403") as caught:
        next(iter(hls.from_lance(database.open_table("pets"))))
    assert "very-secret" not in str(caught.value)


def test_a_wrong_key_is_refused_in_words(server: LanceDBServer) -> None:
    options = {**server.options, "api_key": "sk-wrong-key"}
    with pytest.raises(ValueError, match=r"'db://farm/pets' cannot be opened: .*401.*API key") as e:
        hls.from_lance(f"{server.uri}/pets", storage_options=options)
    assert str(e.value.__cause__).endswith("wrong API key ***")  # the server repeats the key
    assert "sk-wrong-key" not in str(e.value)


# Names.


def test_what_is_no_table_is_refused(server: LanceDBServer) -> None:
    options = server.options
    with pytest.raises(FileNotFoundError, match="`source`: there is no table 'db://farm/pats'"):
        hls.from_lance(f"{server.uri}/pats", storage_options=options)
    for uri in (server.uri, f"{server.uri}/pets?version=1", "db:///pets"):
        with pytest.raises(ValueError, match="`source` must name a table of the database"):
            hls.from_lance(uri, storage_options=options)
    with pytest.raises(ValueError, match=r"`table` must name a table"):
        datasets.load_dataset("lance_stream", data_dir=server.uri, streaming=True)
    with pytest.raises(ValueError, match=r"`storage_options` .* got \['timeout'\]"):
        hls.from_lance(f"{server.uri}/pets", storage_options={**options, "timeout": "5s"})
    with pytest.raises(ValueError, match=r"api_key is required.*LANCEDB_API_KEY"):
        hls.from_lance(f"{server.uri}/pets")


def test_a_server_that_is_not_there_is_named(server: LanceDBServer) -> None:
    options = {**server.options, "host_override": "http://127.0.0.1:9"}
    with pytest.raises(ValueError, match=r"'db://farm/pets' cannot be opened.*127\.0\.0\.1:9"):
        hls.from_lance(f"{server.uri}/pets", storage_options=options)


def test_an_async_table_is_refused(server: LanceDBServer) -> None:
    async def opened() -> Any:
        options = {"api_key": API_KEY, "host_override": server.host}
        return await (await lancedb.connect_async(server.uri, **options)).open_table("pets")

    with pytest.raises(ValueError, match=r"`source` must be .*not an AsyncTable.*got AsyncTable"):
        hls.from_lance(asyncio.run(opened()))


def test_a_connection_that_no_worker_could_make_is_refused(server: LanceDBServer) -> None:
    class Headers(lancedb.remote.HeaderProvider):  # type: ignore[misc]
        def get_headers(self) -> dict[str, str]:
            return {"x-api-key": API_KEY}

    database = server.connect(header_provider=Headers())
    with pytest.raises(ValueError, match=r"cannot be made again in another process.*header"):
        hls.from_lance(database.open_table("pets"))


def test_tables_in_namespaces(server: LanceDBServer) -> None:
    make_table(server.path("north$farm$pets"), 30, 10)
    table = server.connect().open_table("pets", namespace_path=["north", "farm"])
    for source in (table, f"{server.uri}/north/farm/pets"):
        ds = hls.from_lance(source, storage_options=server.options)
        assert ids(ds) == list(range(30))
        assert ds._ex_iterable.source.name == "db://farm/north/farm/pets"


def test_a_table_is_read_where_the_user_checked_it_out(server: LanceDBServer) -> None:
    make_table(server.path("tree"), 30, 10)
    lance.dataset(str(server.path("tree"))).create_branch("side").insert(
        pa.table({"id": [7, 8]}), mode="append"
    )
    make_table(server.path("tree"), 5, 5, mode="append")
    table = server.connect().open_table("tree")
    side = table.branches.checkout("side")
    ds = hls.from_lance(side)
    assert ids(ds) == [*range(30), 7, 8]
    assert ds._ex_iterable.source.name == "db://farm/tree/tree/side"
    table.checkout(1)
    assert ids(hls.from_lance(table)) == list(range(30))
    table.checkout_latest()
    assert len(hls.from_lance(table)) == 35
    assert table.version == 2


def test_a_tag_that_may_be_of_another_branch_is_refused(server: LanceDBServer) -> None:
    make_table(server.path("both"), 30, 10)
    table = lance.dataset(str(server.path("both")))
    side = table.create_branch("side")
    side.insert(pa.table({"id": [7, 8]}), mode="append")
    table.tags.create("best", ("side", 2))
    source = server.connect().open_table("both")
    with pytest.raises(FileNotFoundError, match=r"'best': .*LanceDB does not tell.*branches"):
        hls.from_lance(source, version="best")
    with pytest.raises(ValueError, match=r"`tag`: 'best' .*LanceDB does not tell"):
        hls.pin(hls.from_lance(source), tag="best")


def test_several_tables_of_several_kinds_are_read_as_one(server: LanceDBServer) -> None:
    make_table(server.path("more"), 50, 20, start=1000)
    tables = [server.connect().open_table("pets"), str(server.path("more"))]
    ds = hls.from_lance(tables, columns=["id"])
    assert ids(ds) == [*range(ROWS), *range(1000, 1050)]
    mixed = hls.from_lance(tables, columns=["id"], **SHUFFLED)
    assert sorted(ids(mixed)) != sorted(ids(ds))
    assert len(ids(mixed)) == 448


# Blobs.


@pytest.mark.parametrize("encoding", ["2.1", "2.2"])
def test_case_26_blobs_are_bytes_or_files(server: LanceDBServer, encoding: str) -> None:
    name = f"blobs{encoding.replace('.', '')}"
    if not server.path(name).exists():
        blob_tables.blob_table(server.path(name), encoding, blob=blob_tables.CASE_26)
        lance.dataset(str(server.path(name))).delete("id = 1")
    table = server.connect().open_table(name)
    live = [v for i, v in enumerate(blob_tables.CASE_26) if i != 1]
    assert [row["blob"] for row in hls.from_lance(table)] == live
    files = [row["blob"] for row in hls.from_lance(table, blobs="lazy")]
    server.requests.clear()
    assert [file and file.size() for file in files] == [v and len(v) for v in live]
    assert [file and file.read() for file in files] == live
    whole = [body for body in server.calls("blob") if body["range"] == "bytes=0-"]
    assert len(whole) == 3


# Processes.


def test_case_30_a_forked_worker_is_refused_at_once(server: LanceDBServer) -> None:
    ds = stream(server, columns=["id"], **SHUFFLED)
    next(iter(ds))
    loader = torch.utils.data.DataLoader(
        ds, batch_size=4, num_workers=1, multiprocessing_context="fork"
    )
    begin = time.monotonic()
    with pytest.warns(), pytest.raises(RuntimeError, match="forkserver"):
        list(loader)
    assert time.monotonic() - begin < 30


def test_threads_share_one_handle(server: LanceDBServer) -> None:
    here = replace(the_table(stream(server)), pickle_credentials=True)
    table = pickle.loads(pickle.dumps(here))
    server.requests.clear()

    def read(offset: int) -> int:
        return int(table.take(np.array([offset]), ["id"])["id"][0].as_py())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(40))) == list(range(40))
    assert len(server.calls("describe")) < 8
