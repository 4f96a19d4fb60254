"""``hf-lance-stream inspect``: what it says against Lance and `from_lance`."""

import io
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from command import Command
from helpers import make_table
from PIL import Image

import hf_lance_stream as hls
from hf_lance_stream.commands.inspect import _size, inspect_table
from hf_lance_stream.source import open_source
from hf_lance_stream.suggest import suggest_clump_size, suggest_num_splits


def by_name(document: dict) -> dict[str, dict]:
    return {column["name"]: column for column in document["columns"]}


@pytest.fixture
def rich_table(tmp_path: Path) -> str:
    """A table with deletions, tags, a branch, an index and two versions of its fragments."""
    path = make_table(tmp_path / "t.lance", 1010, 250, ["id", "text", "vector"])
    written = lance.dataset(path)
    written.delete("id % 10 = 0")
    written.tags.create("gold", 1)
    written.create_scalar_index("id", "BTREE")
    written.create_branch("trial")
    lance.write_dataset(
        lance.dataset(path).to_table(limit=77), path, mode="append", max_rows_per_file=1000
    )
    return path


def test_json_is_what_lance_knows(rich_table: str, command: Command) -> None:
    document = command("inspect", rich_table, "--json").json
    written = lance.dataset(rich_table)
    rows = [fragment.count_rows() for fragment in written.get_fragments()]
    assert document["rows"] == written.count_rows() == 909 + 77
    assert document["deleted_rows"] == 101
    assert document["fragments"] == {
        "count": 6,
        "min_rows": min(rows),
        "median_rows": float(np.median(rows)),
        "max_rows": max(rows),
    }
    files = list((Path(rich_table) / "data").iterdir())
    assert document["data_files"] == len(files)
    assert document["data_bytes"] == sum(file.stat().st_size for file in files)
    assert document["version"] == document["latest_version"] == written.version
    assert document["tags"] == {"gold": "1"}
    assert document["branches"] == ["trial"]
    assert document["indices"] == [
        {"name": "id_idx", "kind": "BTree", "columns": ["id"], "rows": 909}
    ]
    assert document["has_stable_row_ids"] is False
    assert document["storage_version"] == written.data_storage_version
    assert document["features"] == hls.from_lance(rich_table).features.to_dict()


def test_column_sizes_are_those_in_the_files(rich_table: str, command: Command) -> None:
    document = command("inspect", rich_table, "--json").json
    columns = by_name(document)
    stats = lance.dataset(rich_table).stats.data_stats().fields
    assert [c["bytes"] for c in columns.values()] == [
        stats[0].bytes_on_disk,
        stats[1].bytes_on_disk,
        stats[2].bytes_on_disk,
    ]
    assert not any(column["is_estimate"] for column in columns.values())
    assert sum(column["bytes"] for column in columns.values()) <= document["data_bytes"]
    assert 15 <= columns["vector"]["bytes_per_row"] <= 20  # 4 floats
    assert columns["vector"]["type"] == "fixed_size_list<item: float>[4]"


def test_sizes_of_nested_columns_are_those_of_all_their_fields(
    tmp_path: Path, command: Command
) -> None:
    path = str(tmp_path / "t.lance")
    data = np.random.default_rng(0).bytes(400_000)
    inner = pa.array([data[1000 * i : 1000 * (i + 1)] for i in range(400)], pa.binary())
    nested = pa.StructArray.from_arrays([inner, pa.array(range(400))], ["data", "n"])
    lance.write_dataset(pa.table({"id": range(400), "s": nested}), path)
    size = by_name(command("inspect", path, "--json").json)["s"]["bytes"]
    assert 400_000 < size < 420_000


@pytest.mark.parametrize("kind", ["blob", "legacy"])
def test_sizes_that_files_do_not_tell_are_estimates_and_say_so(
    kind: str, tmp_path: Path, command: Command
) -> None:
    path = str(tmp_path / "t.lance")
    metadata = {"lance-encoding:blob": "true"} if kind == "blob" else None
    values = pa.array([bytes([i]) * (90_000 + 500 * i) for i in range(40)], pa.large_binary())
    schema = pa.schema([("id", pa.int64()), pa.field("x", pa.large_binary(), metadata=metadata)])
    lance.write_dataset(
        pa.table([pa.array(range(40)), values], schema=schema),
        path,
        data_storage_version="2.1" if kind == "blob" else "legacy",
    )
    document = command("inspect", path, "--json").json
    column = by_name(document)["x"]
    assert column["is_estimate"]
    assert column["bytes"] == pytest.approx(sum(len(v.as_py()) for v in values), rel=0.1)
    assert by_name(document)["id"]["is_estimate"] == (kind == "legacy")
    words = command("inspect", path).out
    assert f"about {_size(column['bytes'])}" in words
    assert "estimates from a sample" in words


def test_features_are_those_datasets_sees(tmp_path: Path, command: Command) -> None:
    path = str(tmp_path / "t.lance")
    png = io.BytesIO()
    Image.new("RGB", (2, 2)).save(png, "PNG")
    lance.write_dataset(pa.table({"id": [1], "picture": [png.getvalue()]}), path)
    document = command("inspect", path, "--json").json
    assert document["features"] == hls.from_lance(path).features.to_dict()
    assert by_name(document)["picture"]["feature"].startswith("Image(")


def test_a_type_without_a_feature_says_so_and_the_rest_is_shown(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_table(tmp_path / "t.lance", 10, 5, ["id", "text"])
    from hf_lance_stream.commands import inspect

    original = inspect.features_of

    def refusing(source):
        if "text" in source.columns:
            raise ValueError("column 'text' has a type that features cannot hold")
        return original(source)

    monkeypatch.setattr(inspect, "features_of", refusing)
    document = command("inspect", path, "--json").json
    assert by_name(document)["text"]["feature"] is None
    assert by_name(document)["text"]["problem"] == (
        "column 'text' has a type that features cannot hold"
    )
    assert by_name(document)["id"]["feature"] == "Value('int64')"
    assert list(document["features"]) == ["id"]
    assert "text: column 'text' has a type" in command("inspect", path).out


def test_suggestions_have_their_reasons(table: str, command: Command) -> None:
    document = command("inspect", table, "--json").json
    splits = document["suggestions"]["num_splits"]
    clump = document["suggestions"]["shuffle_clump_size"]
    expected = suggest_num_splits([1, 2, 4, 8], 64, 1000)
    assert (splits["num_splits"], splits["reason"]) == (64, expected.reason)
    row_bytes = open_source(table).row_bytes
    assert document["row_bytes"] == row_bytes
    assert clump["shuffle_clump_size"] == suggest_clump_size(row_bytes, 1000).shuffle_clump_size
    words = " ".join(command("inspect", table).out.split())
    assert f"num_splits: 64: {expected.reason}" in words


def test_too_few_rows_for_the_usual_splits(tmp_path: Path, command: Command) -> None:
    path = make_table(tmp_path / "t.lance", 3, 5)
    found = command("inspect", path, "--json")
    assert found.code == 0
    assert found.json["suggestions"]["num_splits"]["num_splits"] is None
    assert "rows=3; use fewer GPUs" in found.json["suggestions"]["num_splits"]["reason"]


def test_an_empty_table(tmp_path: Path, command: Command) -> None:
    path = str(tmp_path / "t.lance")
    lance.write_dataset(pa.table({"id": pa.array([], pa.int64())}), path)
    found = command("inspect", path, "--json")
    assert found.code == 0
    assert found.json["rows"] == 0
    assert found.json["columns"][0]["bytes_per_row"] is None
    assert command("inspect", path).code == 0


def test_reads_little_of_a_large_table(tmp_path: Path) -> None:
    path = make_table(tmp_path / "t.lance", 400_000, 100_000, ["id", "text", "vector"])
    source = open_source(path)
    handle = source.tables[0].handle
    before = handle.io_stats_snapshot().read_bytes
    document = inspect_table(source)
    read = handle.io_stats_snapshot().read_bytes - before
    assert document["data_bytes"] > 10_000_000
    assert read < document["data_bytes"] / 4


def test_damaged_files_are_an_error_in_words(table: str, command: Command) -> None:
    next((Path(table) / "data").iterdir()).unlink()
    found = command("inspect", table)
    assert found.code == 2
    assert f"could not inspect {table}: Not found" in found.err
    assert ".rs:" not in found.err


def test_words(rich_table: str, command: Command) -> None:
    found = command("inspect", rich_table, "--version", "gold")
    latest = lance.dataset(rich_table).version
    assert found.code == 0
    for text in (
        f"version 1 of {latest}",
        "Rows: 1,010\n",
        "Fragments: 5, of 10 to 250 rows, median 250",
        "Tags: gold (version 1)",
        "Branches: trial",
        "List(Value('float32'), length=4)",
    ):
        assert text in found.out, found.out
    newest = command("inspect", rich_table).out
    assert "986, and 101 deleted" in newest
    assert "Index: id_idx: BTree on id" in newest


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 KB"), (2.5e6, "2.5 MB"), (1e15, "1000.0 TB")],
)
def test_sizes_in_words(size: float, text: str) -> None:
    assert _size(size) == text
