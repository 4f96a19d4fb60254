"""Every example in the README and in the docstrings runs."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from helpers import make_table

import hf_lance_stream

README = Path(__file__).parent.parent / "README.md"
MODULES = [m.name for m in pkgutil.iter_modules(hf_lance_stream.__path__)]


def test_the_python_blocks_of_the_readme_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_table("pets.lance", 100, 50)
    text = README.read_text()
    scripts = r"^<!-- script: [\w-]+ -->\n```python\n.*?^```$"  # which torchrun runs in other tests
    text, count = re.subn(scripts, "", text, flags=re.MULTILINE | re.DOTALL)
    assert count >= 5
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    names: dict = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)


def test_the_readme_names_the_two_commands():
    commands = re.findall(r"<!-- command: (\w+) -->\n```bash\n(.+)\n```", README.read_text())
    assert [name for name, _ in commands] == ["demo", "test"]


@pytest.mark.parametrize("module", MODULES)
def test_doc_examples_run(module, tmp_path):
    def write_example_table(rows):
        return make_table(tmp_path / "example.lance", rows, 50)

    result = doctest.testmod(
        importlib.import_module(f"hf_lance_stream.{module}"),
        extraglobs={"write_example_table": write_example_table},
    )
    assert result.failed == 0
