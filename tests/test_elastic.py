"""The same global steps on any number of ranks and workers, and states that move between them.

Workers are simulated in this process (`in_process`) where many are needed; what torchdata's own
states look like is taken from real ones.
"""

import itertools
import multiprocessing
import pickle
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import islice, pairwise, zip_longest

import oracle
import pytest
from datasets import Value, interleave_datasets
from datasets.distributed import split_dataset_by_node
from helpers import ids, make_table, through_json
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from in_process import in_process_workers
from torchdata.stateful_dataloader import StatefulDataLoader

import hf_lance_stream as hls
from hf_lance_stream.splits import TAILS

multiprocessing.set_forkserver_preload(["torch", "datasets", "lance", "hf_lance_stream"])

WORLD_SIZES = [1, 2, 3, 4, 8, 24]
WORKERS = [0, 1, 2, 3, 5]
GRID = {"num_splits": 24, "shuffle_seed": 1, "shuffle_clump_size": 16}
GLOBAL_BATCH = 48


def batches(loader):
    return [batch["id"].tolist() for batch in loader]


def some(iterator, count):
    return [batch["id"].tolist() for batch in islice(iterator, count)]


def global_steps(ranks):
    """The rows of every global step, sorted, from the batches of all ranks."""
    return [
        sorted(i for batch in step for i in batch) for step in zip_longest(*ranks, fillvalue=[])
    ]


def rank_loader(ds, world_size, rank, workers, global_batch=GLOBAL_BATCH):
    return hls.stateful_dataloader(
        ds.shard(world_size, rank), global_batch // world_size, num_workers=workers
    )


# The grid.


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A dataset whose epoch is 50 steps of 48 rows, and the rows of each."""
    path = make_table(tmp_path_factory.mktemp("grid") / "t.lance", 2400, 350)
    splits = oracle.cut(oracle.sequence(2400, 16, 1, 0), 24, "drop")
    steps = [sorted(i for split in splits for i in split[t : t + 2]) for t in range(0, 100, 2)]
    return hls.from_lance(path, **GRID), steps


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_grid_of_world_sizes_and_workers(grid, world_size):
    ds, steps = grid
    ranks = []
    with in_process_workers():
        for rank in range(world_size):
            alone, *others = [
                batches(rank_loader(ds, world_size, rank, workers)) for workers in WORKERS
            ]
            assert all(other == alone for other in others), f"rank {rank}"
            ranks.append(alone)
    assert [len(rank) for rank in ranks] == [50] * world_size
    assert global_steps(ranks) == steps


@pytest.mark.parametrize("make", [0, 1, 2])
def test_every_way_to_divide_among_ranks_is_the_same(grid, make):
    ds, _ = grid

    def divided(rank):
        path = ds._ex_iterable.source.name.removeprefix("file://")
        return [
            lambda: hls.from_lance(path, **GRID, rank=rank, world_size=4),
            lambda: split_dataset_by_node(ds, rank=rank, world_size=4),
            lambda: split_dataset_by_node(ds.map(_same), rank=rank, world_size=4),
        ][make]()

    with in_process_workers():
        for rank in range(4):
            expected = batches(rank_loader(ds, 4, rank, 0))
            for workers in (0, 3):
                assert batches(hls.stateful_dataloader(divided(rank), 12, workers)) == expected


def _same(row):
    return row


def test_steps_after_any_chain_of_world_sizes_are_those_of_one_process(grid):
    ds, steps = grid
    found, state = [], None
    chain = zip(
        [1, 24, 3, 8, 2, 4, 1], [2, 0, 5, 1, 3, 2, 0], [7, 1, 11, 0, 13, 2, 50], strict=True
    )
    with in_process_workers():
        for world_size, workers, stop in chain:
            ranks, states = [], []
            for rank in range(world_size):
                loader = rank_loader(ds, world_size, rank, workers)
                if state is not None:
                    loader.load_state_dict(state)
                ranks.append(some(iter(loader), stop))
                states.append(through_json(loader.state_dict()))
            found += global_steps(ranks)
            state = through_json(hls.merge_state_dicts(states[::-1]))
    assert found == steps


def test_natural_shards_have_the_same_batches_for_any_workers(tmp_path):
    table = make_table(tmp_path / "t.lance", 101, 17)
    with in_process_workers():
        for ds in (hls.from_lance(table), hls.from_lance(table).shard(3, 1)):
            alone, *others = [batches(hls.stateful_dataloader(ds, 8, n)) for n in WORKERS]
            assert all(other == alone for other in others)


# Chains, against a model in plain lists.


@dataclass
class Model:
    """An epoch in plain lists, and how much of each split has been delivered."""

    splits: list[list[int]]
    consumed: list[int]

    def places(self, start, stop):
        """(cycle, split) of what a reader of these splits yields from here on."""
        return sorted(
            (cycle, split)
            for split in range(start, stop)
            for cycle in range(self.consumed[split], len(self.splits[split]))
        )

    def batches(self, start, stop, batch_size, workers):
        """Batches of places; of several workers, each has its part of the splits."""
        size = (stop - start) // workers
        readers = [self.places(start + w * size, start + (w + 1) * size) for w in range(workers)]
        cut = [[r[i : i + batch_size] for i in range(0, len(r), batch_size)] for r in readers]
        return [batch for turn in zip_longest(*cut) for batch in turn if batch is not None]

    def rows(self, batches):
        return [[self.splits[split][cycle] for cycle, split in batch] for batch in batches]

    def deliver(self, batches):
        for cycle, split in itertools.chain(*batches):
            self.consumed[split] = max(self.consumed[split], cycle + 1)


@dataclass(frozen=True)
class Topology:
    """Ranks and workers, and after how many batches each rank stops."""

    world_size: int
    workers: int
    batch_size: int
    by: str
    stops: tuple[int, ...]

    def run(self, ds, state, model):
        """Deliver and check batches; the merged state after them."""
        states = []
        size = len(model.splits) // self.world_size
        for rank, stop in enumerate(self.stops):
            loader = self.loader(ds.shard(self.world_size, rank), state)
            start = rank * size
            shared = self.workers if self.by == "split" and self.workers else 1
            expected = model.batches(start, start + size, self.batch_size, shared)
            iterator = iter(loader)
            assert some(iterator, stop) == model.rows(expected[:stop]), f"rank {rank}"
            model.deliver(expected[:stop])
            states.append(through_json(loader.state_dict()))
        merged = hls.merge_state_dicts(states)
        assert through_json(hls.merge_state_dicts([merged])) == through_json(merged)
        return through_json(merged)

    def loader(self, ds, state):
        if self.by == "loader":
            loader = hls.stateful_dataloader(ds, self.batch_size, self.workers)
            if state is not None:
                loader.load_state_dict(state)
            return loader
        if self.by == "batch":
            ds = ds.with_batches(self.batch_size)
        if state is not None:
            ds.load_state_dict(state)
        return torchdata_loader(ds, self.batch_size, self.workers)


def torchdata_loader(ds, batch_size, workers, **options):
    if workers:
        options["multiprocessing_context"] = "forkserver"
    return StatefulDataLoader(ds, batch_size=batch_size, num_workers=workers, **options)


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def topologies(draw, num_splits):
    world_size = draw(st.sampled_from([d for d in divisors(num_splits) if d <= 8]))
    by = draw(st.sampled_from(["loader", "batch", "split"]))
    workers = draw(st.sampled_from(WORKERS))
    if by == "split" and workers and num_splits // world_size % workers:
        workers = max(d for d in divisors(num_splits // world_size) if d <= workers)
    return Topology(
        world_size=world_size,
        workers=workers,
        batch_size=draw(st.integers(1, 20)),
        by=by,
        stops=tuple(draw(st.integers(0, 8)) for _ in range(world_size)),
    )


@st.composite
def tables(draw):
    rows = draw(st.integers(1, 400))
    fragment = draw(st.integers(max(1, rows // 12), rows))
    num_splits = draw(st.sampled_from([s for s in (1, 2, 4, 6, 12, 24, 48) if s <= rows]))
    return rows, fragment, num_splits, draw(st.integers(1, 40)), draw(st.sampled_from(TAILS))


chains = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@chains
@given(st.data(), tables(), st.sampled_from([None, 0, 2**64 - 1]), st.integers(0, 3))
def test_case_11_chains_of_topologies_lose_and_repeat_nothing(data, table, seed, epoch):
    rows, fragment, num_splits, clump, tail = table
    chain = [data.draw(topologies(num_splits)) for _ in range(3)]
    splits = oracle.cut(oracle.sequence(rows, clump, seed, epoch), num_splits, tail)
    model = Model(splits, [0] * num_splits)
    with tempfile.TemporaryDirectory() as directory, in_process_workers():
        ds = hls.from_lance(
            make_table(f"{directory}/t.lance", rows, fragment),
            num_splits=num_splits,
            shuffle_seed=seed,
            shuffle_clump_size=clump,
            tail=tail,
            epoch=epoch,
        )
        state = None
        for topology in chain:
            state = topology.run(ds, state, model)
        ds.load_state_dict(state)
        rest = oracle.rest(splits, model.consumed)
        assert ids(ds) == rest
        seen = [row for s, n in zip(splits, model.consumed, strict=True) for row in s[:n]]
        assert Counter(seen + rest) == Counter(row for split in splits for row in split)
        assert ids(ds) == oracle.deal(splits)  # and the next epoch is whole


@chains
@given(st.data(), tables(), st.integers(1, 4))
def test_case_11_steps_of_a_fixed_global_batch_are_those_of_one_run(data, table, cycles):
    rows, fragment, num_splits, clump, tail = table
    global_batch = cycles * num_splits
    splits = oracle.cut(oracle.sequence(rows, clump, 7, 0), num_splits, tail)
    length = max(map(len, splits))
    expected = [
        sorted(row for split in splits for row in split[t : t + cycles])
        for t in range(0, length, cycles)
    ]
    found, state = [], None
    with tempfile.TemporaryDirectory() as directory, in_process_workers():
        ds = hls.from_lance(
            make_table(f"{directory}/t.lance", rows, fragment),
            num_splits=num_splits,
            shuffle_seed=7,
            shuffle_clump_size=clump,
            tail=tail,
        )
        for last in (False, False, True):
            world_size = data.draw(st.sampled_from([d for d in divisors(num_splits) if d <= 8]))
            workers = data.draw(st.sampled_from(WORKERS))
            stop = len(expected) + 1 if last else data.draw(st.integers(0, len(expected)))
            ranks, states = [], []
            for rank in range(world_size):
                loader = rank_loader(ds, world_size, rank, workers, global_batch)
                if state is not None:
                    loader.load_state_dict(state)
                ranks.append(some(iter(loader), stop))
                states.append(through_json(loader.state_dict()))
            found += global_steps(ranks)
            state = through_json(hls.merge_state_dicts(states))
    assert found == expected


@pytest.mark.parametrize("saved_by", ["loader", "batch", "split"])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (4, 1), (3, 2)])
def test_case_10_a_state_moves_to_other_ranks_and_workers(tmp_path, saved_by, world_size, workers):
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 1000, 250), **GRID, tail="keep")
    with in_process_workers():
        seen, states = [], []
        for rank, stop in enumerate((7, 4)):
            first = Topology(2, 2, 6, saved_by, ()).loader(ds.shard(2, rank), None)
            seen += [i for batch in some(iter(first), stop) for i in batch]
            states.append(through_json(first.state_dict()))
        merged = through_json(hls.merge_state_dicts(states))
        rest = []
        for rank in range(world_size):
            loader = hls.stateful_dataloader(ds.shard(world_size, rank), 5, workers)
            loader.load_state_dict(merged)
            rest += itertools.chain(*batches(loader))
    assert len(seen) == 66
    assert sorted(seen + rest) == list(range(1000))


# Everything a loader can be asked, in any order, against a model of two numbers.


class Walk:
    """A loader, and where the model says that it is."""

    def __init__(self, make, orders):
        self.make, self.orders = make, orders
        self.saved = []
        self.new()

    def new(self):
        self.loader = self.make()
        self.epoch, self.loaded, self.done, self.iterator, self.left = 0, None, None, None, None

    def set_epoch(self, epoch, on_dataset):
        if epoch != self.epoch and epoch == self.left:
            return  # back to the epoch of a pass that was left: nobody can say which is meant
        (self.loader.dataset if on_dataset else self.loader).set_epoch(epoch)
        if epoch != self.epoch:
            self.loaded, self.done, self.iterator = None, None, None
        self.epoch = epoch

    def begin(self):
        self.iterator, self.left = iter(self.loader), self.epoch
        self.done = self.loaded or 0
        if self.done == len(self.orders[self.epoch]):
            self.loaded = None
        self.go_on(1)

    def open(self):
        if self.loaded == len(self.orders[self.epoch]):
            return  # an empty rest is over once it has been asked for
        iter(self.loader)
        self.done, self.iterator, self.left = None, None, None

    def go_on(self, count):
        if self.iterator is None:
            return
        expected = self.orders[self.epoch][self.done : self.done + count]
        assert some(self.iterator, count) == expected
        self.done += len(expected)
        self.loaded = None

    def save(self):
        place = self.done if self.done is not None else self.loaded or 0
        self.saved.append((through_json(self.loader.state_dict()), self.epoch, place))

    def load(self, number):
        if not self.saved:
            return
        state, self.epoch, self.loaded = self.saved[number % len(self.saved)]
        self.loader.load_state_dict(state)
        assert self.loader.dataset.epoch == self.epoch
        self.done, self.iterator, self.left = None, None, None


calls = st.one_of(
    st.just(("new",)),
    st.tuples(st.just("set_epoch"), st.integers(0, 2), st.booleans()),
    st.just(("begin",)),
    st.just(("open",)),
    st.tuples(st.just("go_on"), st.integers(1, 5)),
    st.just(("save",)),
    st.tuples(st.just("load"), st.integers(0, 9)),
)


@pytest.fixture(scope="module")
def walk_table(tmp_path_factory):
    return make_table(tmp_path_factory.mktemp("walk") / "t.lance", 22, 10)


@pytest.mark.parametrize("steps", ["none", "filter", "take", "batched map"])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_loader_does_what_it_is_asked_in_any_order(walk_table, steps, workers, persistent):
    options = {"persistent_workers": True} if persistent else {}
    change = {
        "none": lambda ds: ds,
        "filter": lambda ds: ds.filter(lambda row: row["id"] % 4),
        "take": lambda ds: ds.take(17),
        "batched map": lambda ds: ds.map(lambda rows: rows, batched=True, batch_size=3),
    }[steps]

    def make():
        ds = change(hls.from_lance(walk_table, num_splits=4, shuffle_seed=1, tail="keep"))
        return hls.stateful_dataloader(ds, 5, workers, **options)

    orders = []
    with in_process_workers():
        for epoch in range(3):
            loader = make()
            loader.set_epoch(epoch)
            orders.append(batches(loader))
    assert orders[0] != orders[1] or steps == "take"  # whose order is frozen

    @settings(deadline=None, max_examples=30, derandomize=True)
    @given(st.lists(calls, min_size=5, max_size=20))
    @example([("begin",), ("save",), ("load", 0), ("save",), ("set_epoch", 0, False)])
    @example([("begin",), ("save",), ("load", 0), ("open",), ("save",), ("new",), ("load", 1)])
    @example([("begin",), ("set_epoch", 1, False), ("save",), ("load", 0)])
    @example([("begin",), ("go_on", 5), ("set_epoch", 1, True), ("save",), ("new",), ("load", 0)])
    @example([("begin",), ("go_on", 2), ("begin",), ("save",), ("load", 0)])
    @example([("begin",), ("go_on", 9), ("save",), ("begin",), ("save",), ("load", 1)])
    @example([("begin",), ("go_on", 9), ("save",), ("load", 0), ("save",), ("new",), ("load", 1)])
    @example([("begin",), ("go_on", 3), ("save",), ("load", 0), ("set_epoch", 2, True)])
    @example([("save",), ("load", 0), ("set_epoch", 1, True), ("save",)])
    @example([("save",), ("set_epoch", 1, True), ("begin",), ("load", 0), ("set_epoch", 1, True)])
    @example([("begin",), ("save",), ("load", 0), ("set_epoch", 1, True), ("save",), ("load", 1)])
    def run(chosen):
        with in_process_workers():
            walk = Walk(make, orders)
            for name, *arguments in chosen:
                getattr(walk, name)(*arguments)
            walk.begin()
            walk.go_on(100)
            walk.begin()
            walk.go_on(100)

    run()


# Case 13 to 15.


@pytest.mark.parametrize("world_size", range(2, 9))
def test_case_13_all_ranks_have_equally_many_batches(tmp_path, world_size):
    table = make_table(tmp_path / "t.lance", 1010, 250)
    num_splits = 8 * world_size
    for tail in ("drop", "pad"):
        ds = hls.from_lance(table, num_splits=num_splits, shuffle_seed=1, tail=tail)
        for workers in range(4):
            with in_process_workers():
                ranks = [
                    batches(hls.stateful_dataloader(ds.shard(world_size, r), 10, workers))
                    for r in range(world_size)
                ]
            assert len({len(rank) for rank in ranks}) == 1
            seen = {i for rank in ranks for batch in rank for i in batch}
            assert 1010 - len(seen) == (1010 % num_splits if tail == "drop" else 0)
            assert ds.dropped_rows == 1010 - len(seen) < num_splits


@pytest.mark.parametrize("batch_size", [None, 16])
def test_case_14_every_worker_yields_from_one_fragment(tmp_path, batch_size, caplog):
    table = make_table(tmp_path / "t.lance", 10_000, 10_000)
    ds = hls.from_lance(table, num_splits=64, shuffle_seed=1, tail="keep", batch_size=batch_size)
    with in_process_workers():
        iterator = iter(torchdata_loader(ds, 16, 8))
        firsts = some(iterator, 8)
        assert all(len(batch) == 16 for batch in firsts)
        rest = [i for batch in iterator for i in batch["id"].tolist()]
    assert sorted(rest + [i for batch in firsts for i in batch]) == list(range(10_000))
    assert not caplog.records


def test_case_14_more_splits_than_rows_is_refused(tmp_path):
    table = make_table(tmp_path / "t.lance", 5, 5)
    with pytest.raises(ValueError, match="num_splits=64, rows=5"):
        hls.from_lance(table, num_splits=64)
    with in_process_workers():
        ds = hls.from_lance(table, shuffle_seed=1)  # 64 by default, fewer for fewer rows
        assert sorted(itertools.chain(*batches(hls.stateful_dataloader(ds, 1, 8)))) == [*range(5)]


def test_case_15_each_row_is_read_by_one_rank(grid, monkeypatch):
    ds, _ = grid
    read = Counter()
    source = type(ds._ex_iterable.source)
    whole = source.read
    monkeypatch.setattr(
        source, "read", lambda s, rows: read.update(rows.tolist()) or whole(s, rows)
    )
    with in_process_workers():
        for rank in range(3):
            batches(rank_loader(ds, 3, rank, 2))
    assert read == Counter(range(2400))
    with pytest.raises(ValueError, match=r"world_size=5.*\[1, 2, 3, 4, 6, 8, 12, 24\]"):
        split_dataset_by_node(ds, rank=0, world_size=5)


# Merging: what is refused.


@pytest.fixture
def ds(tmp_path):
    """64 rows in 8 splits of 8, with the columns id and label."""
    table = make_table(tmp_path / "t.lance", 64, 20, ["id", "label"])
    return hls.from_lance(table, num_splits=8, shuffle_seed=1, shuffle_clump_size=4)


def state_after(ds, count, batch_size=4, workers=0):
    """The state of a loader after `count` batches."""
    with in_process_workers():
        loader = hls.stateful_dataloader(ds, batch_size, workers)
        iterator = iter(loader)
        assert sum(1 for _ in islice(iterator, count)) == count
        return through_json(loader.state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_missing_ranks_are_named(ds, workers):
    states = [state_after(ds.shard(4, rank), 2, workers=workers) for rank in (0, 2)]
    with pytest.raises(ValueError, match=r"ranks \[1, 3\] of 4 are missing.*all_ranks_level=True"):
        hls.merge_state_dicts(states)
    with pytest.raises(ValueError, match=r"ranks \[1, 2, 3\] of 4 are missing"):
        hls.merge_state_dicts(states[:1])
    with pytest.raises(ValueError, match="at least one rank: got none"):
        hls.merge_state_dicts([])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by", ["loader", "batch", "split"])
def test_a_rank_that_stands_for_all_must_be_said_to(ds, by, workers):
    with in_process_workers():
        for rank in range(4):
            loader = Topology(4, workers, 4, by, ()).loader(ds.shard(4, rank), None)
            iterator = iter(loader)
            some(iterator, 2)
            merged = hls.merge_state_dicts([loader.state_dict()], all_ranks_level=True)
            one = pickle.loads(pickle.dumps(ds))
            one.load_state_dict(through_json(merged))
            assert ids(one) == ids(ds)[32:]
    two = [state_after(ds.shard(4, rank), 2) for rank in (0, 1)]
    with pytest.raises(ValueError, match="all_ranks_level"):
        hls.merge_state_dicts(two, all_ranks_level=True)


def test_states_that_do_not_belong_together_are_refused(ds, tmp_path):
    def one(ds, rank, count=2):
        return state_after(ds.shard(2, rank), count)

    first = one(ds, 0)
    ds.set_epoch(1)
    with pytest.raises(ValueError, match="different epochs: 0 and 1"):
        hls.merge_state_dicts([first, one(ds, 1)])
    ds.set_epoch(0)
    with pytest.raises(ValueError, match="shuffle_seed: saved 2, now 1"):
        hls.merge_state_dicts([first, one(ds.shuffle(seed=2), 1)])
    other = make_table(tmp_path / "other.lance", 64, 20, ["id", "label"])
    other_ds = hls.from_lance(other, num_splits=8, shuffle_seed=1, shuffle_clump_size=4)
    with pytest.raises(ValueError, match=r"table: saved .*other\.lance"):
        hls.merge_state_dicts([first, one(other_ds, 1)])
    with pytest.raises(ValueError, match="splits 0 to 3 stand at different rows"):
        hls.merge_state_dicts([first, one(ds, 1), one(ds, 0, 3)])
    with pytest.raises(ValueError, match=r"splits 0 to \d stand at different rows"):
        hls.merge_state_dicts([first, state_after(ds.shard(4, 0), 3), one(ds, 1)])
    for wrong in (3, "state", {"a": 1}, [{"a": 1}], [None]):
        with pytest.raises(ValueError, match="`states`"):
            hls.merge_state_dicts(wrong)


def test_ranks_that_read_the_same_rows_may_all_be_there(ds):
    states = [state_after(ds.shard(2, rank), 3) for rank in (0, 0, 1, 1)]
    assert hls.merge_state_dicts(states) == hls.merge_state_dicts(states[1:3])


REFUSED = {
    "filter": lambda ds: ds.filter(lambda row: row["id"] % 2 == 0),
    "filter ": lambda ds: ds.filter(lambda row: row["id"] % 2 == 0).map(_same),
    "take": lambda ds: ds.take(30),
    "skip": lambda ds: ds.skip(5).with_format("torch"),
    "repeat": lambda ds: ds.repeat(2),
    "interleave_datasets": lambda ds: interleave_datasets([ds, ds]),
    "batched": lambda ds: ds.map(lambda batch: batch, batched=True, batch_size=3),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [hls.stateful_dataloader, torchdata_loader])
def test_steps_that_change_rows_are_named(ds, what, workers, make):
    changed = REFUSED[what](ds)
    with in_process_workers():
        loader = make(changed, 4, workers)
        some(iter(loader), 3)
        with pytest.raises(ValueError, match=f"{what.strip()}.*resumes exactly on the same"):
            hls.merge_state_dicts([through_json(loader.state_dict())])
    portable = hls.merge_state_dicts([state_after(ds, 3)])
    for target in (changed, hls.stateful_dataloader(changed, 4)):
        with pytest.raises(ValueError, match=what.strip().replace("interleave_datasets", "a mix")):
            target.load_state_dict(portable)


KEPT = {
    "map": lambda ds: ds.map(_same),
    "select_columns": lambda ds: ds.select_columns("id"),
    "remove_columns": lambda ds: ds.remove_columns("label"),
    "rename_column": lambda ds: ds.rename_column("label", "target"),
    "cast_column": lambda ds: ds.cast_column("label", Value("int32")),
    "with_format": lambda ds: ds.with_format("torch"),
    "select_columns, with_format": lambda ds: ds.select_columns("id").with_format("numpy"),
    "map, with_format": lambda ds: ds.map(_same).with_format("torch"),
    "with_format, map": lambda ds: ds.with_format("torch").map(_same),
    "map, map, rename": lambda ds: ds.map(_same).map(_same).rename_column("label", "target"),
}


@pytest.mark.parametrize("by", ["loader", "batch", "split"])
@pytest.mark.parametrize("steps", KEPT)
def test_states_of_steps_that_keep_rows_merge_and_move(ds, steps, by):
    rest = ids(ds)
    wrapped = KEPT[steps](ds)
    with in_process_workers():
        for workers, others in ((0, 3), (2, 0)):
            loader = Topology(1, workers, 4, by, ()).loader(wrapped, None)
            seen = list(itertools.chain(*some(iter(loader), 3)))
            merged = through_json(hls.merge_state_dicts([loader.state_dict()]))
            for target in (wrapped, ds):
                new = hls.stateful_dataloader(target, 5, others)
                new.load_state_dict(merged)
                found = list(itertools.chain(*batches(new)))
                assert sorted(seen + found) == sorted(rest)
                if by != "split" or not workers:
                    assert seen + found == rest


def test_a_map_with_indices_is_named(ds):
    changed = ds.map(lambda row, index: {"index": index}, with_indices=True)
    portable = hls.merge_state_dicts([state_after(ds, 3)])
    with pytest.raises(ValueError, match="a map with indices"):
        changed.load_state_dict(portable)
    with in_process_workers():
        for workers in (0, 2):
            loader = hls.stateful_dataloader(changed, 4, workers)
            some(iter(loader), 3)
            with pytest.raises(ValueError, match=r"a map with indices|num_workers=2.*a loader"):
                hls.stateful_dataloader(changed, 4, workers).load_state_dict(
                    hls.merge_state_dicts([loader.state_dict()])
                )


def test_natural_shards_cannot_move(tmp_path):
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 64, 16))
    states = [state_after(ds.shard(2, rank), 2) for rank in (0, 1)]
    with pytest.raises(ValueError, match=r"natural shards.*`num_splits`"):
        hls.merge_state_dicts(states)
    merged = hls.merge_state_dicts(states[:1])
    for other in (ds, ds.shard(2, 1), ds.shard(4, 0)):
        with pytest.raises(ValueError, match=r"natural shards.*`num_splits`"):
            other.load_state_dict(merged)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by", ["loader", "batch"])
def test_natural_shards_of_one_rank_keep_their_place_with_other_workers(tmp_path, by, workers):
    ds = hls.from_lance(make_table(tmp_path / "t.lance", 64, 16)).shard(2, 1)
    with in_process_workers():
        first = Topology(1, workers, 5, by, ()).loader(ds, None)
        assert some(iter(first), 3) == [list(range(a, a + 5)) for a in (32, 37, 42)]
        merged = through_json(hls.merge_state_dicts([first.state_dict()]))
        for others in (0, 3):
            loader = hls.stateful_dataloader(ds, 4, others)
            loader.load_state_dict(merged)
            assert list(itertools.chain(*batches(loader))) == list(range(47, 64))


def test_a_state_of_other_workers_is_refused_by_a_loader(ds):
    with in_process_workers():
        state = state_after(ds, 3, workers=2)
        for workers in (0, 1, 3):
            loader = hls.stateful_dataloader(ds, 4, workers)
            with pytest.raises(
                ValueError, match=f"num_workers=2.*num_workers={workers}.*merge_sta"
            ):
                loader.load_state_dict(state)
            raw = torchdata_loader(ds, 4, 2)
            some(iter(raw), 3)
            with pytest.raises(
                ValueError, match=f"num_workers=2.*num_workers={workers}.*merge_sta"
            ):
                loader.load_state_dict(through_json(raw.state_dict()))
            full = batches(loader)  # still usable, from the start
            loader.load_state_dict(hls.merge_state_dicts([state]))
            assert batches(loader) == full[3:]


# Merging: states in every situation.


def test_merged_states_merge_again(ds):
    states = [state_after(ds.shard(4, rank), rank) for rank in range(4)]
    merged = hls.merge_state_dicts(states)
    assert hls.merge_state_dicts([merged, merged]) == merged
    assert hls.merge_state_dicts(merged) == merged
    assert hls.gather_state_dict(hls.stateful_dataloader(ds, 4)) == hls.merge_state_dicts(
        [ds.state_dict()]
    )
    with pytest.raises(ValueError, match="stand at different rows"):
        hls.merge_state_dicts([merged, states[0], state_after(ds.shard(4, 1), 4)])


def test_gather_without_a_process_group(ds):
    loader = hls.stateful_dataloader(ds.shard(2, 1), 4)
    some(iter(loader), 2)
    with pytest.raises(ValueError, match=r"ranks \[0\] of 2"):
        hls.gather_state_dict(loader)
    whole = ids(ds)
    ds.load_state_dict(hls.gather_state_dict(loader, all_ranks_level=True))
    assert ids(ds) == whole[16:]


def test_an_uneven_state_of_a_very_large_epoch_stays_small():
    """Under 2 KB and 8 bytes per split: here of 10^12 rows."""
    num_splits = 4096
    with tempfile.TemporaryDirectory() as directory:
        ds = hls.from_lance(
            make_table(f"{directory}/t.lance", num_splits, num_splits), num_splits=num_splits
        )
        template = through_json(ds.state_dict())
    states = []
    for start in range(0, num_splits, num_splits // 4):
        state = through_json(template)
        inner = state["examples_iterable"]
        inner["fingerprint"]["rows"] = num_splits * 10**9
        inner["part"] |= {"start": start, "stop": start + num_splits // 4}
        inner["position"] = 240_000_000 * num_splits + 7 * start + 5
        states.append(state)
    merged = hls.merge_state_dicts(states)
    assert len(str(merged)) < 2048 + 8 * num_splits


ROWS, SPLITS, BATCH = 50, 4, 6  # a short last batch, and a tail


@pytest.fixture
def small(tmp_path):
    return hls.from_lance(
        make_table(tmp_path / "t.lance", ROWS, 20), num_splits=SPLITS, shuffle_seed=1, tail="keep"
    )


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by", ["batch", "split"])
def test_raw_states_of_torchdata_merge_at_every_position(small, by, workers, every):
    """With real workers: before the first batch, between workers, after a resume, at the end."""
    splits = oracle.cut(oracle.sequence(ROWS, 1, 1, 0), SPLITS, "keep")
    ds = small.with_batches(BATCH) if by == "batch" else small
    loader = torchdata_loader(ds, BATCH, workers, snapshot_every_n_steps=every)
    shared = workers if by == "split" and workers else 1
    resumed_at = None
    for resumed in (False, True):
        model = Model(splits, [0] * SPLITS)
        expected = model.batches(0, SPLITS, BATCH, shared)
        if resumed:  # one batch after the start, so before all workers have yielded
            model.deliver(expected[:1])
            expected = expected[1:]
            loader.load_state_dict(resumed_at)
        lags = 1 if resumed and every == 1 else int(resumed)
        raw = [through_json(loader.state_dict())]
        iterator = iter(loader)
        for batch in expected:
            assert next(iterator)["id"].tolist() == model.rows([batch])[0]
            raw.append(through_json(loader.state_dict()))
        assert next(iterator, None) is None
        raw.append(through_json(loader.state_dict()))
        resumed_at = raw[1]
        del iterator
        for step, (state, batch) in enumerate(zip(raw, [[], *expected, []], strict=True)):
            model.deliver([batch])
            lag = min(step, len(expected)) + lags * (every > 1)
            if by == "split" and workers and lag % every:
                with pytest.raises(ValueError, match=r"lags behind by \d batches.*snapshot_every"):
                    hls.merge_state_dicts([state])
                continue
            small.load_state_dict(through_json(hls.merge_state_dicts([state])))
            assert ids(small) == oracle.rest(splits, model.consumed), f"step {step}"


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_raw_states_by_batch_with_few_batches_and_drop_last(small, workers):
    """More workers than batches, and a last batch that is fetched but not delivered."""
    splits = oracle.cut(oracle.sequence(ROWS, 1, 1, 0), SPLITS, "keep")
    rows = oracle.deal(splits)
    for batch_size, drop_last in itertools.product([9, 20, 60], [False, True]):
        ds = small.with_batches(batch_size)
        with in_process_workers():
            loader = torchdata_loader(ds, batch_size, workers, drop_last=drop_last)
            iterator, done = iter(loader), 0
            for batch in itertools.chain([[]], (b["id"].tolist() for b in iterator), [[]]):
                done += len(batch)
                small.load_state_dict(through_json(hls.merge_state_dicts([loader.state_dict()])))
                assert ids(small) == rows[done:]
            assert done == (ROWS // batch_size * batch_size if drop_last else ROWS)


def test_states_of_a_rank_with_a_mix_of_positions_name_what_is_wrong(small):
    """Snapshots of workers that cannot be of one moment."""
    with in_process_workers():
        loader = torchdata_loader(small.with_batches(BATCH), BATCH, 2)
        iterator = iter(loader)
        states = [through_json(loader.state_dict())]
        for _ in range(5):
            next(iterator)
            states.append(through_json(loader.state_dict()))
    for early, late in pairwise(states[::3]):
        mixed = through_json(late)
        mixed["_snapshot"]["_worker_snapshots"]["worker_0"] = early["_snapshot"][
            "_worker_snapshots"
        ]["worker_0"]
        with pytest.raises(ValueError, match="not a prefix of its batches"):
            hls.merge_state_dicts([mixed])


def test_an_empty_rest_moves_too(small):
    """After exhaustion every topology has an empty rest once, then a whole epoch."""
    with in_process_workers():
        first = hls.stateful_dataloader(small, 8, 2)
        full = batches(first)
        merged = through_json(hls.merge_state_dicts([first.state_dict()]))
        for workers in (0, 1, 3):
            loader = hls.stateful_dataloader(small, 8, workers)
            loader.load_state_dict(merged)
            assert [batches(loader) for _ in range(3)] == [[], full, full]
