"""The command and its demo; whole demos run in real processes."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import lance
import pytest
import torch

import hf_lance_stream as hls
from hf_lance_stream import cli, demo


def run_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::UserWarning", "-m", "hf_lance_stream.cli", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


@dataclass
class Kept:
    directory: Path
    process: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """What one run of ``hf-lance-stream demo --keep DIR`` left."""
    cwd = tmp_path_factory.mktemp("demo")
    return Kept(cwd / "new" / "kept", run_command("demo", "--keep", "new/kept", cwd=cwd))


@pytest.fixture
def copy_of_kept(kept: Kept, tmp_path: Path) -> Path:
    """A copy of what it left; the state names the copy's table, as it is bound to the path."""
    directory = tmp_path / "copy"
    shutil.copytree(kept.directory, directory)
    tamper(directory / demo.CHECKPOINT, table=str(directory / demo.TABLE))
    return directory


@pytest.fixture
def threads() -> Iterator[None]:
    """Give back what a training in this process changes in torch."""
    before = torch.get_num_threads()
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(before)


def tamper(checkpoint: Path, **changes: Any) -> None:
    """Change values of the dataset's state in a checkpoint, wherever they are in it."""
    loaded = torch.load(checkpoint, weights_only=True)
    state = json.loads(loaded["dataset"])
    examples = state["examples_iterable"]
    for name, value in changes.items():
        target = examples if name in examples else examples["fingerprint"]
        assert target[name] != value
        target[name] = value
    loaded["dataset"] = json.dumps(state)
    torch.save(loaded, checkpoint)


def saved_position(checkpoint: Path) -> int:
    state = json.loads(torch.load(checkpoint, weights_only=True)["dataset"])
    return int(state["examples_iterable"]["position"])


@pytest.mark.slow
class TestWholeDemo:
    def test_succeeds_and_reports_what_was_compared(self, kept: Kept) -> None:
        report = kept.process.stdout
        assert kept.process.returncode == 0, kept.process.stderr
        assert kept.process.stderr == ""
        assert re.search(r"1,797 images in 6 fragments, 1,440 of them", report)
        assert "5 epochs, 225 steps of 32 images" in report
        assert "stopped after 640 images of epoch 2" in report
        for what in ("row ids", "losses", "weights", "test accuracy"):
            assert re.search(rf"^ *{what} .* yes *$", report, re.MULTILINE), report
        assert "EQUAL: the same rows in the same order" in report
        assert "NOT EQUAL" not in report
        accuracy = re.search(r"test accuracy +([\d.]+)% +([\d.]+)%", report)
        assert accuracy is not None
        assert accuracy[1] == accuracy[2]
        assert float(accuracy[1]) > 85
        assert max(map(len, report.splitlines())) <= 80

    def test_keeps_a_readable_table(self, kept: Kept) -> None:
        from sklearn.datasets import load_digits

        assert f"in {Path('new/kept')}" in kept.process.stdout
        path = kept.directory / demo.TABLE
        rows = list(hls.from_lance(path))
        digits = load_digits()
        assert [row["label"] for row in rows] == digits.target.tolist()
        assert [row["image"] for row in rows] == digits.data.astype(int).tolist()
        assert [row["part"] for row in rows] == ["train"] * 1440 + ["test"] * 357
        assert len(lance.dataset(path).get_fragments()) == 6

    def test_trained_on_every_row_once_in_each_epoch(self, kept: Kept) -> None:
        record = json.loads((kept.directory / demo.RECORD).read_text())
        rows = [row for step in record["rows"] for row in step]
        epochs = [rows[i : i + 1440] for i in range(0, len(rows), 1440)]
        assert len(epochs) == 5
        for epoch in epochs:
            assert sorted(epoch) == list(range(1440))
        assert len({tuple(epoch) for epoch in epochs}) == 5
        assert len(record["losses"]) == len(record["rows"]) == 225

    def test_stopped_in_mid_epoch(self, kept: Kept) -> None:
        assert saved_position(kept.directory / demo.CHECKPOINT) == 640

    def test_resumes_again_from_what_it_kept(self, kept: Kept) -> None:
        command = kept.process.stdout.splitlines()[-1].split()
        assert command[:3] == ["python", "-m", "hf_lance_stream.demo"]
        again = subprocess.run(
            [sys.executable, *command[1:]],
            cwd=kept.directory.parent.parent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert again.returncode == 0, again.stderr
        assert "EQUAL: the same rows" in again.stdout

    def test_refuses_a_directory_with_a_table(self, kept: Kept) -> None:
        before = {p: p.stat().st_mtime_ns for p in kept.directory.rglob("*")}
        process = run_command("demo", "--keep", str(kept.directory), cwd=kept.directory)
        assert process.returncode == 2
        assert process.stdout == ""
        assert "`--keep` must name a directory without digits.lance" in process.stderr
        assert str(kept.directory) in process.stderr
        assert "Traceback" not in process.stderr
        assert {p: p.stat().st_mtime_ns for p in kept.directory.rglob("*")} == before

    @pytest.mark.usefixtures("threads")
    def test_fails_when_the_checkpoint_has_another_position(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        save = demo.Training.save

        def save_and_tamper(training: demo.Training, path: Path) -> int:
            size = save(training, path)
            tamper(path, position=saved_position(path) + 1)
            return size

        monkeypatch.setattr(demo.Training, "save", save_and_tamper)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert cli.main(["demo"]) == 1
        report = capfd.readouterr().out
        assert "NOT EQUAL: the resumed run differs in row ids, losses, weights" in report
        assert re.search(r"^ *row ids +step 111: .* step 111: .* NO *$", report, re.MULTILINE)
        assert list(tmp_path.glob("hf_lance_stream_demo_*")) == []  # its directory is gone


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
class TestResume:
    """`resume` on tampered copies, in this process."""

    def test_other_weights_differ_in_losses_and_weights_only(
        self, copy_of_kept: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = copy_of_kept / demo.CHECKPOINT
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["model"]["1.bias"][0] += 1e-6
        torch.save(checkpoint, path)
        assert demo.resume(copy_of_kept) == 1
        report = capsys.readouterr().out
        assert re.search(r"^ *row ids .* yes *$", report, re.MULTILINE)
        assert re.search(r"^ *losses .* NO *$", report, re.MULTILINE)
        assert "NOT EQUAL: the resumed run differs in losses, weights" in report

    def test_a_refused_state_is_reported(
        self, copy_of_kept: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tamper(copy_of_kept / demo.CHECKPOINT, shuffle_seed=7)
        assert demo.resume(copy_of_kept) == 1
        report = capsys.readouterr().out
        assert "NOT RESUMED: " in report
        assert "shuffle_seed: saved 7, now 42" in report

    def test_another_record_is_a_mismatch(
        self, copy_of_kept: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = copy_of_kept / demo.RECORD
        record = json.loads(path.read_text())
        record["losses"].pop()
        path.write_text(json.dumps(record))
        assert demo.resume(copy_of_kept) == 1
        assert re.search(r"losses +step 225: none +step 225: 0\.\d+ +NO", capsys.readouterr().out)


class TestCompare:
    def equal(self, done: int, **changes: Any) -> list[bool]:
        end = {"weights": "ab", "accuracy": 1.0}
        record = {"rows": [[1], [2], [3]], "losses": [3.0, 2.0, 1.0], **end}
        resumed = {"rows": [[2], [3]], "losses": [2.0, 1.0], **end, **changes}
        return [check.equal for check in demo.compare(record, resumed, done)]

    def test_equal(self) -> None:
        assert self.equal(done=1) == [True] * 4

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"rows": [[3], [2]]}, [False, True, True, True]),
            ({"rows": [[2]]}, [False, True, True, True]),
            ({"rows": [[2], [3], [1]]}, [False, True, True, True]),
            ({"losses": [2.0, 1.0 + 2**-23]}, [True, False, True, True]),
            ({"losses": [2.0, float("nan")]}, [True, False, True, True]),
            ({"weights": "ac"}, [True, True, False, True]),
            ({"accuracy": 0.9}, [True, True, True, False]),
        ],
    )
    def test_each_difference_is_found(self, changes: dict[str, Any], expected: list[bool]) -> None:
        assert self.equal(done=1, **changes) == expected

    def test_nothing_compared_is_not_equal(self) -> None:
        assert self.equal(done=3, rows=[], losses=[]) == [False, False, True, True]


class TestCommand:
    def test_entry_point(self) -> None:
        (found,) = entry_points(group="console_scripts", name=cli.PROG)
        assert found.load() is cli.main

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_:
            cli.main(["--version"])
        assert exit_.value.code == 0
        assert capsys.readouterr().out == f"hf-lance-stream {hls.__version__}\n"

    @pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
    def test_help_names_the_exit_codes(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == 0
        assert "exit codes:" in capsys.readouterr().out

    @pytest.mark.parametrize("arguments", [[], ["dmeo"], ["demo", "--keep"], ["demo", "--kee=x"]])
    def test_wrong_arguments(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as exit_:
            cli.main(arguments)
        assert exit_.value.code == 2
        assert "error: " in capsys.readouterr().err

    @pytest.mark.parametrize("name", [demo.TABLE, demo.CHECKPOINT, demo.RECORD])
    def test_keep_refuses_what_it_would_overwrite(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / name).touch()
        assert cli.main(["demo", "--keep", str(tmp_path)]) == 2
        assert f"without {name}, which is already in {tmp_path}" in capsys.readouterr().err

    def test_keep_refuses_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").touch()
        assert cli.main(["demo", "--keep", str(tmp_path / "file")]) == 2
        assert "must name a directory: got" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["sklearn", "rich.console"])
    def test_a_missing_package_names_the_extra(
        self,
        name: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setitem(sys.modules, name, None)
        assert cli.main(["demo", "--keep", str(tmp_path / "new")]) == 2
        assert f"the demo needs the package {name.partition('.')[0]}" in (
            error := capsys.readouterr().err
        )
        assert 'pip install "hf_lance_stream[demo]"' in error
        assert not (tmp_path / "new").exists()

    def test_resume_without_a_kept_demo(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as exit_:
            demo._main(["resume", str(tmp_path)])
        assert exit_.value.code == 2
        assert demo.RECORD in capsys.readouterr().err
