"""The state of a stream: what it holds, how it is checked, how it is found in a nested state.

A state is JSON data. It says where a reader stands (`position`, rows delivered) and what it
read (`fingerprint`), so that loading it into anything else can be refused by name.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hf_lance_stream.permutation import MAX_LENGTH, Int64Array

STATE_VERSION = 1
"""Version of the state's format. A reader refuses states of a later one."""

STATE_TYPE = "LanceExamplesIterable"
"""Value of `"type"` that marks one of our states among those of the wrappers around it."""

_EARLIER = {"previous_state": "examples_iterable", "previous_states": "ex_iterables"}
_MAX_DEPTH = 200  # levels of a nested state; each takes a few of Python's 1000 frames
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


def shown(value: Any) -> str:
    """The `repr` of a value of a state for an error, which a made-up state cannot make long."""
    text = repr(value)
    return text if len(text) <= 2 * _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def fingerprint_text(value: Any) -> Any:
    """A fingerprint value as a short JSON scalar: numbers and None as they are, else text."""
    if value is None or isinstance(value, int):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if len(json.dumps(text)) <= _MAX_TEXT:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{text[:40]}… ({len(text)} characters, sha256 {digest})"


def new_state(fingerprint: Mapping[str, Any], part: Mapping[str, Any]) -> LiveState:
    """The state of a reader that has delivered nothing yet."""
    return LiveState(
        type=STATE_TYPE,
        state_version=STATE_VERSION,
        fingerprint=LiveState(fingerprint),
        part=LiveState(part),
        consumed=None,
        position=0,
        chunk_rows=None,
    )


def check_depth(state: Any) -> None:
    """Raise ValueError for a state that is nested deeper than any dataset nests it."""
    level, depth = [state] if isinstance(state, dict | list | tuple) else [], 0
    while level:
        if depth > _MAX_DEPTH:
            raise ValueError(
                f"the state is damaged: it is nested more than {_MAX_DEPTH} levels deep, which no "
                "dataset is"
            )
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [v for values in inner for v in values if isinstance(v, dict | list | tuple)]
        depth += 1


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


def check_steps(saved: Any, live: Any) -> None:
    """Raise ValueError unless a nested state is that of a dataset with the same steps.

    `datasets` would raise a KeyError, or take over a state that means something else.

    Args:
        saved: the nested state of all steps, ours innermost.
        live: that of the dataset that loads it.
    """
    name = _misfit(saved, live, "type")
    if name is None:
        return
    then, now = steps_in_words(saved), steps_in_words(live)
    if then == now:
        raise ValueError(
            f"the state is damaged: `{name}` of a step is no number as it was saved, or something "
            "else that this step never writes"
        )
    raise ValueError(
        f"the state was saved by a dataset with other steps: saved {then}, now {now}; load it into "
        "a dataset made by the same calls in the same order"
    )


def _misfit(saved: Any, live: Any, name: str) -> str | None:
    """The name of what is not as the steps of `datasets` write it, or None.

    Args:
        saved: part of a saved state.
        live: the same part of the state of the dataset that loads it.
        name: its name.
    """
    if isinstance(live, dict):
        if not isinstance(saved, dict) or saved.get("type") != live.get("type"):
            return name
        if live.get("type") == STATE_TYPE:
            return None  # `check_state` does that
        if set(saved) != set(live):
            return name
        # A step that holds rows back has the state from which it makes them again, or None.
        earlier = {k: live[v] for k, v in _EARLIER.items() if k in live and v in live}
        parts = [
            (saved[k], {**live, **earlier}[k], k)
            for k in live
            if k not in earlier or saved[k] is not None
        ]
    elif isinstance(live, list):
        if not isinstance(saved, list) or len(saved) != len(live):
            return name
        pairs = zip(saved, live, strict=True)
        parts = [(s, n, name) for s, n in pairs if s is not None or name not in _EARLIER]
    elif isinstance(live, int):
        return None if isinstance(saved, int) and saved >= 0 else name
    else:
        return None if live is None or isinstance(saved, type(live)) else name
    return next((found for part in parts if (found := _misfit(*part)) is not None), None)


def steps_in_words(state: Any) -> str:
    """The types of the steps of a nested state, the last call first."""
    names = []
    while isinstance(state, dict):
        names.append(str(state.get("type"))[:80])
        below = state.get("examples_iterable", state.get("ex_iterables"))
        state = below[0] if isinstance(below, list) and below else below
    return " of ".join(name.removesuffix("Iterable").removesuffix("Examples") for name in names)


def check_version(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless `state` has a format this package reads."""
    version = state.get("state_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError(
            f"not a state of hf_lance_stream: `state_version` is {shown(version)}; pass what "
            "`state_dict()` returned, unchanged (JSON keeps it as it is)"
        )
    if version > STATE_VERSION:
        raise ValueError(
            f"the state was written by a newer hf_lance_stream: its `state_version` is "
            f"{shown(version)}, this release reads up to {STATE_VERSION}; upgrade hf_lance_stream "
            "to load it"
        )


def differing_fields(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> list[str]:
    """The fields in which a saved state differs from the reader that loads it."""
    saved = mapping(state, "fingerprint")
    return [
        name
        for name in [*fingerprint, *(name for name in saved if name not in fingerprint)]
        if saved.get(name) != fingerprint.get(name)
        or type(saved.get(name)) is not type(fingerprint.get(name))
    ]


def differences(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> list[str]:
    """One line for each of these fields."""
    saved = mapping(state, "fingerprint")
    return [
        f"{name}: saved {shown(saved.get(name))}, now {shown(fingerprint.get(name))}"
        for name in differing_fields(state, fingerprint)
    ]


def check_state(state: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    """Raise ValueError unless `state` is whole and a reader with `fingerprint` may load it.

    Args:
        state: a state of ours.
        fingerprint: what the reader reads.
    """
    check_version(state)
    lines = differences(state, fingerprint)
    if lines:
        version = ""
        if any(line.startswith("version:") for line in lines):
            number = state["fingerprint"].get("version")
            how = f"version={shown(number)}"
            if isinstance(number, str):  # of several tables
                how = "each table at its version, lance.dataset(uri, version=…)"
            version = f", here with {how}"
        raise ValueError(
            "the state does not fit this dataset:\n  "
            + "\n  ".join(lines)
            + f"\nBuild the dataset as it was when the state was saved{version}, or call "
            "`load_state_dict(state, strict=False)` to continue at the same position all the "
            "same; a table that was only moved goes on with `allow_moved=True`."
        )
    mapping(state, "part")
    check_count(state, "position")
    if state.get("chunk_rows") is not None:
        check_count(state, "chunk_rows", low=1)


def check_count(state: Mapping[str, Any], name: str, low: int = 0, high: int | None = None) -> int:
    """The integer `name` of a state, or a ValueError if it is none or out of bounds."""
    value = state.get(name)
    limit = MAX_LENGTH if high is None else high
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= limit:
        raise ValueError(
            f"the state is damaged: `{name}` must be an integer in [{low}, {limit}]: got "
            f"{shown(value)}"
        )
    return value


def mapping(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The dict `name` of a state, or a ValueError if it is none."""
    value = state.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"the state is damaged: `{name}` must be a dict: got {shown(value)}")
    return value


def counts_to_text(counts: Int64Array, *, is_level: bool = True) -> int | str | None:
    """Counts, one of each split, as a short JSON scalar; None for nothing but zeros.

    Unequal counts become ``"least+more,more,…"``, some bytes per split. So do equal ones if
    those of other ranks are not (`is_level` False).
    """
    if not counts.size:
        return None
    least = int(counts.min())
    if is_level and (counts == least).all():
        return least or None
    return f"{least}+" + ",".join(map(str, (counts - least).tolist()))


def counts_from_text(value: Any, size: int) -> Int64Array | None:
    """What `counts_to_text` made of `size` counts, or a ValueError."""
    if value is None:
        return None
    counts = [value] * size if type(value) is int else []
    least, plus, more = value.partition("+") if isinstance(value, str) else ("", "", "")
    if plus and all(v.isdecimal() for v in (least, *more.split(","))):
        counts = [int(least) + int(v) for v in more.split(",")]
    try:
        array = np.array(counts, dtype=np.int64)
    except OverflowError:
        array = np.empty(0, dtype=np.int64)
    if array.size != size or (array < 0).any():
        raise ValueError(
            f"the state is damaged: `consumed` must be None, a count, or {size} counts as "
            f"'least+more,more,…': got {str(value)[:80]!r}"
        )
    return array
