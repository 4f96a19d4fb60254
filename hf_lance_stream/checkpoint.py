"""The file of a checkpoint directory that holds the loader states of all ranks."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATE_NAME = "loader_state.json"
"""Name of the file in the directory."""

_VERSION = 1
_WAY_OUT = (
    "resume from another checkpoint; or delete that file and set ignore_data_skip=True, to start "
    "the epoch of the checkpoint anew, with rows seen a second time"
)


def write_states(directory: Path, content: Mapping[str, Any]) -> None:
    """Write the file; it is whole once it has its name, also after a crash.

    Args:
        directory: that of the checkpoint.
        content: JSON data: ``states``, one per rank, ``global_step`` and what else describes them.
    """
    path = directory / STATE_NAME
    unfinished = path.with_suffix(".unfinished")
    content = {"version": _VERSION, **content}
    with open(unfinished, "w") as file:
        json.dump({**content, "sha256": _digest(content)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def read_states(directory: Path, step: int) -> dict[str, Any]:
    """What `write_states` wrote.

    Args:
        directory: that of the checkpoint.
        step: the global step of the checkpoint.

    Raises:
        ValueError: the file is missing, damaged, of another release or of another step.
    """
    path = directory / STATE_NAME
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, so the place of the data is unknown (was the checkpoint saved by "
            "another Trainer, or with save_only_model=True?): resume from another checkpoint; or "
            "set ignore_data_skip=True, to start its epoch anew, with rows seen a second time"
        )
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        is_whole = content.pop("sha256") == _digest(content)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{path} is damaged: {_WAY_OUT}")
    if content["version"] != _VERSION:
        raise ValueError(
            f"{path} has version {content['version']!r}, this release of hf_lance_stream reads "
            f"{_VERSION}: install the release that wrote it; or {_WAY_OUT}"
        )
    if content["global_step"] != step:
        raise ValueError(
            f"{path} is damaged: it is of step {content['global_step']}, the checkpoint of step "
            f"{step}: {_WAY_OUT}"
        )
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
