"""Whatever is handed to the readers of states and to the command line: an answer or a clear error.

No other exception than the documented ones, no hang, no memory that the input asks for, and
nothing is opened, started or unpickled because a state says so.
"""

import copy
import json
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import make_table, through_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hf_lance_stream as hls
from hf_lance_stream import cli
from hf_lance_stream.checkpoint import STATE_NAME, read_states, write_states
from hf_lance_stream.rank_states import RankStates

SECONDS = 5  # that one call may take on a busy machine; a state that asks for work takes for ever
MEGABYTES = 200  # that all calls may take
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "90"))  # of each test; more in a campaign
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
FEW = settings(FUZZ, max_examples=max(1, EXAMPLES // 3))
BAIT = "/bait/of/a/state"  # a path that only states name

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 7, 99, 100, 101, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)]
)
COUNTS = ["", "0", "x", "0+", "+1", "0+1", "0+1,1,1,1", "1e9", "0+-1,1,1,1", "²+1,1,1,1"]
LONG = ["9" * 5000, "0+" + "1," * 5000 + "1", "0+" + ",".join(["9" * 30] * 4), "[" * 3000]
TEXTS = st.sampled_from(
    [*COUNTS, *LONG, "null", "drop", "[1, 2]", BAIT, f"s3:/{BAIT}", "\x00", "\ud800"]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.integers(),
    st.floats(),
    TEXTS,
    st.text(max_size=8),
)
WORDS = st.sampled_from(
    [
        "type",
        "examples_iterable",
        "epoch",
        "position",
        "consumed",
        "part",
        "fingerprint",
        "loader",
        "state_version",
        "_snapshot",
        "_worker_snapshots",
        "dataset_state",
        "version",
        "states",
        "table",
        "ex_iterables",
        "previous_state",
        "num_workers",
        "_steps_since_snapshot",
        "worker",
    ]
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)


def deep(depth: int) -> Any:
    state: Any = {}
    for _ in range(depth):
        state = {"type": "MappedExamplesIterable", "examples_iterable": [state]}
    return {"examples_iterable": state, "epoch": 0}


# What a call may do.

_watch: list[tuple[str, str]] | None = None  # what is opened or unpickled now, where it is watched
_EVENTS = {"open", "pickle.find_class", "os.listdir", "os.scandir", "subprocess.Popen", "exec"}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch is not None and (event in _EVENTS or event.startswith(("socket.", "os.exec"))):
        _watch.append((event, repr(arguments)))


sys.addaudithook(_audit)


@contextmanager
def bounded(*allowed: str) -> Iterator[None]:
    """Little time; nothing unpickled; no file opened, except those whose names have `allowed`."""
    global _watch
    _watch, begin = [], time.monotonic()
    try:
        yield
    finally:
        seen, _watch = _watch, None
    assert time.monotonic() - begin < SECONDS
    bad = [
        (event, what)
        for event, what in seen
        if BAIT in what or not any(name in what for name in (*allowed, ".py", "/proc/self"))
    ]
    assert not bad, bad


@pytest.fixture(autouse=True, scope="module")
def memory() -> Iterator[None]:
    """All calls of a module together take little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES * 1024


def answered(call: Callable[[], Any], *allowed: str) -> bool:
    """Whether a call took its input; if not, it raised a documented error with some words."""
    text = None
    try:
        with bounded(*allowed):
            call()
    except (ValueError, FileNotFoundError) as error:
        text = str(error)
    assert text is None or 10 < len(text) < 20_000, text
    return text is None


# The states.


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_table(tmp_path_factory.mktemp("table") / "t.lance", 100, 25)


def dataset(path: str) -> Any:
    return hls.from_lance(path, num_splits=4, shuffle_seed=1, shuffle_clump_size=4)


def natural(path: str) -> Any:
    return hls.from_lance(path)


def mapped(path: str) -> Any:
    return dataset(path).map(dict).with_format("torch")


def filtered(path: str) -> Any:
    return dataset(path).filter(bool)


DATASETS = [dataset, natural, mapped, filtered]


def valid(make: Callable[[str], Any], path: str, kind: str) -> Any:
    """A state in mid-epoch, as JSON gives it back."""
    ds = make(path)
    if kind == "dataset":
        rows = iter(ds)
        for _ in range(10):
            next(rows)
        return through_json(ds.state_dict())
    loader = hls.stateful_dataloader(ds, batch_size=4)
    batches = iter(loader)
    next(batches)
    return through_json(RankStates(loader).state_dict() if kind == "rank" else loader.state_dict())


def places(state: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys to every value in a nested state."""
    inside: Any = ()
    if isinstance(state, dict | list):
        inside = state.items() if isinstance(state, dict) else enumerate(state)
    return [at, *(place for key, value in inside for place in places(value, (*at, key)))]


def changed(state: Any, place: tuple[Any, ...], how: str, value: Any) -> Any:
    """A copy with one value replaced, left out, or with one more beside it."""
    if not place:
        return value if how == "replace" else state
    new = copy.deepcopy(state)
    parent = new
    for key in place[:-1]:
        parent = parent[key]
    if how == "replace":
        parent[place[-1]] = value
    elif how == "drop":
        del parent[place[-1]]
    elif isinstance(parent, dict):
        parent[f"{place[-1]}2"] = value
    else:
        parent.append(value)
    return new


def mutations(state: Any) -> st.SearchStrategy[Any]:
    """The state with one to three changes."""

    @st.composite
    def draw_one(draw: Any) -> Any:
        new = state
        for _ in range(draw(st.integers(1, 3))):
            place = draw(st.sampled_from(places(new)))
            how = draw(st.sampled_from(["replace", "replace", "replace", "drop", "add"]))
            new = changed(new, place, how, draw(JSON))
        return new

    return draw_one()


def read_some(ds: Any) -> None:
    """Read after a load: what is checked late is a ValueError too."""
    for number, _ in enumerate(ds):
        if number > 3:
            break


# A dataset.


@FUZZ
@given(state=JSON)
def test_any_json_loaded_into_a_dataset_is_refused(path: str, state: Any) -> None:
    assert not answered(lambda: dataset(path).load_state_dict(state), path)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make", DATASETS)
def test_a_changed_state_is_refused_or_read(
    path: str, make: Any, strict: bool, recwarn: Any
) -> None:
    state = valid(make, path, "dataset")
    taken = []

    @FEW
    @given(state=mutations(state))
    def check(state: Any) -> None:
        ds = make(path)

        def load() -> None:
            ds.load_state_dict(state, strict=strict)
            read_some(ds)

        if answered(load, path):
            taken.append(1)

    check()
    assert answered(lambda: make(path).load_state_dict(state), path)
    assert not strict or len(taken) < EXAMPLES // 3


def test_every_single_value_of_a_state_replaced_by_odd_ones(path: str) -> None:
    state = valid(dataset, path, "dataset")
    odd = [None, True, -1, 2**63, 10**30, math.nan, math.inf, "", BAIT, "0+1", [], {}, [[]], [{}]]
    refused = 0
    for place in places(state):
        for value in odd:
            new, ds = changed(state, place, "replace", value), dataset(path)

            def load(ds: Any = ds, new: Any = new) -> None:
                ds.load_state_dict(new)
                read_some(ds)

            refused += not answered(load, path)
    assert refused > len(places(state)) * len(odd) * 0.8


@pytest.mark.parametrize("depth", [100, 10_000, 200_000])
def test_a_deep_state_is_refused(path: str, depth: int) -> None:
    state = deep(depth)
    assert not answered(lambda: dataset(path).load_state_dict(state), path)
    assert not answered(lambda: hls.merge_state_dicts([state]), path)
    while state:  # else its end is deep too
        state = state.pop("examples_iterable", None)
        state = state[0] if isinstance(state, list) else state


# A loader, merging, ranks.


@FEW
@given(state=JSON)
def test_any_json_loaded_into_a_loader_is_refused(path: str, state: Any) -> None:
    loader = hls.stateful_dataloader(dataset(path), batch_size=4)
    taken = answered(lambda: loader.load_state_dict(state), path)
    assert taken == (state == {})  # which lets go of what was loaded


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [dataset, filtered])
def test_a_changed_state_of_a_loader_is_refused_or_taken(
    path: str, make: Any, num_workers: int, recwarn: Any
) -> None:
    state = valid(make, path, "loader")
    if num_workers and make is filtered:  # torchdata's, which no process needs to have made
        inner = {name: state[name] for name in ("examples_iterable", "epoch")}
        snapshots = {f"worker_{i}": {"dataset_state": inner} for i in range(num_workers)}
        state = {"_snapshot": {"_worker_snapshots": snapshots}, "_steps_since_snapshot": 0}

    @FEW
    @given(state=mutations(state))
    def check(state: Any) -> None:
        loader = hls.stateful_dataloader(make(path), batch_size=4, num_workers=num_workers)
        answered(lambda: loader.load_state_dict(state), path)

    check()


@FUZZ
@given(states=JSON, level=st.booleans())
def test_any_json_merged_is_refused(states: Any, level: bool) -> None:
    assert not answered(lambda: hls.merge_state_dicts(states, all_ranks_level=level))


@pytest.mark.parametrize("kind", ["dataset", "loader"])
@pytest.mark.parametrize("make", DATASETS)
def test_changed_states_are_merged_or_refused(path: str, make: Any, kind: str) -> None:
    state = valid(make, path, kind)

    @FEW
    @given(first=mutations(state), second=mutations(state), level=st.booleans())
    def check(first: Any, second: Any, level: bool) -> None:
        for some in ([first], [first, second], [state, second]):
            answered(lambda some=some: hls.merge_state_dicts(some, all_ranks_level=level))

    check()


def test_changed_states_of_ranks_are_loaded_or_refused(path: str) -> None:
    state = valid(dataset, path, "rank")

    @FUZZ
    @given(state=JSON | mutations(state))
    def check(state: Any) -> None:
        loader = hls.stateful_dataloader(dataset(path), batch_size=4)
        answered(lambda: RankStates(loader).load_state_dict(state), path)

    check()
    loader = hls.stateful_dataloader(dataset(path), batch_size=4)
    assert answered(lambda: RankStates(loader).load_state_dict(state), path)


def test_a_state_of_as_many_splits_as_a_number_can_have_takes_no_memory(path: str) -> None:
    state = valid(dataset, path, "dataset")
    inner = state["examples_iterable"]
    while inner["type"] != "LanceExamplesIterable":
        inner = inner["examples_iterable"]
    inner["fingerprint"] |= {"rows": 2**62, "num_splits": 2**61}
    inner["part"] |= {"stop": 2**61}
    assert not answered(lambda: hls.merge_state_dicts([state]))


# The file of a checkpoint.


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="hls_fuzz_"))
    yield directory
    shutil.rmtree(directory)


@FUZZ
@given(content=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_file_of_a_checkpoint_is_refused(checkpoint: Path, content: bytes) -> None:
    (checkpoint / STATE_NAME).write_bytes(content)
    assert not answered(lambda: read_states(checkpoint, 3), str(checkpoint))


def test_a_changed_file_of_a_checkpoint_is_refused(checkpoint: Path) -> None:
    write_states(checkpoint, {"states": [{"a": 1}], "global_step": 3})
    good = (checkpoint / STATE_NAME).read_bytes()
    assert read_states(checkpoint, 3)["states"] == [{"a": 1}]

    @FUZZ
    @given(place=st.integers(0, len(good) - 1), byte=st.integers(0, 255), cut=st.booleans())
    def check(place: int, byte: int, cut: bool) -> None:
        new = good[:place] if cut else good[:place] + bytes([byte]) + good[place + 1 :]
        (checkpoint / STATE_NAME).write_bytes(new)
        if json_or_none(new) != json.loads(good):
            assert not answered(lambda: read_states(checkpoint, 3), str(checkpoint))

    check()


def json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, '{"sha256": ' + "9" * 9999])
def test_a_hostile_file_of_a_checkpoint_is_refused(checkpoint: Path, content: str) -> None:
    (checkpoint / STATE_NAME).write_text(content)
    assert not answered(lambda: read_states(checkpoint, 3), str(checkpoint))


def test_a_pickle_in_place_of_the_file_is_not_unpickled(checkpoint: Path) -> None:
    content = b"cos\nsystem\n(S'touch " + str(checkpoint).encode() + b"/hacked'\ntR."
    (checkpoint / STATE_NAME).write_bytes(content)
    assert not answered(lambda: read_states(checkpoint, 3), str(checkpoint))
    assert not (checkpoint / "hacked").exists()


# The command line.

ODD = [
    "://",
    "a=b",
    "=",
    "-",
    "--",
    "-1",
    "0",
    "3",
    "2.5",
    "1e9",
    "nan",
    "%s",
    "{}",
    "ümlaut 表",
    "s3://",
    "/none/x.lance",
]
COMMANDS = ["demo", "inspect", "plan", "order", "check", "bench", "convert"]
OPTIONS = [
    "--help",
    "--version",
    "--keep",
    "--keep=",
    "--state",
    "--num-splits",
    "--batch-size",
    "--json",
    "--world-size",
    "--filter",
    "--columns",
    "--storage-option",
    "--shuffle-seed",
    "--epoch",
    "--tail",
]
ARGUMENTS = st.sampled_from(
    [*ODD, "\x00", "\udcff", *COMMANDS, *OPTIONS, "9" * 30, "x" * 5000]
) | st.text(max_size=6)
TERMINAL: dict[str, Any] = {"errors": "backslashreplace"}  # as standard error is


@FUZZ
@given(argv=st.lists(ARGUMENTS, max_size=6))
def test_any_arguments_end_with_a_message_and_an_exit_code(argv: list[str]) -> None:
    home = os.getcwd()
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr("hf_lance_stream.demo.run", lambda *_, **__: 0)  # fifteen seconds each
        with Path("out").open("w+", **TERMINAL) as out, Path("err").open("w+", **TERMINAL) as err:
            patch.setattr("sys.stdout", out)
            patch.setattr("sys.stderr", err)
            try:
                code = cli.main(argv)
            except SystemExit as end:
                code = end.code
            for file in (out, err):
                file.seek(0)
            said, complained = out.read(), err.read()
    assert os.getcwd() == home
    assert code in (0, 1, 2), (argv, code)
    assert "Traceback" not in complained
    assert code == 0 or complained.strip() or said.strip()
