"""``blobs="lazy"``: blobs as files that read what they are asked for."""

import gc
import io
import pickle
import shutil
import wave
import weakref
import zipfile
from pathlib import Path
from typing import Any

import datasets
import lance
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import torch
from blob_tables import ENCODINGS, VALUES, blob_data, blob_table, struct_table
from datasets import Features, Image, Value
from helpers import cut
from s3 import S3
from test_features import image

import hf_lance_stream as hls
from hf_lance_stream.blobs import NAME_TYPE
from hf_lance_stream.table import _tables

encodings = pytest.mark.parametrize("encoding", ENCODINGS)


def contents(rows: Any, column: str = "b") -> dict[int, Any]:
    """What the blob of each id reads as, None for no blob; no id may come twice."""
    read = [(int(row["id"]), row[column] and row[column].read()) for row in rows]
    assert len(dict(read)) == len(read)
    return dict(read)


ALL = dict(enumerate(VALUES))
SIZES = {i: -1 if value is None else len(value) for i, value in ALL.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return blob_table(tmp_path_factory.mktemp("lazy") / "t.lance", "2.2", b=VALUES)


@pytest.fixture
def ds(path: str) -> Any:
    return hls.from_lance(path, blobs="lazy", shuffle_seed=1, num_splits=4)


# The values.


@encodings
def test_lazy_blobs_read_as_the_exact_bytes_null_and_empty_apart(
    tmp_path: Path, encoding: str
) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=VALUES)
    lance.dataset(path).delete("id in (0, 3, 8, 9, 10)")
    left = {i: value for i, value in ALL.items() if i not in (0, 3, 8, 9, 10)}
    for options in ({}, {"shuffle_seed": 1}, {"columns": ["b", "id"]}, {"filter": "id >= 0"}):
        ds = hls.from_lance(path, blobs="lazy", **options)
        assert ds.features["b"] == hls.LazyBlob()
        assert contents(ds) == left
        assert {row["id"]: -1 if row["b"] is None else row["b"].size() for row in ds} == {
            i: SIZES[i] for i in left
        }


@encodings
def test_lazy_blobs_in_a_struct(tmp_path: Path, encoding: str) -> None:
    path, values = struct_table(tmp_path / "t.lance", encoding)
    ds = hls.from_lance(path, blobs="lazy", shuffle_seed=1)
    assert ds.features["s"] == {"blob": hls.LazyBlob(), "n": Value("int64")}
    for format in (None, "numpy", "torch"):
        for row in ds.with_format(format):
            expected, found = values[int(row["id"])], row["s"]
            assert (found is None) == (expected is None)
            if found is not None:
                assert found["n"] == expected["n"]
                assert (found["blob"] and found["blob"].read()) == expected["blob"]
    alone = hls.from_lance(path, blobs="lazy", columns=["id", "s.blob"])
    assert contents(alone, "s.blob") == {i: v and v["blob"] for i, v in enumerate(values)}


def test_a_lazy_blob_is_a_file(ds: Any) -> None:
    file = {row["id"]: row["b"] for row in ds}[10]
    data = VALUES[10]
    assert isinstance(file, io.IOBase)
    assert file.readable()
    assert file.seekable()
    assert not file.writable()
    assert (file.size(), file.tell()) == (5 << 20, 0)
    assert (file.read(3), file.tell()) == (data[:3], 3)
    assert file.seek(-2, io.SEEK_END) == len(data) - 2
    assert (file.read(10), file.read(10)) == (data[-2:], b"")
    assert file.seek(100) == 100
    assert file.seek(50, io.SEEK_CUR) == 150
    buffer = bytearray(7)
    assert (file.readinto(buffer), bytes(buffer)) == (7, data[150:157])
    assert len(file.readall()) == len(data) - 157
    with pytest.raises(ValueError, match="negative"):
        file.seek(-1)
    file.close()
    for use in (file.read, file.tell, lambda: file.seek(0), lambda: pickle.dumps(file)):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_libraries_open_lazy_blobs(tmp_path: Path) -> None:
    sound, archive = io.BytesIO(), io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(200))
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", "hello")
    values = [image(shade=7), sound.getvalue(), archive.getvalue(), pickle.dumps("text")]
    ds = hls.from_lance(blob_table(tmp_path / "t.lance", "2.2", b=values), blobs="lazy")
    picture, sound_file, archive_file, pickled = (row["b"] for row in ds)
    assert PIL.Image.open(picture).getpixel((0, 0)) == (7, 0, 0)
    with wave.open(sound_file) as file:
        assert file.getnframes() == 100
    assert zipfile.ZipFile(archive_file).read("a.txt") == b"hello"
    assert pickle.load(io.BufferedReader(pickled)) == "text"


def test_a_pickled_lazy_blob_is_at_the_same_place_and_opens_its_table_once(ds: Any) -> None:
    files = [row["b"] for row in ds if row["id"] in (0, 10, 11)]
    for file in files:
        file.seek(1)
    copies = [pickle.loads(pickle.dumps(file)) for file in files]
    assert [file.tell() for file in copies] == [1, 1, 1]
    assert [file.read() for file in copies] == [file.read() for file in files]
    assert len({id(file._table) for file in [*files, *copies]}) == 1


def test_a_lazy_blob_opens_after_its_dataset_is_gone(path: str) -> None:
    named = next(iter(hls.from_lance(path, blobs="lazy").decode(False)))["b"]
    gc.collect()
    key = named["table"], named["version"], named["files"]
    assert key not in _tables
    assert hls.LazyBlob().decode_example(named).read() == VALUES[0]


def test_another_table_at_the_same_path_is_not_read_in_the_place_of_the_first(
    tmp_path: Path,
) -> None:
    path = blob_table(tmp_path / "t.lance", "2.2", b=[b"old"])
    old = next(iter(hls.from_lance(path, blobs="lazy")))["b"]
    packed = pickle.dumps(old)
    shutil.rmtree(path)
    blob_table(tmp_path / "t.lance", "2.2", b=[b"new"])
    assert next(iter(hls.from_lance(path, blobs="lazy")))["b"].read() == b"new"
    with pytest.raises(OSError, match=r"t\.lance.*clean-up"):
        old.read()
    del old
    gc.collect()
    with pytest.raises(OSError, match=r"t\.lance.*another one by now"):
        pickle.loads(packed).read()


@encodings
def test_a_blob_whose_file_is_gone_is_an_error_that_names_it(tmp_path: Path, encoding: str) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=[bytes(5 << 20)])
    [row] = hls.from_lance(path, blobs="lazy")
    assert row["b"].read(1) == b"\0"  # it is open
    for file in Path(path, "data").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(OSError, match=r"could not read.*t\.lance, version 1, row 0, b: "):
        row["b"].read()


# How much is read.

LARGE = [bytes([i]) * (4 << 20) for i in range(20)]


@encodings
def test_nothing_of_a_lazy_blob_is_read_before_it_is_asked_for(
    tmp_path: Path, encoding: str
) -> None:
    path = blob_table(tmp_path / "t.lance", encoding, b=LARGE)
    ds = hls.from_lance(path, blobs="lazy", shuffle_seed=1)
    stats = ds._ex_iterable.source.tables[0].handle.io_stats_incremental
    stats()
    files = {row["id"]: row["b"] for row in ds}
    assert [files[i].size() for i in range(20)] == [4 << 20] * 20
    assert stats().read_bytes < 100_000
    for i in range(20):
        assert files[i].read(1024) == LARGE[i][:1024]
    assert stats().read_bytes < 20 * (600 << 10)  # Lance reads 512 KiB ahead
    assert len(files[0].read()) == (4 << 20) - 1024
    assert stats().read_bytes > 3 << 20  # the measure sees blobs


def test_files_that_were_read_do_not_pile_up_behind_the_consumer(tmp_path: Path) -> None:
    path = blob_table(tmp_path / "t.lance", "2.2", b=VALUES)
    files: list[weakref.ref[hls.BlobFile]] = []
    for row in hls.from_lance(path, blobs="lazy"):
        if row["b"] is not None:
            row["b"].read(1)
            files.append(weakref.ref(row["b"]))
        assert sum(file() is not None for file in files) <= 2
    assert len(files) == 10


def test_lazy_blobs_of_an_object_store_come_out_of_workers_and_are_read_from_there() -> None:
    values = [bytes([i]) * (1 << 20) for i in range(6)]
    with S3() as s3:
        for encoding in ENCODINGS:
            uri = s3.uri(f"{encoding}.lance")
            options: dict[str, Any] = {"storage_options": s3.options}
            data = blob_data(encoding, b=values)
            lance.write_dataset(data, uri, data_storage_version=encoding, **options)
            assert {row["id"]: row["b"] for row in hls.from_lance(uri, **options)} == dict(
                enumerate(values)
            )
            ds = hls.from_lance(uri, blobs="lazy", num_splits=2, **options)
            before = s3.proxy.stats()["bytes"]
            loader = hls.stateful_dataloader(ds, 3, collate_fn=list, **in_workers(encoding))
            files = {row["id"]: row["b"] for batch in loader for row in batch}
            assert s3.proxy.stats()["bytes"] - before < 200_000
            assert {i: file.read() for i, file in files.items()} == dict(enumerate(values))
            assert len({id(file._table) for file in files.values()}) == 1


def in_workers(encoding: str) -> dict[str, Any]:
    """Two real workers for one of the encodings."""
    if encoding != "2.2":
        return {}
    return {"num_workers": 2, "multiprocessing_context": "forkserver"}


# In a dataset.


@pytest.mark.parametrize("format", [None, "numpy", "torch"])
def test_rows_and_batches_in_every_format_have_files(ds: Any, format: str | None) -> None:
    formatted = ds.with_format(format)
    assert contents(formatted) == ALL
    for size in (5, 100):
        rows = [
            {"id": i, "b": file}
            for batch in formatted.iter(size)
            for i, file in zip(batch["id"], batch["b"], strict=True)
        ]
        assert contents(rows) == ALL
    if format == "torch":
        assert isinstance(next(iter(formatted))["id"], torch.Tensor)


def test_arrow_and_undecoded_rows_have_the_struct_that_names_the_blob(ds: Any, path: str) -> None:
    rows = pa.concat_tables(ds.with_format("arrow").iter(5))
    assert rows.schema.field("b").type == NAME_TYPE
    named = {row["id"]: row["b"] for row in ds.decode(False)}
    assert named == dict(zip(rows["id"].to_pylist(), rows["b"].to_pylist(), strict=True))
    assert named[2] is None
    files = lance.dataset(path)
    assert {k: v for k, v in named[7].items() if k != "files"} == {
        "table": path,
        "version": files.version,
        "column": "b",
        "row": 7,
        "size": 100_000,
    }
    again = ds.decode(False).cast_column("b", hls.LazyBlob())
    assert contents(again) == ALL
    assert contents(ds.decode(False).decode(True)) == ALL


def size_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": -1 if row["b"] is None else len(row["b"].read())}


def test_maps_filters_and_batches_get_files(ds: Any) -> None:
    assert {row["id"]: row["n"] for row in ds.map(size_of)} == SIZES
    rest = ds.map(size_of, remove_columns=["b"]).with_format("torch")
    assert {int(row["id"]): int(row["n"]) for row in rest} == SIZES
    kept = ds.filter(lambda row: row["b"] is not None)
    assert contents(kept) == {i: value for i, value in ALL.items() if value is not None}
    assert contents(ds.select_columns(["id", "b"]).take(12)) == ALL
    assert contents(ds.rename_column("b", "blob"), "blob") == ALL
    batched = ds.map(
        lambda batch: {"n": [size_of({"b": b})["n"] for b in batch["b"]]},
        batched=True,
        batch_size=5,
        remove_columns=["b"],
    )
    assert {row["id"]: row["n"] for row in batched} == SIZES
    names = ds.decode(False).filter(lambda row: row["id"] < 5).with_format("arrow")
    assert sum(t.num_rows for t in names) == 5


@pytest.mark.parametrize("k", [0, 1, 7, 12])
def test_a_resumed_pass_has_the_files_of_the_rows_that_were_left(path: str, k: int) -> None:
    def build() -> Any:
        ds = hls.from_lance(path, blobs="lazy", shuffle_seed=5, num_splits=3)
        # The id of a row whose blob is another one's is not in the result.
        return ds.map(
            lambda row: {
                "id": row["id"] if (row["b"] and row["b"].read()) == ALL[row["id"]] else -1
            }
        )

    assert sorted(cut(build, k)) == sorted(ALL)
    assert cut(build, k) == cut(build, 0)


def test_a_state_moves_between_lazy_blobs_and_bytes(path: str) -> None:
    lazy = hls.from_lance(path, blobs="lazy", shuffle_seed=1)
    rows = iter(lazy)
    seen = [next(rows)["id"] for _ in range(5)]
    rest = hls.from_lance(path, shuffle_seed=1)
    rest.load_state_dict(lazy.state_dict())
    assert {row["id"]: row["b"] for row in rest} == {i: ALL[i] for i in ALL if i not in seen}


def test_files_come_out_of_the_workers_of_a_loader_batch_by_batch_the_same(ds: Any) -> None:
    batches = []
    for workers in (0, 2):
        options = {"multiprocessing_context": "forkserver"} if workers else {}
        loader = hls.stateful_dataloader(ds, 3, num_workers=workers, collate_fn=list, **options)
        batches.append([[(r["id"], r["b"] and r["b"].read()) for r in b] for b in loader])
    assert batches[0] == batches[1]
    assert dict(row for batch in batches[0] for row in batch) == ALL


def test_transform_and_load_dataset_get_files(path: str, tmp_path: Path) -> None:
    transformed = hls.from_lance(path, blobs="lazy", transform=lambda r: r | size_of(r))
    assert {row["id"]: row["n"] for row in transformed} == SIZES
    options = {"data_files": path, "split": "train", "blobs": "lazy"}
    streamed = datasets.load_dataset("lance_stream", streaming=True, **options)
    assert contents(streamed) == ALL
    cached = datasets.load_dataset("lance_stream", cache_dir=str(tmp_path), **options)
    assert isinstance(cached, datasets.Dataset)
    assert contents(cached) == ALL  # of the table still: the cache holds names only
    assert cached.data.nbytes < 10_000


# Refusals.


def test_an_option_that_is_not_known_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"`blobs` must be one of \['bytes', 'lazy'\].*'file'"):
        hls.from_lance(path, blobs="file")  # type: ignore[arg-type]


@pytest.mark.parametrize("feature", [Image(), Value("binary"), Value("large_binary")])
def test_another_feature_than_that_of_lazy_blobs_is_refused(path: str, feature: Any) -> None:
    features = Features({"id": Value("int64"), "b": feature})
    with pytest.raises(ValueError, match=r"`features`.*LazyBlob\(\).*'b'.*blobs='lazy'"):
        hls.from_lance(path, blobs="lazy", features=features)
    given = Features({"id": Value("int32"), "b": hls.LazyBlob()})
    assert hls.from_lance(path, blobs="lazy", features=given).features == given


def test_features_with_lazy_blobs_are_those_of_their_own_description() -> None:
    features = Features({"b": hls.LazyBlob(), "s": {"b": hls.LazyBlob(decode=False)}})
    assert Features.from_dict(features.to_dict()) == features
    assert Features.from_arrow_schema(features.arrow_schema) == features
    with pytest.raises(TypeError, match="lazy blob cannot be made of binary"):
        hls.LazyBlob().cast_storage(pa.array([b"x"]))
    assert np.array(hls.LazyBlob().cast_storage(pa.nulls(2))).tolist() == [None, None]


def test_a_lazy_blob_cannot_be_written(ds: Any) -> None:
    file = next(row["b"] for row in ds if row["b"] is not None)
    assert not file.writable()
    with pytest.raises(io.UnsupportedOperation):
        file.write(b"x")
