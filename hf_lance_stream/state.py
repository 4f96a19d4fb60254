"""The state of a stream: what it holds, how it is checked, how it is found in a nested state.

A state is JSON data. It says where a reader stands (`position`, rows delivered) and what it
read (`fingerprint`), so that loading it into anything else can be refused by name.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

STATE_VERSION = 1
"""Version of the state's format. A reader refuses states of a later one."""

STATE_TYPE = "LanceExamplesIterable"
"""Value of `"type"` that marks one of our states among those of the wrappers around it."""

_MAX_TEXT = 300  # longer texts of a fingerprint are shortened, to keep a state under 2 KB


class LiveState(dict[str, Any]):
    """The state a reader updates in place.

    `datasets` merges a saved state into the live one key by key, at any depth, and reads the
    old value first; a key that only a later format has would be a KeyError there. Here it
    reads as None, so it is taken over and `check_state` can refuse it by name. Copies are
    plain dicts: `datasets` copies any other type with `deepcopy`.
    """

    def __missing__(self, key: str) -> None:
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {k: v.__deepcopy__(memo) if type(v) is LiveState else v for k, v in self.items()}


def fingerprint_text(value: Any) -> Any:
    """A fingerprint value as a short JSON scalar: numbers and None as they are, else text."""
    if value is None or isinstance(value, int):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= _MAX_TEXT:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[:80]}… ({len(text)} characters, sha256 {digest})"


def new_state(fingerprint: Mapping[str, Any], part: Mapping[str, Any]) -> LiveState:
    """The state of a reader that has delivered nothing yet."""
    return LiveState(
        type=STATE_TYPE,
        state_version=STATE_VERSION,
        fingerprint=LiveState(fingerprint),
        part=LiveState(part),
        position=0,
        chunk_rows=None,
    )


def find_states(state: Any) -> Iterator[dict[str, Any]]:
    """Every state of ours inside a (nested) state of a dataset or a loader."""
    if isinstance(state, dict):
        if state.get("type") == STATE_TYPE:
            yield state
            return
        for value in state.values():
            yield from find_states(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from find_states(value)


def check_version(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless `state` has a format this package reads."""
    version = state.get("state_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(
            f"not a state of hf_lance_stream: `state_version` is {version!r}; pass what "
            "`state_dict()` returned, unchanged (JSON keeps it as it is)"
        )
    if version > STATE_VERSION:
        raise ValueError(
            f"the state was written by a newer hf_lance_stream: its `state_version` is {version}, "
            f"this release reads up to {STATE_VERSION}; upgrade hf_lance_stream to load it"
        )


def differences(
    state: Mapping[str, Any], fingerprint: Mapping[str, Any], part: Mapping[str, Any]
) -> list[str]:
    """One line for each field in which a saved state differs from the reader that loads it."""
    saved = {**_mapping(state, "fingerprint"), **_mapping(state, "part")}
    now = {**fingerprint, **part}
    return [
        f"{_PART_NAMES.get(name, name)}: saved {saved.get(name)!r}, now {now.get(name)!r}"
        for name in [*now, *(name for name in saved if name not in now)]
        if saved.get(name) != now.get(name) or type(saved.get(name)) is not type(now.get(name))
    ]


def check_state(
    state: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    part: Mapping[str, Any],
    length: int,
) -> None:
    """Raise ValueError unless `state` can be continued by the reader described by the rest.

    Args:
        state: a state of ours.
        fingerprint: what the reader reads.
        part: which part of the epoch it has.
        length: rows it yields in the epoch.
    """
    check_version(state)
    lines = differences(state, fingerprint, part)
    if lines:
        raise ValueError(
            "the state does not fit this dataset:\n  "
            + "\n  ".join(lines)
            + "\nBuild the dataset as it was when the state was saved"
            + (
                f", here with version={state['fingerprint']['version']}"
                if any(line.startswith("version:") for line in lines)
                else ""
            )
            + ", or call `load_state_dict(state, strict=False)` to continue at the same position "
            "all the same, for example when the table was only moved."
        )
    for name, low, high in (("position", 0, length), ("chunk_rows", 1, 2**62)):
        value = state.get(name)
        if name == "chunk_rows" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(
                f"the state is damaged: `{name}` must be an integer in [{low}, {high}]: "
                f"got {value!r}"
            )


def _mapping(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = state.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"the state is damaged: `{name}` must be a dict: got {value!r}")
    return value


_PART_NAMES = {
    "start": "first shard of this reader",
    "stop": "end of the shards of this reader",
    "ranges": "rows of this reader",
}
