"""Credentials stay where they belong; what users and states say reaches Lance as values only."""

import contextlib
import io
import logging
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import cloudpickle
import datasets
import dill
import lance
import lancedb
import pyarrow as pa
import pytest
from helpers import ids, make_table, through_json
from stores import KEY, SECRET, Store

import hf_lance_stream as hls
from hf_lance_stream.credentials import (
    bare_uri,
    hide,
    hide_in_error,
    is_secret,
    public_uri,
    redacted,
    secret_texts,
    without_secrets,
)
from hf_lance_stream.lance_errors import reason_of
from hf_lance_stream.processes import ByDill

SHUFFLED: dict[str, Any] = {"num_splits": 4, "shuffle_seed": 1, "shuffle_clump_size": 8}
USER, PASSWORD, SIGNATURE = "some-user", "the-password", "the-signature"
PLAIN = {"timeout": "20s", "aws_endpoint": "http://host:9000", "aws_region": "us-east-1"}
SWITCHES = {"aws_skip_signature": "true", "google_skip_signature": "1", "use_emulator": "false"}
SECRETS = {
    "aws_access_key_id": "AKIA0123456789",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "secret_access_key": SECRET,
    "aws_session_token": SECRET,
    "azure_storage_account_key": SECRET,
    "azure_storage_sas_key": SECRET,
    "sas_token": SECRET,
    "azure_client_secret": SECRET,
    "bearer_token": SECRET,
    "google_service_account_key": SECRET,
    "hf_token": SECRET,
    "api_key": SECRET,
    "password": SECRET,
    "connection_string": SECRET,
    "aws_endpoint": f"http://{USER}:{PASSWORD}@host",
    "proxy_url": f"http://{USER}:{PASSWORD}@host:80",
}


# What is secret.


@pytest.mark.parametrize(("name", "value"), SECRETS.items())
def test_an_option_with_a_credential_is_secret(name: str, value: str) -> None:
    assert is_secret(name, value)
    assert without_secrets({name: value, **SWITCHES}) == SWITCHES
    assert redacted({name: value}) == {name: "***"}


@pytest.mark.parametrize(("name", "value"), {**PLAIN, **SWITCHES}.items())
def test_an_option_without_a_credential_is_kept(name: str, value: str) -> None:
    assert not is_secret(name, value)
    assert redacted({name: value}) == {name: value}


URIS = [
    (f"s3://{USER}:{PASSWORD}@bucket/x.lance", "s3://bucket/x.lance", "s3://bucket/x.lance"),
    (f"http://{PASSWORD}@host/x.lance", "http://host/x.lance", "http://host/x.lance"),
    (
        f"az://c/x.lance?sv=2020&sig={SIGNATURE}",
        "az://c/x.lance?sv=2020&sig=***",
        "az://c/x.lance?sv=2020",
    ),
    (
        f"https://h/x.lance?X-Amz-Signature={SIGNATURE}",
        "https://h/x.lance?X-Amz-Signature=***",
        "https://h/x.lance",
    ),
    (
        f"https://h/x.lance?access%5Ftoken={SIGNATURE}&a=1",
        "https://h/x.lance?access%5Ftoken=***&a=1",
        "https://h/x.lance?a=1",
    ),
]


def test_odd_places_of_secrets_are_known() -> None:
    assert public_uri(f"s3://b/t.lance#token={SIGNATURE}") == "s3://b/t.lance#token=***"
    assert redacted({5: PASSWORD}) == {5: "***"}
    with pytest.raises(ValueError, match="storage_options") as caught:
        hls.from_lance("s3://b/t.lance", storage_options={5: PASSWORD})
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(("uri", "public", "bare"), URIS)
def test_secrets_of_a_uri_are_hidden_in_texts_and_left_out_of_pickles(
    uri: str, public: str, bare: str
) -> None:
    assert public_uri(uri) == public
    assert public_uri(f"no table at '{uri}', nor {uri}") == f"no table at '{public}', nor {public}"
    assert bare_uri(uri) == bare
    assert secret_texts(uri, None) & {PASSWORD, SIGNATURE}


@pytest.mark.parametrize(
    "uri",
    [
        "s3+ddb://bucket/x.lance?ddbTableName=commits",
        "abfss://container@account.dfs.core.windows.net/x.lance",
        "hf://datasets/user/repo@v1/x.lance",
        "/data/some@place/x.lance",
        "file:///data/some@place/x.lance",
        "C:/data/x.lance",
    ],
)
def test_a_uri_without_secrets_stays_as_it_is(uri: str) -> None:
    assert public_uri(uri) == bare_uri(uri) == uri
    assert secret_texts(uri, PLAIN | SWITCHES) == set()


def test_secrets_are_hidden_in_a_whole_chain_of_errors() -> None:
    first, second = ValueError(f"1 {SECRET}"), OSError(f"2 {SECRET}", 3)
    second.__cause__, first.__context__ = first, second  # it may even be a ring
    hide_in_error(second, {SECRET})
    assert (str(first), second.args) == ("1 ***", ("2 ***", 3))
    assert hide("a secret%2Ftext", secret_texts("", {"key": "secret/text"})) == "a ***"


# Where no secret may be.


class Watched:
    """A table in a store that asks for credentials, and all texts that a dataset of it makes."""

    def __init__(self, store: Store, **options: Any) -> None:
        self.store = store
        self.options = {**store.options, "api_key": SECRET}
        self.ds = hls.from_lance(
            store.uri("pets.lance"), storage_options=self.options, **SHUFFLED, **options
        )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    make_table(path / "pets.lance", 100, 50, ["id", "text"])
    return path


@pytest.fixture
def watched(directory: Path) -> Iterator[Watched]:
    with Store(directory, "az") as store:
        yield Watched(store)


def assert_no_secret(text: str | bytes) -> None:
    text = text if isinstance(text, bytes) else text.encode()
    for secret in (SECRET, KEY, PASSWORD, SIGNATURE):
        assert secret.encode() not in text


def test_no_secret_is_in_a_state_a_repr_or_a_description(watched: Watched) -> None:
    ds = watched.ds
    loader = hls.stateful_dataloader(ds, batch_size=8)
    next(iter(loader))
    (table,) = ds._ex_iterable.source.tables
    states = [ds.state_dict(), loader.state_dict(), hls.merge_state_dicts([loader.state_dict()])]
    for thing in (*states, ds, ds.describe(), ds.stats(), ds.info, ds.features, table):
        assert_no_secret(f"{thing!r} {thing}")
    assert_no_secret(repr(ds._ex_iterable.source))
    assert_no_secret(repr(vars(ds.info)))


def broken(change: dict[str, Any], status: int = 0) -> Callable[[Watched], Any]:
    def call(watched: Watched) -> Any:
        watched.store.status = status
        arguments = {"storage_options": watched.options, **SHUFFLED, **change}
        return hls.from_lance(arguments.pop("source", watched.store.uri("pets.lance")), **arguments)

    return call


def reading(watched: Watched) -> Any:
    watched.store.status = 403
    return list(watched.ds)


def unpickled(watched: Watched) -> Any:
    return list(pickle.loads(pickle.dumps(watched.ds)))


def with_load_dataset(**options: Any) -> Callable[[Watched], Any]:
    def call(watched: Watched) -> Any:
        return datasets.load_dataset(
            "lance_stream", streaming=True, storage_options=watched.options, **options
        )

    return call


BAD: dict[str, Callable[[Watched], Any]] = {
    "refused": broken({}, 403),
    "refused at a version": broken({"version": 1}, 403),
    "silent": broken({}, 503),
    "no table": broken({"source": "az://container/none.lance"}),
    "no version": broken({"version": 9}),
    "no tag": broken({"version": "none"}),
    "bad filter": broken({"filter": "none > 1"}),
    "no column": broken({"columns": ["none"]}),
    "no str": broken({"storage_options": {"api_key": SECRET, "timeout": 3}}),
    "no dict": broken({"storage_options": [f"api_key={SECRET}"]}),
    "a str": broken({"storage_options": f'{{"api_key": "{SECRET}"}}'}),
    "another key": broken({"storage_options": {"azure_storage_account_key": SECRET + "!"}}),
    "bad option": broken({"storage_options": {"aws_endpoint": f"http://u:{PASSWORD}@[::"}}),
    "user in the uri": broken({"source": f"s3://u:{PASSWORD}@b/x.lance", "version": 3}),
    "no such scheme": broken({"source": f"foo://u:{PASSWORD}@b/x.lance?sig={SIGNATURE}"}),
    "parameter": broken({"source": f"az://container/x.lance?sig={SIGNATURE}"}),
    "list": broken({"source": [f"foo://u:{PASSWORD}@b/x.lance"] * 2}),
    "reading": reading,
    "unpickled": unpickled,
    "glob": with_load_dataset(data_files=f"s3://u:{PASSWORD}@b/*.lance"),
    "database": with_load_dataset(data_dir=f"s3://u:{PASSWORD}@b/db"),
    "data files": with_load_dataset(data_files=f"foo://u:{PASSWORD}@b/x.lance"),
}


@pytest.mark.parametrize("bad", BAD)
def test_no_secret_is_in_an_error_nor_in_the_errors_behind_it(
    watched: Watched, bad: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fast = {"client_max_retries": "0", "timeout": "2s", "connect_timeout": "1s"}
    watched.options |= fast | {"aws_region": "us-east-1", "aws_endpoint": "http://127.0.0.1:9"}
    with pytest.raises((ValueError, OSError)) as error:
        BAD[bad](watched)
    assert_no_secret("".join(traceback.format_exception(error.value)))
    assert_no_secret(caplog.text)


def test_no_secret_is_logged(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ds = hls.from_lance(
        watched.store.uri("pets.lance"),
        storage_options=watched.options,
        num_splits=7,
        filter="id > 4",
    )
    list(ds.filter(lambda row: True).with_format("torch"))
    list(hls.stateful_dataloader(ds, batch_size=4))
    assert "rows are left out" in caplog.text
    assert_no_secret(caplog.text)


def test_no_secret_is_in_the_cache_of_a_map_style_dataset(watched: Watched, tmp_path: Path) -> None:
    ds = datasets.load_dataset(
        "lance_stream",
        data_files=watched.store.uri("pets.lance"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
        storage_options=watched.options,
    )
    assert ids(ds) == list(range(100))
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert_no_secret(str(path))
        assert_no_secret(path.read_bytes())


def test_the_reason_of_an_error_is_its_first_line_without_secrets() -> None:
    error = ValueError(f"no s3://u:{PASSWORD}@b/x, /a/b.rs:3:4\nand more")
    assert reason_of(error) == "no s3://b/x"


def test_a_state_holds_the_bare_name_of_a_table_with_a_password() -> None:
    from hf_lance_stream.table import Table

    table = Table(f"s3://{USER}:{PASSWORD}@bucket/x.lance?sig={SIGNATURE}", 3)
    assert table.name == "s3://bucket/x.lance?sig=***"
    assert repr(table) == "Table('s3://bucket/x.lance?sig=***', version=3)"


# Pickles.

PICKLERS: dict[str, Callable[[Any], bytes]] = {
    "pickle": pickle.dumps,
    "dill": dill.dumps,
    "cloudpickle": cloudpickle.dumps,
    "ForkingPickler": lambda thing: bytes(
        multiprocessing.reduction.ForkingPickler.dumps(thing)  # that of a Queue
    ),
    "a function over it": lambda thing: dill.dumps(lambda: thing, recurse=True),
    "ByDill": lambda thing: pickle.dumps(ByDill(lambda: thing)),
}
MADE_OF_IT: dict[str, Callable[[Any], Any]] = {
    "dataset": lambda ds: ds,
    "map": lambda ds: ds.map(dict),
    "source": lambda ds: ds._ex_iterable.source,
}


@pytest.mark.parametrize("made", MADE_OF_IT)
@pytest.mark.parametrize("pickler", PICKLERS)
def test_a_pickle_holds_secrets_only_when_asked(directory: Path, pickler: str, made: str) -> None:
    with Store(directory, "az") as store:
        thing = MADE_OF_IT[made](Watched(store).ds)
        pickled = PICKLERS[pickler](thing)
        assert_no_secret(pickled)
        assert b"azure_endpoint" in pickled  # it is no secret, and of use
        thing = MADE_OF_IT[made](Watched(store, pickle_credentials=True).ds)
        assert KEY.encode() in PICKLERS[pickler](thing)


def _handle(store: Store, options: dict[str, str], **more: Any) -> Any:
    handle = lance.dataset(store.uri("pets.lance"), storage_options=options)
    return hls.from_lance(handle, **SHUFFLED, **more)


def _lancedb_table(store: Store, options: dict[str, str], **more: Any) -> Any:
    db = lancedb.connect("az://container", storage_options=options)
    return hls.from_lance(db.open_table("pets"), **SHUFFLED, **more)


def _load_dataset(store: Store, options: dict[str, str], **more: Any) -> Any:
    return datasets.load_dataset(
        "lance_stream",
        data_files=store.uri("pets.lance"),
        storage_options=options,
        streaming=True,
        split="train",
        **SHUFFLED,
        **more,
    )


@pytest.mark.parametrize("build", [_handle, _lancedb_table, _load_dataset])
def test_the_options_of_whatever_was_given_follow_the_same_rule(
    directory: Path, build: Callable[..., Any]
) -> None:
    with Store(directory, "az") as store:
        ds = build(store, store.options)
        assert ids(ds) == ids(hls.from_lance(str(directory / "pets.lance"), **SHUFFLED))
        assert_no_secret(pickle.dumps(ds))
        asked = build(store, store.options, pickle_credentials=True)
        assert KEY.encode() in pickle.dumps(asked)
        assert ids(pickle.loads(pickle.dumps(asked))) == ids(ds)


def test_a_pickle_without_credentials_says_so_where_the_table_is_refused(watched: Watched) -> None:
    rows = iter(watched.ds)
    seen = [row["id"] for row in islice(rows, 3)]
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(watched.ds))))
    hint = (
        r"pets\.lance.*its credentials \(azure_storage_account_key, api_key\) were not in the "
        r"pickle: set them in the environment .*pickle_credentials=True"
    )
    with pytest.raises(OSError, match=hint):
        list(again)
    assert seen + [row["id"] for row in rows] == ids(watched.ds)  # which goes on reading


def _read_in_child(ds: Any, answers: Any) -> None:
    answers.put(([row["id"] for row in ds], SECRET.encode() in pickle.dumps(ds)))


def test_a_child_that_is_being_started_gets_the_credentials_and_passes_them_to_nobody(
    watched: Watched,
) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=_read_in_child, args=(watched.ds, answers))
    child.start()
    found, has_secret = answers.get(timeout=120)
    child.join(60)
    assert found == ids(watched.ds)
    assert not has_secret
    assert get_spawning_popen() is None
    assert_no_secret(pickle.dumps(watched.ds))  # and it was for that moment only


def test_a_collate_function_takes_a_dataset_to_workers_with_its_credentials(
    watched: Watched,
) -> None:
    other = watched.ds

    def collate(rows: list[dict[str, Any]]) -> tuple[list[int], int]:
        return [row["id"] for row in rows], sum(1 for _ in other)

    loader = hls.stateful_dataloader(watched.ds, 50, num_workers=1, collate_fn=collate)
    found = list(loader)
    assert [n for _, n in found] == [100, 100]
    assert [i for part, _ in found for i in part] == ids(watched.ds)


# Names and paths.

NAMES = [
    'a"; DROP TABLE x; --',
    "it's",
    "a b",
    "a\nb",
    "ümlaut 表 🎉",
    "select",
    "/etc/passwd",
    "%s {0}",
    "-rf",
    "a\\b",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_any_name_is_read_by_that_name(tmp_path: Path, name: str) -> None:
    path = make_table(tmp_path / "t.lance", 300, 100, extra={name: pa.array(range(300))})
    for columns in (None, [name], ["id", name]):
        for order in ({}, SHUFFLED):
            rows = list(hls.from_lance(path, columns=columns, **order))
            assert sorted(row[name] for row in rows) == list(range(300))
    with pytest.raises(ValueError, match="`columns` names"):
        hls.from_lance(path, columns=[f"{name}; DROP"])
    assert lance.dataset(path).count_rows() == 300


def test_a_column_that_lance_cannot_read_is_refused_by_name(tmp_path: Path) -> None:
    """Lance 14 writes a column with a backtick in its name, and does not find it again."""
    path = make_table(tmp_path / "t.lance", 10, 10, extra={"a`b": pa.array(range(10))})
    with pytest.raises(Exception, match="a`b"):
        lance.dataset(path).to_table()
    for columns in (None, ["id", "a`b"]):
        with pytest.raises(ValueError, match=r"'a`b' has a backtick .* rename it"):
            hls.from_lance(path, columns=columns)
    assert ids(hls.from_lance(path, columns=["id"])) == list(range(10))


DIRECTORIES = [
    "a b", "it's", 'a"b', "a#b", "a?b=c&token=abcdef", "a%20b", "ümlaut 表 🎉", "-rf", "a;b",
    "$(touch x)", "a&b", "a+b", "[ab]", "a@b:c",
]  # fmt: skip


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_table_is_found_in_a_directory_of_any_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    path = make_table(tmp_path / name / "t.lance", 20, 10)
    assert ids(hls.from_lance(path)) == list(range(20))
    ds = hls.from_lance(path, **SHUFFLED)
    state = through_json(ds.state_dict())
    assert state["examples_iterable"]["fingerprint"]["table"] == path
    new = pickle.loads(pickle.dumps(ds))
    new.load_state_dict(state)
    assert ids(new) == ids(ds)
    monkeypatch.chdir(tmp_path)
    assert ids(hls.from_lance(f"{name}/t.lance")) == list(range(20))
    assert ids(hls.from_lance(f"{name}/../{name}/t.lance")) == list(range(20))
    assert not (tmp_path / "x").exists()


def test_a_table_of_a_database_cannot_be_named_out_of_it(tmp_path: Path) -> None:
    make_table(tmp_path / "private.lance", 5, 5)
    (tmp_path / "db").mkdir()
    make_table(tmp_path / "db" / "pets.lance", 5, 5)
    for name in ("../private", "../private.lance", str(tmp_path / "private"), "pets/../../private"):
        with pytest.raises(FileNotFoundError, match="has no table"):
            datasets.load_dataset(
                "lance_stream", data_dir=str(tmp_path / "db"), table=name, streaming=True
            )


FILTERS = [
    "id > 5; DROP TABLE x", "id > 5; SELECT 1", "1 = 1 -- '", "id > (SELECT max(id) FROM x)",
    "'; --", "id IN (SELECT 1)", "\x00", "id > 5\n;", ")", "🎉",
]  # fmt: skip


@pytest.mark.parametrize("filter", FILTERS)
def test_a_filter_selects_rows_or_is_refused_and_changes_nothing(table: str, filter: str) -> None:
    before = sorted(p.name for p in Path(table).rglob("*"))
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(ValueError):
        assert len(hls.from_lance(table, filter=filter)) <= 1000
    assert sorted(p.name for p in Path(table).rglob("*")) == before
    assert len(hls.from_lance(table)) == 1000
