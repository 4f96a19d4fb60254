"""Helpers of the tests: small tables, and a resume in the middle of a pass."""

import json
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

MAKERS: dict[str, Callable[[np.ndarray], pa.Array]] = {
    "id": lambda i: pa.array(i, pa.int64()),
    "text": lambda i: pa.array([f"text {n}" for n in i.tolist()], pa.string()),
    "label": lambda i: pa.array(i % 5, pa.int64()),
    "score": lambda i: pa.array(i / 4, pa.float64()),
    "vector": lambda i: pa.FixedSizeListArray.from_arrays(
        pa.array(np.repeat(i, 4), pa.float32()), 4
    ),
}
"""Columns that `make_table` knows, each a function of the ids."""


def make_table(
    path: str | Path,
    rows: int,
    rows_per_file: int,
    columns: Sequence[str] = ("id",),
    *,
    start: int = 0,
    extra: dict[str, pa.Array] | None = None,
    **write_options: Any,
) -> str:
    """Write the Lance table T(rows, rows_per_file) and return its path as a str.

    `columns` are names in `MAKERS`; ids run from `start`; `extra` adds whole columns; further
    arguments go to `lance.write_dataset`, such as enable_stable_row_ids=True.
    """
    ids_ = np.arange(start, start + rows)
    arrays = {name: MAKERS[name](ids_) for name in columns} | (extra or {})
    lance.write_dataset(
        pa.table(arrays), str(path), max_rows_per_file=rows_per_file, **write_options
    )
    return str(path)


def ids(ds: Any) -> list[int]:
    """The ids that one pass over `ds` yields, for datasets of rows in any format."""
    return [int(row["id"]) for row in ds]


def through_json(state: Any) -> Any:
    """`state` as it comes back from a JSON file."""
    return json.loads(json.dumps(state))


def cut(build: Callable[[], Any], k: int) -> list[int]:
    """The ids of k rows from `build()`, then of the rest from a new one given the state.

    Equals ``ids(build())`` when resuming is exact.
    """
    ds = build()
    seen = [int(row["id"]) for row in islice(iter(ds), k)]
    state = through_json(ds.state_dict())
    new = build()
    new.load_state_dict(state)
    return seen + ids(new)
