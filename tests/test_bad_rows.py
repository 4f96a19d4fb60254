"""Rows that cannot be cast, decoded or transformed: named, or replaced by others exactly."""

import io
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Features, Image, Value
from helpers import cut, ids, make_table, through_json
from PIL import Image as PILImage

import hf_lance_stream as hls
from hf_lance_stream.bad_rows import BadRowError

ROWS = 200
BAD = {0, 3, 77, 78, 79, 150, 199}
"""Ids of the rows whose image is none."""


def png(number: int) -> bytes:
    """A picture that shows its number."""
    out = io.BytesIO()
    PILImage.new("RGB", (2, 2), (number, 0, 0)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """200 rows with an id and a picture of it, in files of 50 rows; seven pictures are broken."""
    images = [b"\x89PNG no picture" if n in BAD else png(n) for n in range(ROWS)]
    features = Features({"id": Value("int64"), "image": Image()})
    table = pa.table({"id": range(ROWS), "image": [{"bytes": b, "path": None} for b in images]})
    table = table.cast(features.arrow_schema)
    path = tmp_path_factory.mktemp("bad") / "pictures.lance"
    lance.write_dataset(table, str(path), max_rows_per_file=50)
    return str(path)


OPTIONS = {"num_splits": 8, "shuffle_seed": 1, "shuffle_clump_size": 4}


def shown(row: Any) -> tuple[int, int]:
    """The id of a row and what its picture shows, in any format."""
    image = row["image"]
    if isinstance(image, torch.Tensor):
        return int(row["id"]), int(image[0].max())
    return int(row["id"]), int(np.asarray(image)[..., 0].max())


def expected(path: str, **options: Any) -> list[int]:
    """The ids of a pass, where nothing is decoded; None for a bad row."""
    ds = hls.from_lance(path, columns=["id"], **(OPTIONS | options))
    return [None if n in BAD else n for n in ids(ds)]


def check_replaced(seen: list[tuple[int, int]], rows: list[int | None]) -> None:
    """Good rows are at their places, whole; at the others are good rows too."""
    assert len(seen) == len(rows)
    for (found, picture), row in zip(seen, rows, strict=True):
        assert found == picture
        assert found not in BAD
        assert row in (None, found)


# Named.


@pytest.mark.parametrize("form", ["rows", "torch", "map", "iter", "batches of a loader", "batch"])
def test_by_default_a_row_that_cannot_be_decoded_is_named_with_its_row_id(
    pictures: str, form: str
) -> None:
    ds = hls.from_lance(pictures)  # in table order: row 0 is bad
    forms: dict[str, Any] = {
        "rows": lambda: ds,
        "torch": lambda: ds.with_format("torch"),
        "map": lambda: ds.map(lambda row: row),
        "iter": lambda: ds.iter(8),
        "batches of a loader": lambda: hls.stateful_dataloader(ds.with_format("torch"), 8),
        "batch": lambda: ds.with_format("torch").iter(8),
    }
    with pytest.raises(BadRowError, match=r"row 0 \(_rowid 0\) of .*pictures.lance at version 1"):
        next(iter(forms[form]()))


def test_all_rows_before_the_bad_one_come_and_the_state_stands_at_it(pictures: str) -> None:
    ds = hls.from_lance(pictures, filter="id > 3")
    rows = iter(ds)
    seen = [next(rows)["id"] for _ in range(73)]
    assert seen == list(range(4, 77))
    with pytest.raises(BadRowError, match=r"row 77 \(_rowid \d+\).*UnidentifiedImageError"):
        next(rows)
    new = hls.from_lance(pictures, filter="id > 3", on_bad_rows="skip")  # the run goes on
    new.load_state_dict(through_json(ds.state_dict()))
    rest = [shown(row) for row in new]
    check_replaced(rest, [None if n in BAD else n for n in range(77, ROWS)])


def test_the_error_has_the_number_and_the_id_of_the_row_after_deletes(tmp_path: Path) -> None:
    path = make_table(tmp_path / "t.lance", 100, 25)
    lance.dataset(path).delete("id % 2 = 0")
    row_ids = {row["id"]: row["_rowid"] for row in hls.from_lance(path, with_row_id=True)}

    def fail(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": 1 // (row["id"] - 61)}

    with pytest.raises(BadRowError, match=rf"row 30 \(_rowid {row_ids[61]}\).*ZeroDivision") as why:
        list(hls.from_lance(path, filter="id > 20", transform=fail))
    assert isinstance(why.value.__cause__, ZeroDivisionError)


def test_the_error_names_the_table_of_several(tmp_path: Path) -> None:
    paths = [make_table(tmp_path / f"{n}.lance", 10, 5, start=10 * n) for n in range(3)]

    def fail(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": 1 // (row["id"] - 17)}

    with pytest.raises(BadRowError, match=r"row 7 \(_rowid \d+\) of .*1.lance"):
        list(hls.from_lance(paths, transform=fail))


# Replaced.


@pytest.mark.parametrize("on_bad_rows", ["skip", "warn"])
@pytest.mark.parametrize("options", [{}, {"num_splits": None, "shuffle_seed": None}], ids=str)
def test_another_row_is_in_the_place_of_a_bad_one_and_all_are_counted(
    pictures: str, options: dict[str, Any], on_bad_rows: Any
) -> None:
    options = OPTIONS | options
    if options["shuffle_seed"] is None:
        options["shuffle_clump_size"] = None
    ds = hls.from_lance(pictures, on_bad_rows=on_bad_rows, **options)
    rows = expected(pictures, **options)
    assert len(ds) == ROWS
    check_replaced([shown(row) for row in ds], rows)
    assert ds.stats().bad_rows == len(BAD)


def test_every_way_to_read_gives_the_same_rows(pictures: str) -> None:
    ds = hls.from_lance(pictures, on_bad_rows="skip", **OPTIONS)
    plain = [shown(row) for row in ds]
    tensors = ds.with_format("torch")
    with_map = ds.map(lambda row: row | {"twice": 2 * row["id"]})
    only = ds.select_columns(["image"])
    assert [shown(row) for row in tensors] == plain
    assert [shown(row) for row in ds.with_format("numpy")] == plain
    assert [shown(row) for row in with_map] == plain
    assert [row["twice"] for row in with_map] == [2 * n for n, _ in plain]
    assert [shown(row | {"id": 0})[1] for row in only] == [n for n, _ in plain]
    batches = [batch["id"] for batch in ds.iter(7)]
    assert [n for batch in batches for n in batch] == [n for n, _ in plain]
    images = [int(np.asarray(i)[..., 0].max()) for b in ds.batch(7) for i in b["image"]]
    assert images == [n for n, _ in plain]
    arrow = [n for table in ds.with_format("arrow").iter(7) for n in table["id"].to_pylist()]
    assert arrow == [n for n, _ in plain]
    assert ds.stats().bad_rows == len(BAD) * 9


def test_what_is_not_decoded_is_not_bad(pictures: str) -> None:
    ds = hls.from_lance(pictures, on_bad_rows="skip", columns=["id"], **OPTIONS)
    assert sorted(ids(ds)) == list(range(ROWS))
    assert ds.stats().bad_rows == 0


@pytest.mark.parametrize("kind", ["decode", "transform"])
def test_a_resume_anywhere_has_the_same_rows_in_the_place_of_bad_ones(
    pictures: str, kind: str
) -> None:
    def build() -> Any:
        if kind == "decode":
            return hls.from_lance(pictures, on_bad_rows="skip", **OPTIONS)
        return hls.from_lance(
            pictures, columns=["id"], transform=fails_on_bad, on_bad_rows="skip", **OPTIONS
        )

    whole = ids(build())
    for k in [*range(0, ROWS, 9), ROWS]:
        assert cut(build, k) == whole


def fails_on_bad(row: dict[str, Any]) -> dict[str, Any]:
    """A transform that does not like some rows."""
    if row["id"] in BAD:
        raise StopIteration("not this one")
    return {"id": row["id"], "half": row["id"] / 2}


def test_which_row_replaces_a_bad_one_depends_on_seed_epoch_and_row_alone(table: str) -> None:
    """Golden: a change of these rows is a change of the order."""

    def fail(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] in (5, 500):
            raise ValueError
        return row

    def places(**options: Any) -> dict[int, int]:
        bad = hls.from_lance(table, transform=fail, on_bad_rows="skip", **options)
        rows = zip(ids(hls.from_lance(table, **options)), ids(bad), strict=True)
        return {row: other for row, other in rows if row != other}

    assert places() == {5: 506, 500: 118}
    first = places(shuffle_seed=1, num_splits=8)
    assert first == {5: 160, 500: 376}
    assert places(shuffle_seed=1, num_splits=40, shuffle_clump_size=16) == first
    assert places(shuffle_seed=1, epoch=1) == {5: 430, 500: 784}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_have_as_many_rows_and_the_same_ones_together(
    pictures: str, world_size: int
) -> None:
    whole = [shown(row) for row in hls.from_lance(pictures, on_bad_rows="skip", **OPTIONS)]
    parts = [
        [
            shown(row)
            for row in hls.from_lance(
                pictures, on_bad_rows="skip", rank=rank, world_size=world_size, **OPTIONS
            )
        ]
        for rank in range(world_size)
    ]
    assert {len(part) for part in parts} == {ROWS // world_size}
    size = 8 // world_size
    together = [n for c in range(ROWS // 8) for part in parts for n in part[c * size :][:size]]
    assert together == whole


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.parametrize("kind", ["decode", "transform"])
def test_workers_give_the_same_batches_and_count_and_resume(
    pictures: str, kind: str, context: str
) -> None:
    def loader(num_workers: int, resumed: Any = None) -> Any:
        if kind == "decode":
            ds = hls.from_lance(pictures, on_bad_rows="skip", **OPTIONS).with_format("torch")
        else:
            ds = hls.from_lance(
                pictures, columns=["id"], transform=fails_on_bad, on_bad_rows="skip", **OPTIONS
            )
        more = {"multiprocessing_context": context} if num_workers else {}
        made = hls.stateful_dataloader(ds, 16, num_workers=num_workers, **more)
        if resumed is not None:
            made.load_state_dict(through_json(resumed))
        return made

    expected = [batch["id"].tolist() for batch in loader(0)]
    with_workers = loader(2)
    batches, states = [], []
    for batch in with_workers:
        batches.append(batch["id"].tolist())
        states.append(with_workers.state_dict())
    assert batches == expected
    assert with_workers.stats().bad_rows == len(BAD)
    rest = [batch["id"].tolist() for batch in loader(2, states[4])]
    assert rest == expected[5:]


def test_case_32_an_exception_in_a_worker_ends_nothing_in_silence(pictures: str) -> None:
    ds = hls.from_lance(pictures, columns=["id"], transform=fails_on_bad, **OPTIONS)
    loader = hls.stateful_dataloader(ds, 16, num_workers=2)
    with pytest.raises(BadRowError, match=r"(?s)row \d+ \(_rowid \d+\).*StopIteration"):
        list(loader)
    with pytest.raises(BadRowError, match=r"row \d+ \(_rowid \d+\).*StopIteration: not this one"):
        list(ds)


def test_warn_logs_each_row_and_then_only_counts(
    pictures: str, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hf_lance_stream.bad_rows"):
        list(hls.from_lance(pictures, on_bad_rows="warn"))
    assert len(caplog.records) == len(BAD)
    assert "row 0 (_rowid 0)" in caplog.messages[0]
    assert "is in its place" in caplog.messages[0]
    caplog.clear()

    def fail(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] % 10 == 0:
            raise ValueError("a tenth")
        return row

    ds = hls.from_lance(table, transform=fail, on_bad_rows="warn")
    list(ds)
    assert len(caplog.records) == 20
    assert "further ones are only counted" in caplog.messages[-1]
    assert ds.stats().bad_rows == 100
    caplog.clear()
    list(hls.from_lance(pictures, on_bad_rows="skip"))
    assert not caplog.records


@pytest.mark.parametrize("on_bad_rows", ["skip", "warn"])
def test_where_all_rows_are_bad_it_ends_with_an_error(table: str, on_bad_rows: Any) -> None:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("label2")

    ds = hls.from_lance(table, transform=fail, on_bad_rows=on_bad_rows)
    with pytest.raises(BadRowError, match=r"row 0 .*KeyError.*most of the table seems to be bad"):
        next(iter(ds))


def test_a_value_that_cannot_be_cast_to_its_feature_is_a_bad_row(tmp_path: Path) -> None:
    values = pa.array([1000 if n == 30 else n for n in range(100)], pa.int64())
    path = make_table(tmp_path / "t.lance", 100, 25, extra={"value": values})
    features = Features({"id": Value("int64"), "value": Value("int8")})
    with pytest.raises(BadRowError, match=r"row 30 \(_rowid \d+\).*column 'value'"):
        list(hls.from_lance(path, features=features))
    ds = hls.from_lance(path, features=features, on_bad_rows="skip")
    rows = [(row["id"], row["value"]) for row in ds]
    assert [pair for n, pair in enumerate(rows) if n != 30] == [
        (n, n) for n in range(100) if n != 30
    ]
    assert rows[30][0] == rows[30][1] != 30
    assert ds.stats().bad_rows == 1
    assert [t["id"].to_pylist() for t in ds.with_format("arrow").iter(100)] == [
        [n for n, _ in rows]
    ]


def test_a_map_style_dataset_has_the_same_rows(pictures: str) -> None:
    from datasets import load_dataset

    options = {"on_bad_rows": "skip", "data_files": pictures, "split": "train", **OPTIONS}
    streamed = [shown(row) for row in load_dataset("lance_stream", streaming=True, **options)]
    assert [shown(row) for row in load_dataset("lance_stream", **options)] == streamed
    made = load_dataset("lance_stream", streaming=True, transform=fails_on_bad, **options)
    check_replaced([(row["id"], int(2 * row["half"])) for row in made], expected(pictures))
    with pytest.raises(ValueError, match=r"`transform` needs streaming=True"):
        load_dataset("lance_stream", transform=fails_on_bad, **options)


# The transform.


def test_a_transform_gets_decoded_rows_and_later_steps_get_its_rows(pictures: str) -> None:
    def red(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "red": row["image"].getpixel((0, 0))[0]}

    ds = hls.from_lance(pictures, transform=red, on_bad_rows="skip", **OPTIONS)
    assert len(ds) == ROWS
    check_replaced([(row["id"], row["red"]) for row in ds], expected(pictures))
    twice = ds.map(lambda row: {"red": 2 * row["red"]}).with_format("torch")
    assert [(int(row["id"]), int(row["red"])) for row in twice] == [
        (row["id"], 2 * row["red"]) for row in ds
    ]
    ds.set_epoch(1)
    check_replaced([(row["id"], row["red"]) for row in ds], expected(pictures, epoch=1))
    shuffled = ds.shuffle(seed=9)
    assert [row["id"] for row in shuffled] != [row["id"] for row in ds]
    assert sum(len(list(ds.shard(2, n))) for n in range(2)) == ROWS
    ds.set_epoch(0)  # `skip` freezes the order of epoch 0
    assert ids(ds.skip(10).take(5)) == ids(islice(ds, 10, 15))


@pytest.mark.parametrize("on_bad_rows", ["raise", "skip"])
def test_a_transform_that_returns_no_row_is_named(table: str, on_bad_rows: Any) -> None:
    ds = hls.from_lance(table, transform=lambda row: None, on_bad_rows=on_bad_rows)
    with pytest.raises(ValueError, match="`transform` must return a dict, a row: got NoneType"):
        next(iter(ds))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_bad_rows": "ignore"}, r"`on_bad_rows` must be one of .*: got 'ignore'"),
        ({"on_bad_rows": None}, r"`on_bad_rows` must be one of"),
        ({"transform": "upper"}, r"`transform` must be a function of a row or None: got 'upper'"),
    ],
)
def test_wrong_arguments_are_named(table: str, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hls.from_lance(table, **options)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_what_is_no_fault_of_a_row_is_passed_on(table: str, kind: type[BaseException]) -> None:
    def interrupted(row: dict[str, Any]) -> dict[str, Any]:
        raise kind

    with pytest.raises(kind):
        next(iter(hls.from_lance(table, transform=interrupted, on_bad_rows="skip")))
