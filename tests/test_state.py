import json
import pickle
import re
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from datasets.iterable_dataset import _BaseExamplesIterable, _fast_copy
from helpers import through_json
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lance_stream.permutation import MAX_LENGTH
from hf_lance_stream.state import (
    STATE_TYPE,
    STATE_VERSION,
    LiveState,
    check_state,
    check_version,
    counts_from_text,
    counts_to_text,
    differences,
    find_states,
    fingerprint_text,
    new_state,
)

FINGERPRINT = {
    "table": "pets.lance",
    "version": 3,
    "filter": None,
    "columns": '["id", "text"]',
    "rows": 1000,
    "num_splits": 8,
    "shuffle_seed": 42,
    "shuffle_clump_size": 64,
    "tail": "drop",
    "epoch": 1,
    "order_version": 1,
}
PART = {"start": 0, "stop": 8, "ranges": None}

scalars = st.none() | st.booleans() | st.integers() | st.text(max_size=5)


def saved(**changes: Any) -> dict[str, Any]:
    """A saved state as JSON gives it back, with some of its values replaced."""
    return through_json(new_state(FINGERPRINT, PART)) | {"position": 137} | changes


def check(state: dict[str, Any]) -> None:
    check_state(state, FINGERPRINT)


class Reader(_BaseExamplesIterable):
    """An examples iterable that has nothing but a state; `datasets` merges into it."""

    def _init_state_dict(self) -> LiveState:
        self._state_dict = new_state(FINGERPRINT, PART)
        return self._state_dict


class Wrapper(_BaseExamplesIterable):
    """One that keeps a reader's state inside its own, as `map` does."""

    def _init_state_dict(self) -> dict[str, Any]:
        inner = Reader()._init_state_dict()
        self._state_dict = {"examples_iterable": inner, "previous_state": None, "type": "Wrapper"}
        return self._state_dict


def is_plain(value: Any) -> bool:
    """Whether there are no dicts but plain ones in `value`, at any depth."""
    if isinstance(value, dict):
        return type(value) is dict and all(map(is_plain, value.values()))
    return True


# LiveState and the merge of `datasets`


def test_the_merge_takes_every_known_value() -> None:
    state = saved(position=137, chunk_rows=512)
    reader = Reader()
    reader.load_state_dict(state)
    assert reader._state_dict == state
    check(reader._state_dict)


def test_the_merge_reaches_the_live_dict_itself() -> None:
    reader = Reader()
    reader._init_state_dict()
    reader.load_state_dict(saved(position=137))
    live = reader._state_dict
    live["position"] += 1
    assert reader.state_dict()["position"] == 138


@pytest.mark.parametrize("value", [7, "text", None, {"a": 1}, [1, 2]])
def test_the_merge_takes_over_unknown_keys_at_any_depth(value: Any) -> None:
    state = saved(later=value)
    state["fingerprint"]["later"] = value
    state["part"]["later"] = value
    reader = Reader()
    reader.load_state_dict(state)
    assert reader._state_dict == state


def test_an_unknown_fingerprint_field_is_refused_by_name_after_the_merge() -> None:
    state = saved()
    state["fingerprint"]["mixture"] = "a+b"
    reader = Reader()
    reader.load_state_dict(state)
    with pytest.raises(ValueError, match=r"mixture: saved 'a\+b', now None"):
        check(reader._state_dict)


def test_a_later_format_is_refused_after_the_merge() -> None:
    reader = Reader()
    reader.load_state_dict(saved(state_version=STATE_VERSION + 1, cursor={"split": [1, 2]}))
    with pytest.raises(ValueError, match="newer hf_lance_stream"):
        check(reader._state_dict)


def test_the_merge_keeps_the_live_value_of_a_missing_key() -> None:
    state = saved(position=137)
    del state["chunk_rows"], state["fingerprint"]["tail"]
    reader = Reader()
    reader.load_state_dict(state)
    assert reader._state_dict == saved(position=137)


def test_the_merge_works_below_a_wrapper() -> None:
    wrapper = Wrapper()
    state = wrapper._init_state_dict()
    state = through_json(state)
    state["examples_iterable"] |= {"position": 137, "later": {"a": 1}}
    wrapper = Wrapper()
    wrapper.load_state_dict(state)
    assert wrapper._state_dict == state
    assert next(find_states(wrapper._state_dict))["position"] == 137


def test_the_merge_shares_nothing_with_the_saved_state() -> None:
    state = saved(later={"a": 1})
    reader = Reader()
    reader.load_state_dict(state)
    reader._state_dict["fingerprint"]["rows"] = 5
    reader._state_dict["later"]["a"] = 2
    assert state["fingerprint"]["rows"] == 1000
    assert state["later"] == {"a": 1}


@pytest.mark.parametrize("copy", [deepcopy, _fast_copy])
def test_copies_are_plain_dicts_that_share_nothing(copy: Any) -> None:
    live = new_state(FINGERPRINT, PART)
    copied = copy({"examples_iterable": live, "epoch": 0})
    assert is_plain(copied)
    assert copied["examples_iterable"] == live
    live["position"] = 5
    live["fingerprint"]["rows"] = 5
    assert copied["examples_iterable"]["position"] == 0
    assert copied["examples_iterable"]["fingerprint"]["rows"] == 1000


def test_what_datasets_saves_of_a_reader_is_plain() -> None:
    reader = Reader()
    reader.load_state_dict(saved())
    assert is_plain(reader.state_dict())


def test_a_key_that_is_missing_reads_as_none_and_is_not_stored() -> None:
    live = LiveState(a=1)
    assert live["b"] is None
    assert live == {"a": 1}
    assert live.get("b", "default") == "default"


def test_a_live_state_survives_pickling() -> None:
    live = new_state(FINGERPRINT, PART)
    again = pickle.loads(pickle.dumps(live))
    assert again == live
    assert again["unknown"] is None


@settings(deadline=None)
@given(
    values=st.dictionaries(st.text(max_size=5), scalars | st.lists(scalars, max_size=3), max_size=4)
)
def test_json_gives_a_state_back(values: dict[str, Any]) -> None:
    live = new_state(values, values)
    assert through_json(live) == live


# new_state


def test_a_new_state_stands_at_the_start_and_is_accepted() -> None:
    state = new_state(FINGERPRINT, PART)
    assert (state["position"], state["type"], state["state_version"]) == (0, STATE_TYPE, 1)
    check(state)


def test_a_new_state_does_not_share_its_arguments() -> None:
    fingerprint, part = dict(FINGERPRINT), dict(PART)
    state = new_state(fingerprint, part)
    state["fingerprint"]["rows"] = state["part"]["start"] = 5
    assert (fingerprint, part) == (FINGERPRINT, PART)


def test_a_state_stays_small_with_many_columns_and_a_long_filter() -> None:
    values = FINGERPRINT | {
        "table": "s3://" + "bucket-and-a-long-prefix/" * 40,
        "version": 2**63,
        "columns": [f"a_rather_long_column_name_{i}" for i in range(300)],
        "filter": " OR ".join(f"label = 'value {i}'" for i in range(230)),
        "rows": 10**12,
        "shuffle_seed": 2**64 - 1,
        "epoch": 2**64 - 1,
    }
    assert len(values["filter"]) > 5000
    fingerprint = {name: fingerprint_text(value) for name, value in values.items()}
    state = new_state(fingerprint, {"start": 10**6, "stop": 10**7, "ranges": "0" * 16})
    state |= {"position": 10**12, "chunk_rows": 4096}
    assert len(json.dumps(state)) < 2048


def test_a_state_stays_small_with_texts_just_short_enough_to_be_kept() -> None:
    texts = dict.fromkeys(("table", "columns", "filter"), "x" * 298)
    fingerprint = {name: fingerprint_text(v) for name, v in (FINGERPRINT | texts).items()}
    assert {name: fingerprint[name] for name in texts} == texts
    assert len(json.dumps(new_state(fingerprint, PART))) < 2048


# fingerprint_text


@pytest.mark.parametrize("value", [None, 0, 5, 2**64 - 1, True, "", "label != 3", "x" * 298])
def test_short_scalars_stay_as_they_are(value: Any) -> None:
    assert fingerprint_text(value) is value


def test_lists_become_json() -> None:
    assert fingerprint_text(["id", 'a "b"']) == '["id", "a \\"b\\""]'


def test_a_text_of_more_than_300_characters_is_shortened() -> None:
    assert len(fingerprint_text("x" * 301)) < 140


def test_a_state_stays_small_with_any_text() -> None:
    texts = dict.fromkeys(("table", "columns", "filter"), "名" * 285)
    fingerprint = {name: fingerprint_text(v) for name, v in (FINGERPRINT | texts).items()}
    assert len(json.dumps(new_state(fingerprint, PART))) < 2048


def test_a_long_text_is_shortened_to_its_beginning_length_and_digest() -> None:
    text = "label = 1 OR " * 100
    short = fingerprint_text(text)
    assert short.startswith(text[:40])
    assert "(1300 characters, sha256 " in short
    assert len(short) < 140


def test_long_texts_that_differ_anywhere_stay_different() -> None:
    texts = ["x" * 1000, "x" * 999 + "y", "x" * 500 + "y" + "x" * 499, "x" * 1001, "y" * 1000]
    columns = [[*map(str, range(300))], [*map(str, range(299)), "last"]]
    assert len({fingerprint_text(value) for value in [*texts, *columns]}) == 7
    assert fingerprint_text("x" * 1000) == fingerprint_text("x" * 1000)


# find_states


def test_finds_every_state_in_nested_dicts_lists_and_tuples() -> None:
    first, second, third, fourth = (saved(position=i) for i in range(4))
    loader = {
        "_snapshot": {
            "_worker_snapshots": {
                "worker_0": {"dataset_state": {"examples_iterable": first, "epoch": 0}},
                "worker_1": {"dataset_state": {"examples_iterables": [second, {"x": (third,)}]}},
            },
            "_main_snapshot": {"count": 3, "sampler": None},
        },
        "other": [1, "text", None, fourth],
    }
    assert list(find_states(loader)) == [first, second, third, fourth]


def test_finds_a_bare_state_and_a_live_one() -> None:
    live = new_state(FINGERPRINT, PART)
    assert list(find_states(live)) == [live]
    assert next(find_states([live])) is live


def test_does_not_look_for_states_inside_a_state() -> None:
    outer = saved(later=saved())
    assert list(find_states(outer)) == [outer]


@pytest.mark.parametrize(
    "state", [None, {}, [], "text", 5, {"type": "ArrowExamplesIterable", "position": 3}]
)
def test_finds_nothing_where_there_is_none(state: Any) -> None:
    assert list(find_states(state)) == []


# check_version


@pytest.mark.parametrize("version", [None, "1", 1.0, True, 0, -1, [1]])
def test_what_is_no_version_is_refused(version: Any) -> None:
    message = re.escape(f"not a state of hf_lance_stream: `state_version` is {version!r}")
    with pytest.raises(ValueError, match=message):
        check_version(saved(state_version=version))


def test_a_missing_version_is_refused() -> None:
    state = saved()
    del state["state_version"]
    with pytest.raises(ValueError, match="`state_version` is None"):
        check(state)


def test_a_newer_version_is_refused_with_both_versions_and_the_way_out() -> None:
    message = "its `state_version` is 2, this release reads up to 1; upgrade hf_lance_stream"
    with pytest.raises(ValueError, match=message):
        check(saved(state_version=2))


def test_a_newer_version_is_refused_before_fields_it_may_lack() -> None:
    with pytest.raises(ValueError, match="newer hf_lance_stream"):
        check({"type": STATE_TYPE, "state_version": 2})


# differences and check_state


def test_a_state_that_fits_is_accepted() -> None:
    check(saved())
    assert differences(saved(), FINGERPRINT) == []


OTHER_VALUES = {
    "table": "other.lance",
    "version": 4,
    "filter": "label != 3",
    "columns": '["id"]',
    "rows": 999,
    "num_splits": None,
    "shuffle_seed": 43,
    "shuffle_clump_size": 1,
    "tail": "pad",
    "epoch": 2,
    "order_version": 2,
}


@pytest.mark.parametrize("name", FINGERPRINT)
def test_each_field_that_differs_is_named_with_saved_and_current_value(name: str) -> None:
    state = saved()
    state["fingerprint"][name] = OTHER_VALUES[name]
    line = f"{name}: saved {OTHER_VALUES[name]!r}, now {FINGERPRINT[name]!r}"
    with pytest.raises(ValueError, match=rf"\n  {re.escape(line)}\n"):
        check(state)
    assert differences(state, FINGERPRINT) == [line]


def test_all_fields_that_differ_are_named_at_once() -> None:
    state = saved(fingerprint=OTHER_VALUES)
    assert [line.split(":")[0] for line in differences(state, FINGERPRINT)] == [*FINGERPRINT]


def test_a_field_that_only_one_side_has_is_named() -> None:
    state = saved()
    del state["fingerprint"]["tail"]
    state["fingerprint"]["mixture"] = "a+b"
    assert differences(state, FINGERPRINT) == [
        "tail: saved None, now 'drop'",
        "mixture: saved 'a+b', now None",
    ]


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_an_equal_value_of_another_type_differs(value: Any) -> None:
    state = saved()
    state["fingerprint"]["epoch"] = value
    assert differences(state, FINGERPRINT) == [f"epoch: saved {value!r}, now 1"]


def test_another_table_version_comes_with_the_argument_to_pass() -> None:
    state = saved()
    state["fingerprint"]["version"] = 2
    with pytest.raises(ValueError, match=r"here with version=2, or call .*strict=False"):
        check(state)


def test_other_differences_do_not_advise_a_version() -> None:
    state = saved()
    state["fingerprint"]["order_version"] = 2
    with pytest.raises(ValueError, match="order_version: saved 2, now 1") as error:
        check(state)
    assert "with version=" not in str(error.value)


@pytest.mark.parametrize("name", ["fingerprint", "part"])
@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_damaged_fingerprint_or_part_is_refused(name: str, value: Any) -> None:
    message = re.escape(f"the state is damaged: `{name}` must be a dict: got {value!r}")
    with pytest.raises(ValueError, match=message):
        check(saved(**{name: value}))


@pytest.mark.parametrize("position", [0, 1, MAX_LENGTH])
def test_positions_of_any_table_are_accepted(position: int) -> None:
    check(saved(position=position))


@pytest.mark.parametrize("position", [-1, MAX_LENGTH + 1, 2**70, None, "5", 5.0, True, [5]])
def test_a_position_out_of_range_or_of_another_type_is_refused(position: Any) -> None:
    message = re.escape(f"`position` must be an integer in [0, {MAX_LENGTH}]: got {position!r}")
    with pytest.raises(ValueError, match=f"the state is damaged: {message}"):
        check(saved(position=position))


def test_a_missing_position_is_refused() -> None:
    state = saved()
    del state["position"]
    with pytest.raises(ValueError, match="`position` must be an integer"):
        check(state)


@pytest.mark.parametrize("chunk_rows", [None, 1, 4096])
def test_chunk_rows_may_be_none_or_positive(chunk_rows: int | None) -> None:
    check(saved(chunk_rows=chunk_rows))


@pytest.mark.parametrize("chunk_rows", [0, -1, "5", 5.0, True])
def test_damaged_chunk_rows_are_refused(chunk_rows: Any) -> None:
    message = re.escape(f"got {chunk_rows!r}")
    with pytest.raises(ValueError, match=f"the state is damaged: `chunk_rows` must be .*{message}"):
        check(saved(chunk_rows=chunk_rows))


# Counts


counts = st.lists(st.integers(0, MAX_LENGTH), min_size=1, max_size=20)


@settings(deadline=None)
@given(counts=counts)
def test_counts_survive_as_json(counts: list[int]) -> None:
    text = through_json(counts_to_text(np.array(counts)))
    back = counts_from_text(text, len(counts))
    assert (back is None) == (not any(counts))
    assert back is None or (back.dtype == np.int64 and back.tolist() == counts)


def test_equal_counts_are_one_number() -> None:
    assert counts_to_text(np.array([7] * 48)) == 7
    assert counts_to_text(np.zeros(48, dtype=np.int64)) is None
    assert counts_to_text(np.array([7, 8])) == "7+0,1"


def test_uneven_counts_take_few_bytes_a_split() -> None:
    text = counts_to_text(10**12 + np.arange(1000) % 2000)
    assert len(json.dumps(text)) <= 8 * 1000 + 2


@pytest.mark.parametrize(
    "value",
    [
        "1+1,2",
        "1,2,3",
        "0+1,2,3,4",
        "0+1,x,3",
        "",
        "1+",
        "+1,2,3",
        -1,
        "0+1,-2,3",
        1.5,
        True,
        [1],
        {},
    ],
)
def test_damaged_counts_are_refused(value: Any) -> None:
    message = "`consumed` must be None, a count, or 3 counts as 'least+more,more,…': got "
    with pytest.raises(ValueError, match=re.escape(message)):
        counts_from_text(value, 3)
