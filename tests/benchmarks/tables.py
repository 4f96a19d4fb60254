"""The tables of the benchmarks: made once, with fixed seeds.

    python tests/benchmarks/tables.py --dir DIRECTORY --size full text text.litdata

A name is a table of `TABLES`, written as Lance, or `text.litdata` and `text.mds`: the rows of
`text` in the formats of LitData and MosaicML Streaming. The files are in DIRECTORY/SIZE. Only the
libraries that a format needs are imported.
"""

import argparse
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

SIZES = {"full": 1.0, "quick": 0.02, "small": 0.005}  # "small" warms the libraries
LEAST_ROWS = 200
TOKENS, IMAGE_BYTES, WORDS = 512, 100_000, 112


@dataclass(frozen=True)
class Table:
    """A table: how many rows in how many fragments, and what makes the columns of some rows."""

    rows: int
    fragments: int
    columns: Callable[[np.random.Generator, np.ndarray], dict[str, pa.Array]]
    block: int = 2000
    """Rows that are made at a time."""


def ints(rng: np.random.Generator, ids: np.ndarray) -> dict[str, pa.Array]:
    return {"id": pa.array(ids)}


def text(rng: np.random.Generator, ids: np.ndarray) -> dict[str, pa.Array]:
    """1 KB of words a row."""
    words = np.array([f"word{i:04d}" for i in range(2000)])
    chosen = words[rng.integers(0, len(words), (len(ids), WORDS))]
    return {"id": pa.array(ids), "text": pa.array([" ".join(row) for row in chosen])}


def tokens(rng: np.random.Generator, ids: np.ndarray, *, fixed: bool) -> dict[str, pa.Array]:
    """512 int32 a row, as a fixed-size or a plain list."""
    flat = pa.array(rng.integers(0, 50_000, len(ids) * TOKENS, dtype=np.int32))
    if fixed:
        return {"input_ids": pa.FixedSizeListArray.from_arrays(flat, TOKENS)}
    offsets = pa.array(np.arange(len(ids) + 1, dtype=np.int32) * TOKENS)
    return {"input_ids": pa.ListArray.from_arrays(offsets, flat)}


def images(rng: np.random.Generator, ids: np.ndarray) -> dict[str, pa.Array]:
    """100 KB of random bytes a row, as incompressible as a JPEG."""
    return {
        "id": pa.array(ids),
        "image": pa.array([rng.bytes(IMAGE_BYTES) for _ in ids], pa.binary()),
    }


TABLES = {
    "ints_10k": Table(10_000, 10, ints),
    "ints_10m": Table(10_000_000, 10, ints, block=1_000_000),
    "ints_5k_fragments": Table(50_000, 5_000, ints),
    "text": Table(200_000, 8, text),
    "tokens": Table(100_000, 8, partial(tokens, fixed=True)),
    "tokens_list": Table(100_000, 8, partial(tokens, fixed=False)),
    "images": Table(10_000, 10, images, block=100),
}


def rows_of(name: str, size: str) -> int:
    """The number of rows of a table."""
    rows = TABLES[name.split(".")[0]].rows
    return max(LEAST_ROWS, int(rows * SIZES[size]))


def batches(name: str, rows: int) -> Iterator[pa.RecordBatch]:
    """All rows of a table, always the same for the same number of rows."""
    table, rng = TABLES[name], np.random.default_rng(0)
    for start in range(0, rows, table.block):
        ids = np.arange(start, min(start + table.block, rows))
        yield pa.RecordBatch.from_pydict(table.columns(rng, ids))


def python_rows(name: str, rows: int) -> Iterator[dict[str, Any]]:
    """All rows of a table, one by one."""
    for batch in batches(name, rows):
        yield from batch.to_pylist()


def write_lance(name: str, rows: int, path: Path) -> None:
    """Write a table with Lance, in fragments of equal size."""
    import lance

    made = batches(name, rows)
    first = next(made)
    reader = pa.RecordBatchReader.from_batches(first.schema, chain([first], made))
    lance.write_dataset(reader, str(path), max_rows_per_file=-(-rows // TABLES[name].fragments))


def write_litdata(name: str, rows: int, path: Path) -> None:
    """Write the rows with LitData, in chunks of the size its documentation uses."""
    import litdata

    litdata.optimize(
        partial(python_rows, name),
        [rows],
        str(path),
        chunk_bytes="64MB",
        num_workers=1,
        verbose=False,
    )


def write_mds(name: str, rows: int, path: Path) -> None:
    """Write the rows with MosaicML Streaming."""
    from readers import load

    columns = {"text": {"id": "int", "text": "str"}}[name]
    with load("streaming.base").MDSWriter(out=str(path), columns=columns) as writer:
        for row in python_rows(name, rows):
            writer.write(row)


WRITERS = {"lance": write_lance, "litdata": write_litdata, "mds": write_mds}


def path_of(directory: Path, name: str, size: str) -> Path:
    """Where the table `name` is: a name without a format is a Lance table."""
    return directory / size / (name if "." in name else f"{name}.lance")


def make(directory: Path, name: str, size: str = "full") -> Path:
    """Make the table unless it is there, and return its path."""
    path = path_of(directory, name, size)
    if not path.exists():
        table, form = path.name.split(".")
        unfinished = path.with_name(f"unfinished.{path.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[form](table, rows_of(table, size), unfinished)
        unfinished.rename(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    options = parser.parse_args()
    for name in options.names:
        print(make(options.dir, name, options.size))


if __name__ == "__main__":
    main()
