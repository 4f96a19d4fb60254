"""Tables in an object store: options and credentials, read-ahead, faults and resume after them.

The store is moto over real HTTP, behind a proxy that delays requests and makes faults.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import lance
import pytest
from helpers import ids, make_table, through_json
from s3 import S3, SECRET

import hf_lance_stream as hls

ROWS = 1000
SHUFFLED: dict[str, Any] = {"num_splits": 8, "shuffle_seed": 3, "shuffle_clump_size": 8}
SMALL_READS = {"columns": ["id"], "read_budget": 4 * 8 * 32}  # chunks of 32 rows of 8 bytes
AT_ONCE = {"client_max_retries": "0", "lance_aimd_max_retries": "0"}  # an error without retries


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with S3() as s3:
        make_table(s3.uri("pets.lance"), ROWS, 250, ["id", "text"], storage_options=s3.options)
        yield s3


@pytest.fixture
def s3(server: S3) -> Iterator[S3]:
    """The server without a delay or a fault, with the table pets.lance of 1000 rows."""
    server.proxy.set(delay=0.0)
    yield server
    server.proxy.set(delay=0.0)


def stream(s3: S3, options: dict[str, str] | None = None, **more: Any) -> Any:
    """The shuffled table, read in small chunks."""
    arguments = {**SHUFFLED, **SMALL_READS, **more}
    storage_options = {**s3.options, **(options or {})}
    return hls.from_lance(s3.uri("pets.lance"), storage_options=storage_options, **arguments)


def local_ids(tmp_path: Path) -> list[int]:
    """The order that a local table of as many rows has."""
    return ids(hls.from_lance(make_table(tmp_path / "pets.lance", ROWS, 500), **SHUFFLED))


# Options and credentials.


def with_from_lance(s3: S3) -> Any:
    return hls.from_lance(s3.uri("pets.lance"), storage_options=s3.options, **SHUFFLED)


def with_a_handle(s3: S3) -> Any:
    handle = lance.dataset(s3.uri("pets.lance"), storage_options=s3.options)
    return hls.from_lance(handle, **SHUFFLED)


def with_load_dataset(s3: S3) -> Any:
    return datasets.load_dataset(
        "lance_stream",
        data_files={"train": s3.uri("pets.lance")},
        storage_options=s3.options,
        split="train",
        streaming=True,
        **SHUFFLED,
    )


def with_a_database(s3: S3) -> Any:
    return datasets.load_dataset(
        "lance_stream",
        data_dir=s3.uri("").rstrip("/"),
        table="pets",
        storage_options=s3.options,
        split="train",
        streaming=True,
        **SHUFFLED,
    )


WAYS = [with_from_lance, with_a_handle, with_load_dataset, with_a_database]


@pytest.mark.parametrize("open_", WAYS)
def test_storage_options_reach_lance_and_the_order_is_that_of_a_local_table(
    s3: S3, tmp_path: Path, open_: Callable[[S3], Any]
) -> None:
    assert ids(open_(s3)) == local_ids(tmp_path)


def test_storage_options_reach_the_workers(s3: S3, tmp_path: Path) -> None:
    loader = hls.stateful_dataloader(stream(s3), batch_size=8, num_workers=2)
    assert [i for batch in loader for i in batch["id"].tolist()] == local_ids(tmp_path)


def test_credentials_may_come_from_the_environment(
    s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    ds = hls.from_lance(s3.uri("pets.lance"), **SHUFFLED)
    rows = islice(iter(ds), 100)
    seen = [row["id"] for row in rows]
    new = with_from_lance(s3)  # the state does not depend on how the table is reached
    new.load_state_dict(through_json(ds.state_dict()))
    assert seen + ids(new) == local_ids(tmp_path)


def test_no_secret_is_shown(s3: S3) -> None:
    ds = stream(s3, AT_ONCE)
    next(iter(ds))
    shown = [
        json.dumps(ds.state_dict()),
        str(ds.describe()),
        repr(ds),
        repr(ds._ex_iterable.source),
    ]
    s3.proxy.set(mode="refuse")
    with pytest.raises(OSError, match=r"pets\.lance") as error:
        ids(ds)
    shown.append(str(error.value))
    assert not [text for text in shown if SECRET in text]


@pytest.mark.parametrize("name", ["dogs.lance", "../other_bucket/pets.lance"])
def test_a_table_that_is_not_there_is_named(s3: S3, name: str) -> None:
    uri = s3.uri(name).replace("bucket/../", "")
    with pytest.raises(FileNotFoundError, match=f"`source`: there is no Lance table at '{uri}'"):
        hls.from_lance(uri, storage_options=s3.options | AT_ONCE)


def test_a_version_that_is_not_there_is_named(s3: S3) -> None:
    with pytest.raises(FileNotFoundError, match=r"`version`: .*pets\.lance' has no version 7"):
        stream(s3, version=7)


# Read-ahead.


def at_once(s3: S3, uri: str, read_budget: int) -> int:
    """The most requests under way at once while rows of 8 bytes are read."""
    ds = hls.from_lance(uri, storage_options=s3.options, read_budget=read_budget)
    rows = iter(ds)
    for _ in range(200):  # now the metadata are known, and chunks have their full size:
        next(rows)  # more of the first, smaller ones fit into the budget
    s3.proxy.set(delay=0.05)
    s3.proxy.stats()
    assert len(list(islice(rows, 20 if read_budget == 1 else 200)))
    most = s3.proxy.stats()["at_once"]
    s3.proxy.set(delay=0.0)
    return most


def test_the_read_budget_sets_how_many_reads_are_under_way(s3: S3) -> None:
    uri = s3.uri("one_file.lance")
    make_table(uri, ROWS, ROWS, storage_options=s3.options)  # a read is one request
    assert at_once(s3, uri, read_budget=1) == 1
    assert 3 <= at_once(s3, uri, read_budget=4 * 8 * 8) <= 4


def test_requests_are_counted(s3: S3) -> None:
    ds = stream(s3)
    before = s3.proxy.stats()["requests"]
    ids(ds)
    assert ds.stats().requests == pytest.approx(s3.proxy.stats()["requests"] - before, abs=10)
    assert ds.stats().requests >= ROWS / 32


# Faults.


def break_off(s3: S3, ds: Any, mode: str) -> tuple[list[int], OSError]:
    """Read until a fault that comes after 100 rows; the ids seen, and the error."""
    seen: list[int] = []

    def read() -> None:
        for row in ds:
            seen.append(row["id"])
            if len(seen) == 100:
                s3.proxy.set(mode=mode)

    with pytest.raises(OSError, match="could not read") as error:
        read()
    return seen, error.value


@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        ("gone", {}, "error sending request"),
        ("refuse", {}, "403 Forbidden"),
        ("throttle", {}, "503 Service Unavailable"),
        ("silent", {"timeout": "300ms"}, "error sending request"),
    ],
)
def test_a_fault_in_mid_epoch_is_a_clear_error_and_the_state_resumes_after_it(
    s3: S3, tmp_path: Path, mode: str, options: dict[str, str], reason: str
) -> None:
    ds = stream(s3, AT_ONCE | options)
    begin = time.monotonic()
    seen, error = break_off(s3, ds, mode)
    assert time.monotonic() - begin < 60
    state = through_json(ds.state_dict())
    text = str(error)
    place = rf"could not read (row \d+|\d+ rows .*) of {s3.uri('pets.lance')} at version 1, in frag"
    assert re.search(place, text)
    assert reason in text
    assert 100 <= len(seen) < ROWS

    s3.proxy.set(mode="work")
    new = stream(s3)
    new.load_state_dict(state)
    whole = local_ids(tmp_path)
    assert seen + ids(new) == whole
    ds.load_state_dict(state)  # the same dataset goes on too
    assert seen + ids(ds) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_resumes_after_a_fault(s3: S3, tmp_path: Path, num_workers: int) -> None:
    def build() -> Any:
        return hls.stateful_dataloader(stream(s3, AT_ONCE), batch_size=8, num_workers=num_workers)

    loader = build()
    seen: list[int] = []
    states = []

    def read() -> None:
        for batch in loader:
            seen.extend(batch["id"].tolist())
            states.append(through_json(loader.state_dict()))
            if len(seen) == 80:
                s3.proxy.set(mode="gone")

    with pytest.raises(OSError, match=r"could not read (row|\d+ rows) .*pets\.lance at version 1"):
        read()
    assert 80 <= len(seen) < ROWS

    s3.proxy.set(mode="work")
    new = build()
    new.load_state_dict(states[-1])
    assert seen + [i for batch in new for i in batch["id"].tolist()] == local_ids(tmp_path)


def test_retries_bridge_a_short_fault(s3: S3, tmp_path: Path) -> None:
    ds, seen = stream(s3), []
    back = threading.Timer(0.5, lambda: s3.proxy.set(mode="work"))
    for row in ds:
        seen.append(row["id"])
        if len(seen) == 100:
            s3.proxy.set(mode="gone")
            back.start()
    back.join()
    assert seen == local_ids(tmp_path)


def test_the_number_of_retries_is_an_option_and_is_named(s3: S3) -> None:
    ds = stream(s3, AT_ONCE | {"client_max_retries": "1"})
    _, error = break_off(s3, ds, "throttle")
    assert "after 1 retries, max_retries: 1" in str(error)


@pytest.mark.parametrize("version", [None, 1])
@pytest.mark.parametrize("mode", ["gone", "refuse"])
def test_opening_without_the_server_does_not_blame_the_table(
    s3: S3, mode: str, version: int | None
) -> None:
    s3.proxy.set(mode=mode)
    with pytest.raises((ValueError, OSError), match=r"pets\.lance' cannot be opened") as error:
        stream(s3, AT_ONCE, version=version)
    assert not isinstance(error.value, FileNotFoundError)
