"""The command ``hf-lance-stream``: what holds for all sub-commands, and the order of an epoch.

The other sub-commands are in `test_cli_inspect`, `test_cli_plan`, `test_cli_check`, `test_demo`.
"""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import lance
import lancedb
import pyarrow as pa
import pytest
from command import Command, delete_data
from helpers import ids, make_table

import hf_lance_stream as hls
from hf_lance_stream import cli
from hf_lance_stream.commands import common, order
from hf_lance_stream.commands.report import Report, printable

NAMES = ["inspect", "plan", "order", "check", "bench", "convert", "demo"]
ON_A_TABLE = [["inspect"], ["plan"], ["order"]]


def run_process(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "hf_lance_stream.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


class TestHelp:
    def test_names_all_sub_commands_and_the_exit_codes(self, command: Command) -> None:
        found = command("--help")
        assert found.code == 0
        for name in NAMES:
            assert f"\n    {name} " in found.out
        assert "exit codes:" in found.out

    @pytest.mark.parametrize("name", NAMES)
    def test_of_a_sub_command_explains_each_argument(self, name: str, command: Command) -> None:
        found = command(name, "--help")
        assert found.code == 0
        assert "exit codes:" in found.out
        parser = cli._parser()._subparsers._group_actions[0].choices[name]
        for action in parser._actions:
            assert action.help
            for text in action.option_strings:
                assert text in found.out
        if name != "demo":
            assert "--json" in found.out


class TestErrors:
    @pytest.mark.parametrize("arguments", [*ON_A_TABLE, ["plan", "--json"]])
    def test_a_missing_table_is_exit_code_2_and_stdout_stays_empty(
        self, arguments: list[str], table: str, command: Command
    ) -> None:
        found = command(*arguments, table.replace("pets", "pet"))
        assert found.code == 2
        assert found.out == ""
        assert found.err.startswith(f"hf-lance-stream {arguments[0]}: error: `TABLE`: there is no")
        assert "did you mean" in found.err

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["plan", "T", "--gpus", "0"], "`--gpus` must be an integer in [1"),
            (["plan", "T", "--gpus", "2,x"], "must be a number, or several such as 4,8"),
            (["plan", "T", "--workers", "-1"], "`--workers`"),
            (["plan", "T", "--batch", "0"], "`--batch`"),
            (["plan", "T", "--global-batch", "0"], "`--global-batch`"),
            (["plan", "T", "--batch", "1", "--global-batch", "2"], "not allowed with argument"),
            (["plan", "T", "--num-splits", "0"], "`num_splits` must be an integer in [1"),
            (["plan", "T", "--seed", "-1"], "`shuffle_seed`"),
            (["plan", "T", "--filter", "no_such = 1"], "`filter` cannot be applied"),
            (["order", "T", "--tail", "cut"], "invalid choice: 'cut'"),
            (["order", "T", "--rank", "1"], "both or neither of --rank and --world-size"),
            (["order", "T", "--rank", "2", "--world-size", "2"], "`--rank`"),
            (["order", "T", "--rows", "0"], "`--rows`"),
            (["order", "T", "--num-splits", "3", "--rank", "0", "--world-size", "2"], "divisible"),
            (["order", "T", "--columns", "txet"], "did you mean 'text'?"),
            (["inspect", "T", "--version", "9"], "has no version 9"),
            (["inspect", "T", "--version", "gold"], "has no version 'gold'"),
            (["inspect", "T", "T"], "unrecognized arguments"),
            (["plan", "T", "T", "--table", "x"], "`--table` names a table of one database: got 2"),
        ],
    )
    def test_wrong_arguments_are_named(
        self, arguments: list[str], text: str, table: str, command: Command
    ) -> None:
        found = command(*[table if argument == "T" else argument for argument in arguments])
        assert found.code == 2
        assert found.out == ""
        assert text in found.err

    def test_an_interrupt_is_exit_code_130(
        self, table: str, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(arguments):
            raise KeyboardInterrupt

        monkeypatch.setattr(order, "run", interrupt)
        found = command("order", table)
        assert found.code == 130
        assert found.err == "hf-lance-stream order: interrupted\n"


class TestTables:
    def test_a_table_of_a_lancedb_database(self, tmp_path: Path, command: Command) -> None:
        lancedb.connect(tmp_path / "db").create_table("pets", pa.table({"id": range(30)}))
        lancedb.connect(tmp_path / "db").create_table("cars", pa.table({"id": range(7)}))
        found = command("order", tmp_path / "db", "--table", "pets", "--json")
        assert found.json["rows_of_epoch"] == 30
        wrong = command("order", tmp_path / "db", "--table", "pest")
        assert wrong.code == 2
        assert "did you mean 'pets'?" in wrong.err

    def test_a_version_by_number_and_by_tag(self, table: str, command: Command) -> None:
        written = lance.dataset(table)
        written.tags.create("gold", 1)
        written.delete("id < 100")
        rows = {
            version: command("inspect", table, "--json", *version).json["rows"]
            for version in ((), ("--version", "1"), ("--version", "gold"), ("--version", "2"))
        }
        assert list(rows.values()) == [900, 1000, 1000, 900]

    def test_several_tables_are_read_as_one(self, tmp_path: Path, command: Command) -> None:
        tables = [make_table(tmp_path / f"{i}.lance", 50, 20, start=50 * i) for i in range(2)]
        found = command("order", *tables, "--seed", 1, "--rows", 100, "--columns", "id", "--json")
        expected = ids(hls.from_lance(tables, shuffle_seed=1))
        assert [row["id"] for row in found.json["values"]] == expected

    @pytest.mark.parametrize("arguments", ON_A_TABLE)
    def test_storage_options_reach_lance_and_are_never_printed(
        self,
        arguments: list[str],
        table: str,
        command: Command,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        given = []

        def spy(*args, storage_options, **kwargs):
            given.append(storage_options)
            return original(*args, storage_options=storage_options, **kwargs)

        original = common.open_source
        monkeypatch.setattr(common, "open_source", spy)
        options = ["--storage-option", "a=hush=1", "--storage-option", "region=hush2"]
        for extra in ([], ["--json"]):
            found = command(*arguments, table, *options, *extra)
            assert found.code == 0
            assert "hush" not in found.out + found.err
        assert given == [{"a": "hush=1", "region": "hush2"}] * 2
        missing = command(*arguments, table + "x", *options)
        assert missing.code == 2
        assert "hush" not in missing.out + missing.err

    @pytest.mark.parametrize(
        "options",
        [
            ["--storage-option", "hush"],
            ["--storage-option", "=hush"],
            ["--storage-opt=key=hush"],
            ["--storage-options", "key=hush"],
        ],
    )
    def test_a_wrong_storage_option_is_not_echoed(
        self, options: list[str], table: str, command: Command
    ) -> None:
        found = command("inspect", table, *options)
        assert found.code == 2
        assert "storage-opt" in found.err
        assert "hush" not in found.err

    def test_a_password_in_a_uri_is_not_printed(self, command: Command) -> None:
        found = command("inspect", "nosuch://me:hush@host/no.lance")
        assert found.code == 2
        assert "no.lance" in found.err
        assert "hush" not in found.err


class TestProcess:
    def test_json_is_all_there_is_on_stdout_and_stderr_is_empty(self, table: str) -> None:
        found = run_process("order", table, "--seed", "3", "--num-splits", "7", "--json")
        assert found.returncode == 0
        assert found.stderr == ""
        expected = ids(hls.from_lance(table, shuffle_seed=3, num_splits=7))[:20]
        assert json.loads(found.stdout)["rows"] == expected

    def test_a_reader_that_has_seen_enough_is_no_error(self, tmp_path: Path) -> None:
        path = make_table(tmp_path / "t.lance", 30_000, 30_000)  # more than a pipe holds
        script = f"{sys.executable} -m hf_lance_stream.cli order {path} --rows 30000 | head -n 1"
        found = subprocess.run(
            ["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, timeout=120
        )
        assert (found.returncode, found.stdout, found.stderr) == (0, "Epoch\n", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestReport:
    def report(self) -> Report:
        report = Report()
        report.heading("Head")
        report.line("word " * 40, "Label")
        report.table(["name", "number"], [["[a]", 1234], ["b", 5], ["…", None]])
        return report

    def test_plain_text_is_wrapped_and_aligned(self) -> None:
        lines = self.report().text().splitlines()
        assert lines[0] == "Head"
        assert lines[1].startswith("  Label: word word")
        assert max(map(len, lines)) <= 100
        assert lines[-4:] == ["  name  number", "  [a]    1,234", "  b          5", "  …"]

    def test_a_terminal_gets_the_same_words_by_rich(self) -> None:
        terminal = Terminal()
        self.report().print(terminal)
        shown = terminal.getvalue()
        assert "─" in shown
        for text in ("Head", "Label:", "[a]", "1,234"):
            assert text in shown

    def test_a_terminal_without_rich_gets_plain_text(self, monkeypatch) -> None:
        monkeypatch.setitem(sys.modules, "rich.console", None)
        terminal = Terminal()
        self.report().print(terminal)
        assert terminal.getvalue() == self.report().text() + "\n"

    def test_nothing_that_a_terminal_obeys_is_printed(self, tmp_path, command: Command) -> None:
        path = str(tmp_path / "t.lance")
        lance.write_dataset(pa.table({"text": ["\x1b[2J\x07 wiped", "b"]}), path)
        found = command("order", path, "--columns", "text")
        assert "wiped" in found.out
        assert "\x1b" not in found.out
        assert "\x07" not in found.out
        assert "\x1b" not in command("inspect", "\x1b[2J").err
        assert printable("a\nb\x1b") == "a\nb\N{REPLACEMENT CHARACTER}"


def test_the_commands_of_the_readme_run(tmp_path, command: Command, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = pa.table({"id": range(1000), "x": [i / 10 for i in range(1000)]})
    lance.write_dataset(x, "numbers.lance")
    Path("state.json").write_text(json.dumps(hls.from_lance("numbers.lance").state_dict()))
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (block,) = re.findall(r"<!-- commands -->\n```bash\n(.+?)\n```", readme, re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [line[1] for line in lines] == ["inspect", "plan", "order", "check"]
    for prog, *arguments in lines:
        assert prog == cli.PROG
        found = command(*arguments)
        assert found.code == 0, found
        assert found.out
        json.loads(command(*arguments, "--json").out)


class TestOrder:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"shuffle_seed": 5},
            {"shuffle_seed": 5, "shuffle_clump_size": 16, "num_splits": 7, "epoch": 3},
            {"num_splits": 24, "shuffle_seed": 2, "tail": "pad"},
            {"num_splits": 24, "rank": 2, "world_size": 3, "tail": "keep"},
            {"rank": 1, "world_size": 2, "shuffle_seed": 1},
        ],
    )
    def test_is_that_of_from_lance_and_reads_nothing(
        self, options: dict, table: str, command: Command
    ) -> None:
        expected = ids(hls.from_lance(table, **options))
        delete_data(table)
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        found = command("order", table, "--rows", 2000, "--json", *arguments)
        assert found.code == 0, found.err
        assert found.json["rows"] == expected
        assert found.json["rows_of_epoch"] == len(expected)
        part = command("order", table, "--rows", 9, "--from", 123, "--json", *arguments)
        assert part.json["rows"] == expected[123:132]
        assert command("order", table, *arguments).code == 0

    def test_split_of_each_row(self, table: str, command: Command) -> None:
        found = command("order", table, "--num-splits", 8, "--rank", 1, "--world-size", 2, "--json")
        assert found.json["splits"] == [4, 5, 6, 7] * 5
        assert command("order", table, "--json").json["splits"] is None

    def test_columns_shows_values(self, table: str, command: Command) -> None:
        arguments = ("order", table, "--seed", 1, "--columns", "text,id", "--rows", 5)
        expected = list(hls.from_lance(table, ["text", "id"], shuffle_seed=1).take(5))
        assert command(*arguments, "--json").json["values"] == expected
        assert expected[0]["text"] in command(*arguments).out

    def test_filter_numbers_the_rows_that_match(self, table: str, command: Command) -> None:
        arguments = ("order", table, "--filter", "id >= 990", "--columns", "id", "--json")
        found = command(*arguments).json
        assert found["rows"] == list(range(10))
        assert [row["id"] for row in found["values"]] == list(range(990, 1000))

    def test_values_that_json_lacks(self, tmp_path: Path, command: Command) -> None:
        path = str(tmp_path / "t.lance")
        values = {"b": [b"\xff" * 3], "f": [float("nan")], "l": [[{"d": float("inf")}]]}
        lance.write_dataset(pa.table(values), path)
        found = command("order", path, "--columns", "b,f,l", "--json")
        assert found.json["values"] == [{"b": "<3 bytes>", "f": "nan", "l": [{"d": "inf"}]}]

    def test_beyond_the_end_and_of_an_empty_table(
        self, table: str, tmp_path: Path, command: Command
    ) -> None:
        found = command("order", table, "--from", 1000)
        assert found.code == 0
        assert "No rows from 1,000 on: there are 1,000" in found.out
        empty = str(tmp_path / "empty.lance")
        lance.write_dataset(pa.table({"id": pa.array([], pa.int64())}), empty)
        assert command("order", empty, "--json").json["rows"] == []
