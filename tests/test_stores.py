"""Tables in Azure, in Google's store and on the Hub, read by Lance's own clients over real HTTP.

Amazon's store has a file of its own, `test_object_store`.
"""

import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import lance
import pytest
from helpers import ids, make_table, through_json
from stores import DIALECTS, KEY, SECRET, Store

import hf_lance_stream as hls

ROWS = 1000
SHUFFLED: dict[str, Any] = {"num_splits": 8, "shuffle_seed": 3, "shuffle_clump_size": 8}
SMALL_READS: dict[str, Any] = {"columns": ["id"], "read_budget": 4 * 8 * 32}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    make_table(path / "pets.lance", ROWS, 250, ["id", "text"])
    return path


@pytest.fixture(params=DIALECTS)
def store(
    request: pytest.FixtureRequest, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    with Store(directory, request.param) as opened:
        if opened.dialect == "hf":
            monkeypatch.setenv("HF_ENDPOINT", opened.endpoint)
        yield opened


def stream(store: Store, **more: Any) -> Any:
    arguments = {**SHUFFLED, "storage_options": store.options, **more}
    return hls.from_lance(store.uri("pets.lance"), **arguments)


def with_from_lance(store: Store) -> Any:
    return stream(store)


def with_a_handle(store: Store) -> Any:
    handle = lance.dataset(store.uri("pets.lance"), storage_options=store.options)
    return hls.from_lance(handle, **SHUFFLED)


def with_load_dataset(store: Store) -> Any:
    return datasets.load_dataset(
        "lance_stream",
        data_files={"train": store.uri("pets.lance")},
        storage_options=store.options,
        split="train",
        streaming=True,
        **SHUFFLED,
    )


def with_a_database(store: Store) -> Any:
    return datasets.load_dataset(
        "lance_stream",
        data_dir=store.uri("").rstrip("/"),
        table="pets",
        storage_options=store.options,
        split="train",
        streaming=True,
        **SHUFFLED,
    )


@pytest.mark.parametrize(
    "build", [with_from_lance, with_a_handle, with_load_dataset, with_a_database]
)
def test_a_table_is_read_by_its_uri_and_options(store: Store, directory: Path, build: Any) -> None:
    ds = build(store)
    assert ids(ds) == ids(hls.from_lance(str(directory / "pets.lance"), **SHUFFLED))
    assert ds.state_dict()["examples_iterable"]["fingerprint"]["table"] == store.uri("pets.lance")
    (table,) = ds._ex_iterable.source.tables
    assert table.uri == store.uri("pets.lance")
    given = table.storage_options or {}
    if store.dialect == "hf" and build in (with_load_dataset, with_a_database):
        given = {**given}
        assert given.pop("endpoint").startswith("http")  # `datasets` adds its own; Lance has none
    assert given == store.options  # as they were given


FROM_THE_ENVIRONMENT = """
import json, pickle, sys, hf_lance_stream as hls
found = []
for uri, file in zip(sys.argv[1::2], sys.argv[2::2]):
    plain = hls.from_lance(uri, num_splits=8, shuffle_seed=3, shuffle_clump_size=8)
    with open(file, "rb") as pickled:
        found += [[row["id"] for row in ds] for ds in (plain, pickle.load(pickled))]
print(json.dumps(found))
"""


def test_credentials_come_from_the_environment_also_those_that_a_pickle_lacks(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: Lance reads the environment for Azure once in a process."""
    script = tmp_path / "script.py"
    script.write_text(FROM_THE_ENVIRONMENT)
    arguments, environment = [], dict(os.environ)
    with ExitStack() as stack:
        for dialect in DIALECTS:
            store = stack.enter_context(Store(directory, dialect))
            environment |= store.environment
            monkeypatch.setenv("HF_ENDPOINT", store.endpoint)
            pickled = pickle.dumps(stream(store))
            assert SECRET.encode() not in pickled
            assert KEY.encode() not in pickled
            (tmp_path / dialect).write_bytes(pickled)
            arguments += [store.uri("pets.lance"), str(tmp_path / dialect)]
        done = subprocess.run(
            [sys.executable, str(script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    whole = ids(hls.from_lance(str(directory / "pets.lance"), **SHUFFLED))
    assert json.loads(done.stdout) == [whole] * 2 * len(DIALECTS)


def test_workers_read_with_the_options(directory: Path) -> None:
    with Store(directory, "az") as store:
        loader = hls.stateful_dataloader(stream(store), batch_size=40, num_workers=2)
        found = [i for batch in loader for i in batch["id"].tolist()]
    assert found == ids(hls.from_lance(str(directory / "pets.lance"), **SHUFFLED))


@pytest.mark.parametrize("status", [403, 404, 503])
def test_what_the_store_answers_is_in_the_error_when_it_is_opened(
    store: Store, status: int
) -> None:
    store.status = status
    begin = time.monotonic()
    with pytest.raises((ValueError, OSError), match=re.escape(store.uri("pets.lance"))) as error:
        stream(store)
    assert re.search(rf"{status}|not found", str(error.value), re.IGNORECASE)
    assert SECRET not in str(error.value)
    assert KEY not in str(error.value)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("status", [403, 503])
def test_a_fault_in_mid_epoch_is_named_and_the_state_goes_on_after_it(
    store: Store, directory: Path, status: int
) -> None:
    whole = ids(hls.from_lance(str(directory / "pets.lance"), **SHUFFLED))
    ds = stream(store, **SMALL_READS)
    rows = iter(ds)
    seen = [row["id"] for row in islice(rows, 100)]
    store.status = status
    begin = time.monotonic()

    def read() -> None:
        for row in rows:
            seen.append(row["id"])

    uri = re.escape(store.uri("pets.lance"))
    with pytest.raises(OSError, match=rf"could not read row \d+ of {uri} at version 1, in frag"):
        read()
    assert time.monotonic() - begin < 30
    state = through_json(ds.state_dict())
    store.status = 0
    new = stream(store, **SMALL_READS)
    new.load_state_dict(state)
    assert seen + ids(new) == whole
