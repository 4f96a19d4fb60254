"""Every notebook runs, and what is committed is what it gives.

``python tests/test_notebooks.py`` executes all of them and saves them with their outputs.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""All the metadata a committed notebook has: nothing of the machine that ran it."""

MACHINE_PATH = re.compile(
    r"(?<![\w:/.])/(?:tmp|work|root|home|Users|usr|var|private|mnt|opt)\b|\b[A-Z]:\\"
)

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook: Any, directory: Path) -> Any:
    """A copy of `notebook`, executed from top to bottom in `directory`.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails.
    """
    fresh = deepcopy(notebook)
    for cell in code_cells(fresh):
        cell.outputs, cell.execution_count = [], None
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | {
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": str(directory / "ipython"),  # not the user's profile
        "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm without ipywidgets
    }
    client = NotebookClient(
        fresh,
        kernel_name="python3",
        timeout=120,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(directory)}},
    )
    client.execute(env=environment)
    fresh.metadata = nbformat.from_dict(METADATA)
    return fresh


def texts(cell: Any) -> str:
    """What a cell printed or displayed as text; decimals and percentages may differ."""
    parts = [
        output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain")
        for output in cell.outputs
    ]
    return re.sub(r"\.\d+|\d+%", "#", "".join(part or "" for part in parts))


def strings(value: Any) -> Iterator[str]:
    """All strings in a notebook but those of images."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if not key.startswith("image/"):
                yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "01_quickstart",
        "02_elastic_resume",
        "03_trainer",
        "04_shuffle_quality",
    ]


@pytest.mark.slow
@every_notebook
def test_runs_and_gives_what_is_committed(path: Path, tmp_path: Path) -> None:
    committed = read(path)
    executed = execute(committed, tmp_path)
    pairs = list(zip(code_cells(committed), code_cells(executed), strict=True))
    assert [c.source for c, _ in pairs] == [e.source for _, e in pairs]
    for before, after in pairs:
        assert texts(before) == texts(after), before.source
        assert kinds(before) == kinds(after), before.source


def kinds(cell: Any) -> set[str]:
    """The kinds of output a cell has, such as ``stdout`` and ``image/png``."""
    found = {output.name for output in cell.outputs if output.output_type == "stream"}
    return found.union(*(output.get("data", {}) for output in cell.outputs))


@every_notebook
def test_is_committed_with_the_outputs_of_one_clean_run(path: Path) -> None:
    notebook = read(path)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) / 2
    for cell in cells:
        assert not {"error", "stderr"} & {o.get("name", o.output_type) for o in cell.outputs}
    nbformat.validate(notebook)


@every_notebook
def test_has_nothing_of_the_machine_in_it(path: Path) -> None:
    notebook = read(path)
    assert notebook.metadata == METADATA
    assert all(cell.metadata == {} for cell in notebook.cells)
    found = [text for text in strings(notebook) if MACHINE_PATH.search(text)]
    assert found == []


def test_a_machine_path_would_be_found() -> None:
    for text in ("/tmp/x", "Table: /home/me/t.lance", '"/work/main"', "C:\\Users"):
        assert MACHINE_PATH.search(text), text
    for text in ("https://host/home/page", "s3://bucket/tmp/t.lance", "train/test", "and/or"):
        assert not MACHINE_PATH.search(text), text


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as scratch:
            nbformat.write(execute(read(notebook_path), Path(scratch)), notebook_path)
        print(f"executed and saved {notebook_path.name}")
