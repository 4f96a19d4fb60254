"""A conversion in a process of its own, which tests kill; imports little, to start soon."""

from typing import Any

import hf_lance_stream as hls
from hf_lance_stream import inputs


def convert(source: Any, table: str, options: dict[str, Any]) -> None:
    """Write a table from batches of a few rows, so that a small source has many."""
    inputs.MAX_ROWS = 37
    hls.write_lance(source, table, **options)
