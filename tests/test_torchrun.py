"""Training jobs of several real processes: killed and continued elsewhere, checkpoints, meshes.

Whole jobs (`jobs/train.py`) run under `torchrun`. Checks that need ranks, but no new interpreter,
run in processes that multiprocessing's forkserver starts in a fraction of a second.
"""

import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path

import oracle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from datasets.distributed import split_dataset_by_node
from helpers import ids, through_json
from ranks import CLUMP, GLOBAL_BATCH, ROWS, SPLITS, needs_gloo
from torch.distributed.device_mesh import init_device_mesh

import hf_lance_stream as hls

multiprocessing.set_forkserver_preload(
    ["torch.distributed.checkpoint", "datasets", "lance", "hf_lance_stream", "pytest"]
)

TRAIN = Path(__file__).parent / "jobs" / "train.py"
DROP_STEPS, PAD_STEPS = 21, 22  # of an epoch; with "pad" the last one is half a step

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def table(ranks_table):
    return ranks_table


def dataset(table, rank=0, world_size=1, *, num_splits=SPLITS, **options):
    return hls.from_lance(
        table,
        num_splits=num_splits,
        shuffle_seed=1,
        shuffle_clump_size=CLUMP,
        rank=rank,
        world_size=world_size,
        **options,
    )


def rank_loader(
    table, rank=0, world_size=1, num_workers=0, *, global_batch=GLOBAL_BATCH, **options
):
    ds = dataset(table, rank, world_size, **options)
    return hls.stateful_dataloader(ds, global_batch // world_size, num_workers)


def batches(loader, count=None):
    """The ids of the next `count` batches, or of all, of a new pass."""
    return [batch["id"].tolist() for batch in islice(iter(loader), count)]


def expected_steps(epoch, *, tail="drop", num_splits=SPLITS, global_batch=GLOBAL_BATCH):
    """The ids of every global step of an epoch, as one process gets them, by the design."""
    splits = oracle.cut(oracle.sequence(ROWS, CLUMP, 1, epoch), num_splits, tail)
    rows = oracle.deal(splits)
    return [rows[i : i + global_batch] for i in range(0, len(rows), global_batch)]


def rows_of_rank(step_ids, rank, world_size, num_splits=SPLITS):
    """The ids of a global step that one rank has, in its order: those of its group of splits."""
    size = num_splits // world_size
    return [row for n, row in enumerate(step_ids) if n % num_splits // size == rank]


# Whole jobs, by torchrun.


def processes_with(mark):
    """Living processes with a text in the environment they were started with."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_zombie = (directory / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not is_zombie and mark.encode() in (directory / "environ").read_bytes():
                found.append(int(directory.name))
    return found


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return met


def run_job(processes, *arguments, record, timeout=100):
    """Run `jobs/train.py`; return its exit code, its output and how many processes it left alive.

    `processes` is torchrun's --nproc_per_node, or None to run the script without torchrun.
    """
    command = [sys.executable]
    if processes is not None:
        options = ["--standalone", f"--nproc_per_node={processes}", "--max-restarts=0"]
        command += ["-m", "torch.distributed.run", *options]
    command += [str(TRAIN), "--record", str(record), *map(str, arguments)]
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HLS_TEST_JOB": mark}
    record.mkdir()
    output = record / "output.txt"
    with output.open("w") as file:  # not a pipe, which a process left behind would hold open
        job = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        try:
            code = job.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end after {timeout} s:\n{output.read_text()[-5000:]}")
        wait_until(lambda: not processes_with(mark), 10)
        return code, output.read_text(), len(processes_with(mark))
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)  # torchrun passes it on; its ranks are not of its
            wait_until(lambda: job.poll() is not None, 5)  # process group
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        for process in processes_with(mark):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@dataclass
class Run:
    """One start of the job.

    Attributes:
        world_size: its number of ranks.
        steps: the ids of each of its steps, by rank.
        epochs: the epoch of each of its steps.
        output: what it printed.
        left_alive: processes that were there 10 s after its end.
    """

    world_size: int
    steps: dict[int, dict[int, list[int]]]
    epochs: dict[int, int]
    output: str
    left_alive: int


def read_logs(directory, world_size):
    """The steps and epochs of a `Run`."""
    steps: dict = defaultdict(dict)
    epochs = {}
    for rank in range(world_size):
        lines = (directory / f"rank_{rank}.jsonl").read_text().splitlines()
        for line in map(json.loads, lines):
            assert line["rank"] == rank
            assert rank not in steps[line["step"]], "a run did a step twice"
            steps[line["step"]][rank] = line["ids"]
            epochs[line["step"]] = line["epoch"]
    return dict(steps), epochs


def newest_checkpoint(output):
    return torch.load(max(output.glob("step_*.pt")), weights_only=True)


class Chain:
    """A training that is killed again and again, and goes on elsewhere."""

    def __init__(self, table, directory, *options):
        self.directory, self.output = directory, directory / "checkpoints"
        self.arguments = ["--table", table, "--output", self.output, *options]
        self.runs: list[Run] = []

    def run(self, processes, workers, *, kill_rank=None, kill_after=None):
        done = newest_checkpoint(self.output)["step"] if self.runs else 0
        arguments = [*self.arguments, "--workers", workers]
        if kill_rank is not None:
            arguments += ["--kill-rank", kill_rank, "--kill-after", kill_after]
        record = self.directory / f"run_{len(self.runs)}"
        code, output, left_alive = run_job(processes, *arguments, record=record)
        if kill_rank is None:
            assert code == 0, output[-5000:]
        else:
            assert code != 0
            assert "Signal 9 (SIGKILL)" in output, output[-5000:]
            assert f"rank      : {kill_rank} (" in output.split("Root Cause")[1]
        run = Run(processes or 1, *read_logs(record, processes or 1), output, left_alive)
        self.runs.append(run)
        assert sorted(run.steps) == list(range(done + 1, done + 1 + len(run.steps)))
        assert kill_after in (None, max(run.steps))

    def check(self, *expected):
        """Compare with the ids of each step of each epoch; of redone steps the last run counts."""
        flat = [(epoch, rows) for epoch, steps in enumerate(expected) for rows in steps]
        done = {step: run for run in self.runs for step in run.steps}
        assert sorted(done) == list(range(1, len(flat) + 1))
        for number, (epoch, rows) in enumerate(flat, start=1):
            last = done[number].steps[number]
            assert sorted(last) == list(range(done[number].world_size))
            assert {row for part in last.values() for row in part} == set(rows), number
            for run in self.runs:
                assert run.epochs.get(number, epoch) == epoch
                for rank, part in run.steps.get(number, {}).items():
                    assert part == rows_of_rank(rows, rank, run.world_size), (number, rank)


@pytest.fixture(scope="module")
def reference(table, tmp_path_factory):
    """The uninterrupted run of one process, without torchrun."""
    chain = Chain(table, tmp_path_factory.mktemp("reference"))
    chain.run(None, 0)
    return chain


@pytest.fixture(scope="module")
def killed_twice(table, tmp_path_factory):
    """Three runs with other numbers of processes and workers; two were killed in mid-epoch."""
    draw = random.Random(int(os.environ.get("HLS_TEST_SEED", 3)))
    chain = Chain(table, tmp_path_factory.mktemp("killed_twice"))
    chain.run(2, 2, kill_rank=draw.randrange(2), kill_after=draw.randint(6, DROP_STEPS))
    chain.run(4, 0, kill_rank=draw.randrange(4), kill_after=draw.randint(DROP_STEPS + 1, 41))
    chain.run(1, 3)
    return chain


def test_the_uninterrupted_run_of_one_process_has_the_order_of_the_design(reference):
    reference.check(expected_steps(0), expected_steps(1))


@pytest.mark.slow
def test_a_job_killed_twice_does_the_steps_of_the_uninterrupted_run(killed_twice, reference):
    killed_twice.check(expected_steps(0), expected_steps(1))

    # Not only the data: the models differ by rounding alone.
    found, expected = newest_checkpoint(killed_twice.output), newest_checkpoint(reference.output)
    assert found["step"] == expected["step"] == 2 * DROP_STEPS
    assert found["data"] == expected["data"]
    torch.testing.assert_close(found["model"], expected["model"], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_no_process_outlives_a_job_also_when_its_rank_was_killed(killed_twice):
    assert [run.left_alive for run in killed_twice.runs] == [0, 0, 0]


@pytest.mark.slow
def test_the_workers_of_a_job_start_without_warnings(killed_twice):
    assert "fork-safe" not in "".join(run.output for run in killed_twice.runs)
    last = killed_twice.runs[-1].output.splitlines()  # nothing was killed in it
    assert not [line for line in last if "Warning: " in line and "will create 3 worker" not in line]


@pytest.mark.slow
def test_a_job_killed_after_the_last_step_of_an_epoch_starts_the_next_one_whole(table, tmp_path):
    """With a checkpoint at that step, a short last step, padding, and workers that come to be."""
    chain = Chain(table, tmp_path, "--tail", "pad", "--save-every", PAD_STEPS)
    chain.run(4, 0, kill_rank=3, kill_after=PAD_STEPS + 1)
    assert newest_checkpoint(chain.output)["step"] == PAD_STEPS
    chain.run(2, 3)
    chain.check(expected_steps(0, tail="pad"), expected_steps(1, tail="pad"))


# Ranks in processes of the forkserver.


def in_ranks(world_size, function, directory, *arguments, timeout=90):
    """What ``function(rank, world_size, *arguments)`` returns on each rank of a gloo group."""
    context = multiprocessing.get_context("forkserver")
    directory = directory / uuid.uuid4().hex
    directory.mkdir()
    processes = [
        context.Process(target=_rank_main, args=(function, rank, world_size, directory, arguments))
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                end = min(end, time.monotonic() + 5)  # the others may wait for it for ever
            time.sleep(0.02)
        results = [directory / f"{rank}.pickle" for rank in range(world_size)]
        errors = [path.read_text() for path in sorted(directory.glob("*.txt"))]
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world_size, "\n".join([f"exit codes {codes}", *errors])
        return [pickle.loads(path.read_bytes()) for path in results]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()


def _rank_main(function, rank, world_size, directory, arguments):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = function(rank, world_size, *arguments)
        (directory / f"{rank}.pickle").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()
    except BaseException:
        (directory / f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise


def check_rest(found, done, *, epoch=0, **options):
    """Compare what each rank got in a pass after `done` global steps with the design."""
    expected = expected_steps(epoch, **options)[done:]
    num_splits = options.get("num_splits", SPLITS)
    for rank, rank_batches in enumerate(found):
        assert rank_batches == [
            rows_of_rank(rows, rank, len(found), num_splits) for rows in expected
        ]


# Never unequal.


@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("world_size", range(2, 9))
def test_case_13_every_rank_gets_the_same_number_of_batches(table, world_size, tail):
    num_splits = SPLITS if SPLITS % world_size == 0 else 5 * world_size
    size = 64 // world_size
    loaders = [
        rank_loader(table, rank, world_size, num_splits=num_splits, tail=tail, global_batch=64)
        for rank in range(world_size)
    ]
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        found = [batches(loader) for loader in loaders]
        assert [len(of_rank) for of_rank in found] == [len(loader) for loader in loaders]
        assert len({tuple(map(len, of_rank)) for of_rank in found}) == 1
        assert all(len(batch) == size for of_rank in found for batch in of_rank[:-1])
        seen = [row for of_rank in found for batch in of_rank for row in batch]
        if tail == "pad":
            assert set(seen) == set(range(ROWS))
            assert len(seen) - ROWS < num_splits
        else:
            assert len(set(seen)) == len(seen) > ROWS - num_splits


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_case_13_with_workers_the_batches_of_every_rank_are_the_same(
    table, world_size, num_workers
):
    for rank in range(world_size):
        found = batches(rank_loader(table, rank, world_size, num_workers, tail="pad"))
        assert found == [
            rows_of_rank(rows, rank, world_size) for rows in expected_steps(0, tail="pad")
        ]


def _all_reduce_every_batch(rank, world_size, table):
    """Steps of two epochs for each tail; a rank with fewer would let the others wait."""
    lengths = []
    for tail in ("drop", "pad"):
        loader = rank_loader(table, rank, world_size, tail=tail, global_batch=16 * world_size)
        for epoch in range(2):
            loader.set_epoch(epoch)
            lengths.append(0)
            for batch in loader:
                rows = torch.tensor(len(batch["id"]))
                dist.all_reduce(rows)
                assert rows == world_size * len(batch["id"])
                lengths[-1] += 1
    return lengths, hls.gather_state_dict(loader)


@pytest.mark.parametrize("world_size", [3, 4])
def test_ranks_that_wait_for_each_other_in_every_batch_do_not_hang(table, tmp_path, world_size):
    found = in_ranks(world_size, _all_reduce_every_batch, tmp_path, table)
    drop, pad = [
        len(expected_steps(0, tail=tail, global_batch=16 * world_size)) for tail in ("drop", "pad")
    ]
    assert [lengths for lengths, _ in found] == [[drop, drop, pad, pad]] * world_size
    assert all(state == found[0][1] for _, state in found)


# Portable state.


def _gather_in_the_middle(rank, world_size, table, steps, state, num_workers):
    """Go on at `state` for some steps; the state then, on every rank, and the ids."""
    loader = rank_loader(table, rank, world_size, num_workers)
    if state is not None:
        loader.load_state_dict(state)
    rows = iter(loader)
    seen = [next(rows)["id"].tolist() for _ in range(steps)]
    state = hls.gather_state_dict(loader)
    return state, seen, [batch["id"].tolist() for batch in rows]


def test_the_gathered_state_is_the_same_on_every_rank_and_that_of_one_process(table, tmp_path):
    found = in_ranks(4, _gather_in_the_middle, tmp_path, table, 7, None, 0)
    loader = rank_loader(table)
    rows = iter(loader)
    for _ in range(7):
        next(rows)
    alone = hls.gather_state_dict(loader)  # there is no process group here
    assert [state for state, _, _ in found] == [alone] * 4
    assert through_json(alone) == alone == hls.merge_state_dicts([loader.state_dict()])

    # Gathering does not disturb the pass, and the state goes on anywhere.
    check_rest([seen + rest for _, seen, rest in found], 0)
    found = in_ranks(2, _gather_in_the_middle, tmp_path, table, 5, through_json(alone), 0)
    check_rest([seen + rest for _, seen, rest in found], 7)
    loader = rank_loader(table)
    loader.load_state_dict(found[1][0])
    check_rest([batches(loader)], 12)


@pytest.mark.slow
def test_ranks_that_multiprocessing_started_can_have_workers(table, tmp_path):
    found = in_ranks(2, _gather_in_the_middle, tmp_path, table, 4, None, 2)
    check_rest([seen + rest for _, seen, rest in found], 0)
    loader = rank_loader(table)
    loader.load_state_dict(found[0][0])
    check_rest([batches(loader)], 4)


def advance(loaders, count):
    """Take `count` batches of each loader and leave the passes open."""
    return [[next(rows)["id"].tolist() for _ in range(count)] for rows in map(iter, loaders)]


@pytest.mark.parametrize("absent", [[2], [0], [1, 3]])
def test_a_merge_without_the_states_of_some_ranks_names_them(table, absent):
    loaders = [rank_loader(table, rank, 4) for rank in range(4)]
    advance(loaders, 3)
    states = [loader.state_dict() for loader in loaders]
    present = [state for rank, state in enumerate(states) if rank not in absent]
    with pytest.raises(ValueError, match=r"all_ranks_level=True") as caught:
        hls.merge_state_dicts(present)
    assert f"ranks {absent} of 4" in str(caught.value)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("start", [0, 5])
def test_the_state_of_one_rank_stands_for_all_that_are_level(table, rank, start):
    """Also after a resume."""
    begun = rank_loader(table)
    advance([begun], start)
    loaders = [rank_loader(table, rank, 4) for rank in range(4)]
    for loader in loaders:
        loader.load_state_dict(hls.gather_state_dict(begun))
    advance(loaders, 3)
    states = [loader.state_dict() for loader in loaders]
    one = hls.merge_state_dicts([states[rank]], all_ranks_level=True)
    assert one == hls.gather_state_dict(loaders[rank], all_ranks_level=True)
    assert one == hls.merge_state_dicts(states)
    loader = rank_loader(table)
    loader.load_state_dict(through_json(one))
    check_rest([batches(loader)], start + 3)


@pytest.fixture(scope="module")
def uneven(table):
    """A portable state of splits of which, of each half, the first eight are a row ahead."""
    loaders = [rank_loader(table, rank, 2, global_batch=16) for rank in range(2)]
    advance(loaders, 1)
    return hls.merge_state_dicts([loader.state_dict() for loader in loaders])


def test_the_state_of_a_rank_that_has_read_nothing_yet_is_not_that_of_another_rank(table, uneven):
    """Of six ranks the splits of number 2 are untouched, those of number 0 are not."""
    second, first = rank_loader(table, 2, 6), rank_loader(table, 0, 6)
    second.load_state_dict(uneven)
    with pytest.raises(ValueError, match="merge_state_dicts"):
        first.load_state_dict(second.state_dict())


def test_one_rank_does_not_stand_for_ranks_that_started_at_other_rows(table, uneven):
    """All four did one step of 4 rows, but what they went on from had uneven splits."""
    loaders = [rank_loader(table, rank, 4, global_batch=16) for rank in range(4)]
    for loader in loaders:
        loader.load_state_dict(uneven)
    advance(loaders, 1)
    states = [loader.state_dict() for loader in loaders]
    for state in states:
        try:
            one = hls.merge_state_dicts([state], all_ranks_level=True)
        except ValueError:
            continue
        assert one == hls.merge_state_dicts(states)


def test_a_rank_that_is_a_step_ahead_merges_and_nothing_is_lost_or_repeated(table):
    loaders = [rank_loader(table, rank, 2) for rank in range(2)]
    seen = advance(loaders[:1], 3) + advance(loaders[1:], 4)
    state = hls.merge_state_dicts([loader.state_dict() for loader in loaders])
    loader = rank_loader(table)
    loader.load_state_dict(state)
    rest = [row for batch in batches(loader) for row in batch]
    seen = [row for of_rank in seen for batch in of_rank for row in batch]
    assert sorted(seen + rest) == sorted(row for step in expected_steps(0) for row in step)


# torch.distributed.checkpoint.


def _save_checkpoints(rank, world_size, table, directory, steps):
    loader = rank_loader(table, rank, world_size)
    advance([loader], steps)
    model = torch.nn.Linear(4, 1)
    whole = {"model": model.state_dict(), "data": hls.PortableState(loader)}
    dcp.save(whole, checkpoint_id=directory / "portable")
    dcp.save({f"data_{rank}": loader}, checkpoint_id=directory / "by_rank")


def _load_portable(rank, world_size, table, directory):
    loader = rank_loader(table, rank, world_size)
    model = torch.nn.Linear(4, 1)
    whole = {"model": model.state_dict(), "data": hls.PortableState(loader)}
    dcp.load(whole, checkpoint_id=directory / "portable")
    return batches(loader), batches(loader)


def _load_by_rank(rank, world_size, table, directory):
    loader = rank_loader(table, rank, world_size)
    dcp.load({f"data_{rank}": loader}, checkpoint_id=directory / "by_rank")
    return batches(loader), batches(loader)


@pytest.fixture(scope="module")
def checkpoints(table, tmp_path_factory):
    """Saved by two ranks after 9 steps."""
    directory = tmp_path_factory.mktemp("checkpoints")
    in_ranks(2, _save_checkpoints, directory, table, directory, 9)
    return directory


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_distributed_checkpoint_of_two_ranks_loads_on_any_number(
    table, checkpoints, tmp_path, world_size
):
    found = in_ranks(world_size, _load_portable, tmp_path, table, checkpoints)
    check_rest([rest for rest, _ in found], 9)
    check_rest([whole for _, whole in found], 0)


def test_a_distributed_checkpoint_loads_without_a_process_group(table, checkpoints):
    loader = rank_loader(table)
    state = {"data": hls.PortableState(loader)}
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.load(state, checkpoint_id=checkpoints / "portable")
    check_rest([batches(loader)], 9)


def test_loaders_are_stateful_under_a_key_per_rank(table, checkpoints, tmp_path):
    found = in_ranks(2, _load_by_rank, tmp_path, table, checkpoints)
    check_rest([rest for rest, _ in found], 9)
    check_rest([whole for _, whole in found], 0)


# Data-parallel groups.


def _read_in_a_mesh(rank, world_size, table, shape, names):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    place = hls.data_parallel_rank(mesh)
    first, size = place
    passes = [
        ids(dataset(table, first, size)),
        ids(dataset(table).shard(size, first)),
        ids(split_dataset_by_node(dataset(table), first, size)),
    ]
    assert passes == [passes[0]] * 3

    # The state of all processes, of which some read the same rows, and of one of each.
    loader = hls.stateful_dataloader(dataset(table, first, size), GLOBAL_BATCH // size)
    advance([loader], 4)
    states = [hls.gather_state_dict(loader)]
    if names[0] == "dp":
        states.append(hls.gather_state_dict(loader, mesh["dp"].get_group()))
    return place, passes[0], states


@pytest.mark.parametrize(
    ("shape", "names", "places"),
    [
        ((2, 2), ("dp", "tp"), [0, 0, 1, 1]),
        ((2, 2), ("pp", "dp_shard"), [0, 1, 0, 1]),
        ((2, 2), ("dp_replicate", "dp_shard"), [0, 1, 2, 3]),
        ((2, 4), ("dp", "tp"), [0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_case_12_members_of_a_model_parallel_group_read_the_same_rows(
    table, tmp_path, shape, names, places
):
    found = in_ranks(len(places), _read_in_a_mesh, tmp_path, table, shape, names)
    size = max(places) + 1
    groups = [ids(dataset(table, rank, size)) for rank in range(size)]
    for (place, rows, states), expected in zip(found, places, strict=True):
        assert place == (expected, size)
        assert rows == groups[expected]
        assert states == [found[0][2][0]] * len(states)
    loader = rank_loader(table)
    loader.load_state_dict(found[-1][2][0])
    check_rest([batches(loader)], 4)


def _place_without_data_ranks(rank, world_size, shape, names):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    try:
        return hls.data_parallel_rank(mesh)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(("shape", "names"), [((2,), ("tp",)), ((2, 1), ("tp", "pp"))])
def test_a_mesh_without_data_ranks_is_refused_or_one_group(tmp_path, shape, names):
    """Tensor-parallel ranks must never read different rows."""
    for place in in_ranks(2, _place_without_data_ranks, tmp_path, shape, names):
        assert place == (0, 1) or str(list(names)) in place


# Order across processes.


def _rows_unseeded(rank, world_size, table):
    ds = hls.from_lance(table, num_splits=SPLITS)
    with pytest.raises(ValueError, match="seed"):
        ds.shuffle()
    return ids(ds)


def test_case_16_without_a_seed_processes_have_the_same_order_or_none(table, tmp_path):
    first, second = in_ranks(2, _rows_unseeded, tmp_path, table)
    assert first == second
