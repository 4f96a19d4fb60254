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


def read_states(directory: Path, step: int | None) -> dict[str, Any]:
    """What `write_states` wrote.

    Args:
        directory: that of the checkpoint.
        step: the global step of the checkpoint; None if it is unknown.

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
        content = json.loads(path.read_text())
    except (ValueError, RecursionError):
        content = None
    return check_content(content, str(path), step)


def check_content(content: Any, name: str, step: int | None) -> dict[str, Any]:
    """The content of the file without its hash, or a ValueError as of `read_states`.

    Args:
        content: what is in the file.
        name: of the file, for errors.
        step: the global step of the checkpoint; None if it is unknown.
    """
    try:
        saved = {key: value for key, value in content.items() if key != "sha256"}
        is_whole = content["sha256"] == _digest(saved)
    except (KeyError, AttributeError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{name} is damaged: {_WAY_OUT}")
    if saved["version"] != _VERSION:
        raise ValueError(
            f"{name} has version {saved['version']!r}, this release of hf_lance_stream reads "
            f"{_VERSION}: install the release that wrote it; or {_WAY_OUT}"
        )
    if step is not None and saved["global_step"] != step:
        raise ValueError(
            f"{name} is damaged: it is of step {saved['global_step']}, the checkpoint of step "
            f"{step}: {_WAY_OUT}"
        )
    return saved


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
