"""Faults of storage: what comes before one comes, it is named, and the last state goes on after it.

Each fault is made on the real files of a table. Object stores: `test_object_store`.
"""

import contextlib
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest
from helpers import ids, make_table, through_json

import hf_lance_stream as hls

ROWS = 1000  # in fragments of 250, of which a fault damages that of the rows 500 to 749
ORDERS: dict[str, dict[str, Any]] = {
    "natural": {},
    "shuffled": {"num_splits": 4, "shuffle_seed": 1, "shuffle_clump_size": 8},
}
PLACE = r" of {path} at version 1, in fragment 2 \(rows 500 to 749, files: {file}\): "
LIMIT = 30  # seconds that an error may take to come; a hang takes longer


# The faults.


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def delete(file: Path) -> None:
    file.unlink()


def put_directory_in_its_place(file: Path) -> None:
    file.unlink()
    file.mkdir()


def put_another_file_in_its_place(file: Path) -> None:
    file.write_bytes(b"no Lance file at all" * 100)


def damage_end(file: Path) -> None:
    flip(file, file.stat().st_size - 3)


def flip(file: Path, place: int, mask: int = 255) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= mask
    file.write_bytes(content)


FAULTS: dict[Callable[[Path], None], str] = {
    truncate: "fill whole buffer.*restore it and go on from the last state",
    empty: "fill whole buffer.*restore it and go on from the last state",
    delete: "[Nn]ot found.*tag the versions",
    put_directory_in_its_place: "Is a directory",
    put_another_file_in_its_place: "restore it and go on from the last state",
    damage_end: "restore it and go on from the last state",
}


class Victim:
    """A table with a file that a fault damages, and as it was before."""

    def __init__(self, directory: Path) -> None:
        self.path = make_table(directory / "pets.lance", ROWS, 250, ["id", "text"])
        name = lance.dataset(self.path).get_fragments()[2].metadata.files[0].path
        self.file = Path(self.path) / "data" / name
        self._good = directory / "good"
        shutil.copytree(self.path, self._good)

    def error(self, what: str, reason: str) -> "re.Pattern[str]":
        place = PLACE.format(path=re.escape(self.path), file=re.escape(self.file.name))
        return re.compile(f"could not read {what}{place}.*{reason}", re.DOTALL)

    def restore(self) -> None:
        shutil.rmtree(self.path)
        shutil.copytree(self._good, self.path)


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path)


def until_error(rows: Any) -> tuple[list[Any], Exception]:
    """What comes before an error, and the error, which comes in bounded time."""
    seen: list[Any] = []
    begin = time.monotonic()

    def read() -> None:
        for row in rows:
            seen.append(row)

    with pytest.raises(OSError, match="could not read") as caught:
        read()
    assert time.monotonic() - begin < LIMIT
    return seen, caught.value


# A data file.


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_damaged_file_is_named_at_its_first_row_and_the_state_goes_on_after_it(
    victim: Victim, fault: Callable[[Path], None], order: str
) -> None:
    def build() -> Any:
        return hls.from_lance(victim.path, **ORDERS[order])

    whole = ids(build())
    first = next(i for i in whole if 500 <= i < 750)
    fault(victim.file)
    ds = build()
    seen, error = until_error(ds)
    assert [row["id"] for row in seen] == whole[: whole.index(first)]  # no row before it is lost
    assert victim.error(f"row {first}", FAULTS[fault]).match(str(error)), error
    state = through_json(ds.state_dict())
    again, _ = until_error(_loaded(build(), state))
    assert again == []

    victim.restore()
    assert [row["id"] for row in seen] + ids(_loaded(build(), state)) == whole
    assert [row["id"] for row in seen] + ids(_loaded(ds, state)) == whole  # the same dataset too


def _loaded(ds: Any, state: Any) -> Any:
    ds.load_state_dict(state)
    return ds


READERS: dict[str, Callable[[Any], Any]] = {
    "torch rows": lambda ds: ds.with_format("torch"),
    "arrow tables": lambda ds: ds.with_format("arrow").iter(10),
    "batches": lambda ds: ds.iter(10),
    "batched map": lambda ds: ds.map(lambda batch: batch, batched=True, batch_size=7),
    "loader": lambda ds: hls.stateful_dataloader(ds, batch_size=10),
    "arrow map": lambda ds: ds.with_format("arrow").map(lambda t: t, batched=True, batch_size=7),
    "chunks": lambda ds: ds._ex_iterable.iter_arrow(),
    "select_columns": lambda ds: ds.select_columns(["id"]),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_gets_the_row_named(victim: Victim, reader: str, order: str) -> None:
    whole = ids(hls.from_lance(victim.path, **ORDERS[order]))
    first = next(i for i in whole if 500 <= i < 750)
    ds = hls.from_lance(victim.path, **ORDERS[order])
    put_directory_in_its_place(victim.file)
    _, error = until_error(READERS[reader](ds))
    assert victim.error(f"row {first}", "Is a directory").match(str(error)), error


def test_the_file_of_one_column_does_not_matter_to_a_reader_of_others(victim: Victim) -> None:
    table = lance.dataset(victim.path)
    old = {f.path for fragment in table.get_fragments() for f in fragment.metadata.files}
    table.add_columns({"more": "id + 1"})
    ds = hls.from_lance(victim.path)
    for name in os.listdir(victim.file.parent):
        if name not in old:
            delete(victim.file.parent / name)
    assert ids(hls.from_lance(victim.path, columns=["id", "text"])) == list(range(ROWS))
    _, error = until_error(ds)
    assert "could not read row 0 of" in str(error)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_a_loader_ends_with_the_error_and_its_state_goes_on(
    victim: Victim, order: str, num_workers: int
) -> None:
    def build() -> Any:
        ds = hls.from_lance(victim.path, **ORDERS[order])
        return hls.stateful_dataloader(ds, batch_size=8, num_workers=num_workers)

    whole = ids(hls.from_lance(victim.path, **ORDERS[order]))
    first = next(i for i in whole if 500 <= i < 750)
    delete(victim.file)
    loader, seen, states = build(), [], []

    def batches() -> Iterator[Any]:
        for batch in loader:
            states.append(through_json(loader.state_dict()))
            seen.extend(batch["id"].tolist())
            yield batch

    _, error = until_error(batches())
    assert victim.error(f"row {first}", "[Nn]ot found").search(str(error)), error
    assert seen == whole[: len(seen)]
    assert whole.index(first) - len(seen) < 8  # all batches before the row came
    del loader  # ends the workers

    victim.restore()
    loader = build()
    if states:
        loader.load_state_dict(states[-1])
    assert seen + [i for batch in loader for i in batch["id"].tolist()] == whole


def test_a_script_whose_workers_meet_a_fault_ends_with_the_error(victim: Victim) -> None:
    script = """
import sys, hf_lance_stream as hls
if __name__ == "__main__":
    loader = hls.stateful_dataloader(hls.from_lance(sys.argv[1]), batch_size=8, num_workers=2)
    for batch in loader:
        pass
"""
    delete(victim.file)
    done = _run(script, victim.path)
    assert done.returncode == 1, done.stderr
    assert victim.error("row 500", "[Nn]ot found").search(done.stderr), done.stderr


def _run(script: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    path = Path(arguments[0]).parent / "script.py"
    path.write_text(script)
    return subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        **options,
    )


def test_a_fault_that_has_passed_is_not_noticed(victim: Victim) -> None:
    """A read that fails once and then works: for rows, and for Arrow tables."""
    for make in (lambda ds: ds, lambda ds: ds.with_format("arrow")):
        ds = hls.from_lance(victim.path)
        source, fails = ds._ex_iterable.source, [True]
        table = source.tables[0]
        _ = source.row_bytes

        def once(read: Any, offsets: Any, table: Any = table, fails: Any = fails) -> Any:
            if fails and offsets.max() > 500:
                fails.clear()
                raise OSError("a fault")
            return type(table)._read(table, read, offsets)

        object.__setattr__(table, "_read", once)
        found = [np.asarray(row["id"]).reshape(-1) for row in make(ds)]
        assert not fails
        assert np.concatenate(found).tolist() == list(range(ROWS))


def test_flipped_bits_give_other_values_or_a_named_error_and_nothing_else(victim: Victim) -> None:
    """Lance has no checksums: what still decodes is read as it is. The README says so."""
    good, draw, outcomes = victim.file.read_bytes(), random.Random(0), Counter[str]()
    others = {i for i in range(ROWS) if not 500 <= i < 750}
    for _ in range(80):
        victim.file.write_bytes(good)
        flip(victim.file, draw.randrange(len(good) - FOOTER), 1 << draw.randrange(8))
        outcome, found = _read(victim)
        outcomes[outcome] += 1
        assert outcome == "error" or others <= found  # the fault stays in its fragment
    assert {*outcomes} == {"read", "error"}
    assert outcomes["error"] >= 10, outcomes


FOOTER = 40
"""Bytes at the end of a file; with some of them changed Lance wants memory that no machine has."""


def _read(victim: Victim) -> tuple[str, set[int]]:
    """What became of reading the table, and the ids of the rows that are as they were."""
    begin, found = time.monotonic(), set()
    error = None
    try:
        for row in hls.from_lance(victim.path, **ORDERS["shuffled"]):
            if row["text"] == f"text {row['id']}":
                found.add(row["id"])
    except OSError as caught:
        error = caught
    assert time.monotonic() - begin < LIMIT
    assert error is None or victim.error("row \\d+", "").match(str(error)), error
    return "read" if error is None else "error", found


def test_a_panic_of_lance_is_an_error_like_any_other(victim: Victim) -> None:
    """Contract: pyo3's PanicException, which `lance_errors` knows by name, is no Exception."""
    good, panics = victim.file.read_bytes(), []
    for place in range(60, 80):  # where this file has the size of a buffer
        victim.file.write_bytes(good)
        flip(victim.file, place)
        try:
            lance.dataset(victim.path).take([*range(500, 750, 7)])
        except Exception:
            continue
        except BaseException as error:
            panics.append(type(error).__name__)
            assert _read(victim)[0] == "error"
            with pytest.raises(OSError, match=r"panicked.*restore it"):
                ids(hls.from_lance(victim.path))
    assert {*panics} == {"PanicException"}


def test_what_is_no_panic_passes(victim: Victim) -> None:
    table = hls.from_lance(victim.path)._ex_iterable.source.tables[0]

    def interrupt() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table._read(interrupt, np.array([600]))


def test_workers_that_lance_ends_are_an_error_and_the_state_goes_on(victim: Victim) -> None:
    """A damaged footer can make Lance ask for 68 GB, and end its process if there are none."""
    flip(victim.file, victim.file.stat().st_size - 13)
    ds = hls.from_lance(victim.path)
    loader = hls.stateful_dataloader(ds, batch_size=50, num_workers=2)
    seen: list[int] = []
    states = []

    def read() -> None:
        for batch in loader:
            seen.extend(batch["id"].tolist())
            states.append(through_json(loader.state_dict()))

    begin = time.monotonic()
    with pytest.raises((RuntimeError, OSError), match=r"worker|could not read"):
        read()
    assert time.monotonic() - begin < LIMIT
    victim.restore()
    loader = hls.stateful_dataloader(hls.from_lance(victim.path), batch_size=50, num_workers=2)
    loader.load_state_dict(states[-1] if states else {})
    assert seen + [i for batch in loader for i in batch["id"].tolist()] == list(range(ROWS))


# The manifest.


def manifest_of(path: str) -> Path:
    return next((Path(path) / "_versions").glob("*.manifest"))


@pytest.mark.parametrize("fault", [truncate, empty, delete, put_directory_in_its_place])
@pytest.mark.parametrize("version", [None, 1])
def test_a_damaged_manifest_is_an_error_when_the_dataset_is_made(
    victim: Victim, fault: Callable[[Path], None], version: int | None
) -> None:
    fault(manifest_of(victim.path))
    begin = time.monotonic()
    with pytest.raises((ValueError, OSError), match=re.escape(victim.path)) as error:
        hls.from_lance(victim.path, version=version)
    assert version is None or " 1" in str(error.value)
    assert time.monotonic() - begin < LIMIT
    victim.restore()
    assert len(hls.from_lance(victim.path)) == ROWS


def test_a_manifest_with_flipped_bits_is_refused_or_read(victim: Victim) -> None:
    manifest, draw = manifest_of(victim.path), random.Random(0)
    good, outcomes = manifest.read_bytes(), Counter[str]()
    for _ in range(150):
        manifest.write_bytes(good)
        flip(manifest, draw.randrange(len(good)), 1 << draw.randrange(8))
        try:
            _ = list(hls.from_lance(victim.path, columns=["id"], **ORDERS["shuffled"]))
            outcomes["read"] += 1  # perhaps with other values: manifests have no checksum either
        except (ValueError, OSError):
            outcomes["refused"] += 1
    assert outcomes["refused"] >= 10, outcomes


@pytest.mark.parametrize("order", ORDERS)
def test_a_manifest_that_is_gone_in_mid_epoch_does_not_matter(victim: Victim, order: str) -> None:
    ds = hls.from_lance(victim.path, **ORDERS[order])
    whole, seen = ids(ds), []
    for row in ds:
        seen.append(row["id"])
        if len(seen) == 10:
            shutil.rmtree(Path(victim.path) / "_versions")
    assert seen == whole


def test_a_manifest_that_is_gone_when_workers_start_is_named(victim: Victim) -> None:
    loader = hls.stateful_dataloader(hls.from_lance(victim.path), batch_size=8, num_workers=2)
    manifest_of(victim.path).unlink()
    begin = time.monotonic()
    with pytest.raises(OSError, match=rf"{re.escape(victim.path)}' has no version 1"):
        next(iter(loader))
    assert time.monotonic() - begin < LIMIT
    victim.restore()
    assert sum(len(batch["id"]) for batch in loader) == ROWS


# Rights.


AS_NOBODY = """
import os, sys
import hf_lance_stream as hls
readable, *others = sys.argv[1:]
for row in hls.from_lance(readable):  # imports all, from where nobody may read perhaps
    pass
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for path in others:
    seen = 0
    try:
        for row in hls.from_lance(path):
            seen += 1
    except OSError as error:
        print(seen, error)
"""


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that every user may read, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_what_may_not_be_read_is_named(open_path: Path) -> None:
    readable = make_table(open_path / "readable.lance", 10, 10)
    victims = []
    for name in ("file", "directory", "versions"):
        (open_path / name).mkdir(mode=0o755)
        victims.append(Victim(open_path / name))
    closed = [victims[0].file, Path(victims[1].path), Path(victims[2].path) / "_versions"]
    for path in closed:
        path.chmod(0)
    done = _run(AS_NOBODY, readable, *(victim.path for victim in victims))
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done
    error = victims[0].error("row 500", "ermission denied.*change its permissions")
    assert lines[0].startswith("500 "), done
    assert error.search(lines[0])
    for victim, line in zip(victims[1:], lines[1:], strict=True):
        place = re.escape(repr(victim.path))
        assert re.match(rf"0 `source`: {place} .*ermission denied", line), line
    for path in closed:
        path.chmod(0o755)


# The filter.


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_filter_over_a_damaged_file_names_the_fragment(
    victim: Victim, fault: Callable[[Path], None]
) -> None:
    fault(victim.file)
    with pytest.raises(OSError, match="could not read") as error:
        hls.from_lance(victim.path, filter="id > 3")
    assert victim.error("what filter='id > 3' needs", FAULTS[fault]).match(str(error.value))
    victim.restore()
    assert len(hls.from_lance(victim.path, filter="id > 3")) == ROWS - 4


FILTERED: dict[str, Any] = {"filter": "id % 2 = 0", **ORDERS["shuffled"]}


def _where_workers_select(batch: list[dict[str, Any]]) -> tuple[bool, list[int]]:
    """Whether the rows that the filter selects are mapped from a file in this worker."""
    maps = Path("/proc/self/maps").read_text()
    return "hf_lance_stream_" in maps or "/#" in maps, [row["id"] for row in batch]


def _read_in_workers(path: str) -> tuple[set[bool], list[int]]:
    loader = hls.stateful_dataloader(
        hls.from_lance(path, **FILTERED),
        batch_size=10,
        num_workers=2,
        collate_fn=_where_workers_select,
    )
    found = list(loader)
    return {shared for shared, _ in found}, [i for _, batch in found for i in batch]


def _no_warning(caplog: pytest.LogCaptureFixture) -> bool:
    return not [r for r in caplog.records if "filter selects" in r.message]


def test_workers_map_the_selection_of_a_filter_and_leave_no_file(
    victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    shared, found = _read_in_workers(victim.path)
    assert shared == {True}
    assert found == ids(hls.from_lance(victim.path, **FILTERED))
    assert list(temporary.iterdir()) == []
    assert _no_warning(caplog)


@contextlib.contextmanager
def _full_disk(directory: Path) -> Iterator[None]:
    """A file system without room at `directory`, or, where that may not be made, a limit."""
    directory.mkdir()
    size = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(directory)]
    if subprocess.run(size, capture_output=True).returncode == 0:
        try:
            (directory / "all").write_bytes(bytes(4096))
            yield
        finally:
            subprocess.run(["umount", "-l", str(directory)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_said_once_and_workers_apply_the_filter_themselves(
    victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    disk = tmp_path / "full"
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    with _full_disk(disk):
        from hf_lance_stream.selections import SharedSelections

        rows = np.arange(ROWS)
        assert SharedSelections([rows]).reference is None
    assert len(caplog.records) == 1
    assert re.search(rf"{disk} .*(No space|too large).*TMPDIR", caplog.text)
    caplog.clear()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    shared, found = _read_in_workers(victim.path)
    assert shared == {False}
    assert found == ids(hls.from_lance(victim.path, **FILTERED))
    assert caplog.text.count("set TMPDIR") == 1  # for two workers


def test_a_selection_is_not_taken_from_another_file(tmp_path: Path) -> None:
    from hf_lance_stream.selections import SharedSelections

    rows = [np.arange(5), np.empty(0, dtype=np.int64), np.arange(3) * 7]
    shared = SharedSelections(rows)
    reference = shared.reference
    assert reference is not None
    assert [part.tolist() for part in reference.open() or []] == [part.tolist() for part in rows]
    other = SharedSelections(rows).reference
    assert other is not None
    assert type(reference)(reference.path, other.mark, reference.sizes).open() is None
    assert type(reference)(reference.path, reference.mark, (5, 0, 4)).open() is None
    (tmp_path / "short").write_bytes(b"odd")
    (tmp_path / "empty").touch()
    for name in ("short", "empty", "missing"):
        assert type(reference)(str(tmp_path / name), reference.mark, reference.sizes).open() is None
    del shared
    assert reference.open() is None
