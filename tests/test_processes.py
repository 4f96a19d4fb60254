"""Lance across processes: forks, start methods, and the end of the interpreter."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from helpers import make_table

START = """
import sys, warnings
warnings.simplefilter("ignore")
import torch.utils.data
import hf_lance_stream as hls
"""

LOADER = """
def main():
    {opening}
    ds = hls.from_lance({path!r}, num_splits=8, shuffle_seed=1, shuffle_clump_size=4)
    {use}
    for _ in range({times}):
        loader = torch.utils.data.DataLoader(
            ds, batch_size=8, num_workers=4, multiprocessing_context={method!r}
        )
        ids = sorted(i for batch in loader for i in batch["id"].tolist())
        assert ids == list(range(64)), ids
    print("exact")

if __name__ == "__main__":
    main()
"""


def run(script, timeout=100):
    """Run a script in a session of its own; a hang ends all its processes and fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        pytest.fail(f"hangs: {script.read_text()}")
    return process.returncode, output


def write(file, body, **values):
    file.write_text(START + textwrap.dedent(body).format(**values))
    return file


@pytest.fixture
def table(tmp_path):
    return make_table(tmp_path / "t.lance", 64, 16)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", None])
@pytest.mark.parametrize(
    ("opening", "use"),
    [
        ("", ""),
        ("", "next(iter(ds))"),
        ("import lance; table = lance.dataset({path!r})", ""),
        ("import lance; lance.dataset({path!r}).to_table()", ""),
    ],
    ids=["ours", "ours_read", "lance", "lance_read"],
)
def test_case_30_a_fork_after_use_is_refused_at_once(tmp_path, table, method, opening, use):
    opening = opening.format(path=table)
    script = write(
        tmp_path / "job.py", LOADER, path=table, opening=opening, use=use, times=1, method=method
    )
    code, output = run(script)
    if code == 0:  # a start method other than fork, as Python 3.14 has by default
        assert method is None
        assert "exact" in output
    else:
        assert "forked after Lance was used" in output
        assert 'multiprocessing_context="forkserver"' in output
        assert "RuntimeError" in output


@pytest.mark.slow
@pytest.mark.parametrize(("method", "times"), [("forkserver", 20), ("spawn", 1)])
def test_case_30_other_start_methods_read_exactly(tmp_path, table, method, times):
    opening = f"import lance, lancedb; lance.dataset({table!r}).to_table()"
    opening += f"; lancedb.connect({str(tmp_path)!r}).open_table('t').count_rows()"
    if method == "forkserver":
        opening += (
            "; import multiprocessing; multiprocessing.set_forkserver_preload("
            "['torch', 'datasets', 'lance', 'hf_lance_stream'])"
        )
    script = write(
        tmp_path / "job.py",
        LOADER,
        path=table,
        opening=opening,
        use="next(iter(ds))",
        times=times,
        method=method,
    )
    code, output = run(script, timeout=200)
    assert (code, "exact" in output) == (0, True), output


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("end", ["pass", "raise SystemExit(3)", "raise KeyError('stop')"])
def test_an_interpreter_with_a_partly_read_stream_ends(tmp_path, workers, end):
    path = make_table(tmp_path / "big.lance", 100_000, 10_000)
    body = """
    def main():
        global rows, batches  # alive until the interpreter ends
        ds = hls.from_lance({path!r}, num_splits=8, shuffle_seed=1, shuffle_clump_size=16)
        rows = iter(ds)
        next(rows)
        batches = iter(hls.stateful_dataloader(ds, batch_size=8, num_workers={workers}))
        next(batches)
        print("read")
        {end}

    if __name__ == "__main__":
        main()
    """
    script = write(tmp_path / "job.py", body, path=path, workers=workers, end=end)
    code, output = run(script, timeout=60)
    assert "read" in output
    assert code == {"pass": 0, "raise SystemExit(3)": 3}.get(end, 1), output
    assert ("KeyError: 'stop'" in output) == ("KeyError" in end)
    assert "Exception ignored" not in output


def test_a_child_forked_after_use_is_told_so_and_the_parent_reads_on(table):
    script = textwrap.dedent(
        f"""
        import os, warnings
        warnings.simplefilter("ignore")
        import hf_lance_stream as hls
        ds = hls.from_lance({table!r})
        rows = iter(ds)
        first = next(rows)["id"]
        pid = os.fork()
        if pid == 0:
            try:
                list(ds)
            except RuntimeError as error:
                os._exit(7 if "forked after Lance was used" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert [first] + [row["id"] for row in rows] == list(range(64))
        """
    )
    run_ = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert run_.returncode == 0, run_.stderr
