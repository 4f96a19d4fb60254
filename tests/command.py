"""Running ``hf-lance-stream`` in this process, for its tests."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hf_lance_stream import cli


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)


class Command:
    """Calls `cli.main` and gives its exit code and what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: Any) -> Result:
        self.capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code  # type: ignore[assignment]
        printed = self.capsys.readouterr()
        return Result(code, printed.out, printed.err)


def delete_data(table: str) -> None:
    """Remove the data files of a table, so that whatever reads them fails."""
    shutil.rmtree(Path(table) / "data")
