"""The table in the README of what was tried: its numbers are those of the tests.

Every test of a file in `TABLE` compares all rows with a plain scan of the pinned version, or what
is refused with the words of the refusal; none may lose, repeat or change a row in silence.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import arrow_types
import pytest
import test_blobs
import test_conformance
import test_errors
import test_faults
import test_security
import test_versions
from pipelines import PIPELINES

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"

TABLE = {
    "changes of a table": (test_versions.CHANGES, ["versions", "version_states"]),
    "Arrow types": (arrow_types.COLUMNS, ["types", "formats", "nested", "plain_types"]),
    "ways to read blobs": (test_blobs.READS, ["blobs", "lazy_blobs", "media"]),
    "kinds of source": (
        [*test_conformance.KINDS, "s3", "gs", "az", "hf"],
        ["conformance", "lancedb", "remote", "object_store", "stores"],
    ),
    "kinds of damaged data files": (test_faults.FAULTS, ["faults"]),
    "bad rows": (["cast", "decode", "transform"], ["bad_rows"]),
    "pipelines on top": (PIPELINES, ["wrappers"]),
    "damages of a state": (test_errors.DAMAGES, ["errors", "state", "golden_state"]),
    "kinds of secrets": (test_security.SECRETS, ["security", "fuzz"]),
}
"""By the words of the README: the kinds, and the files of the tests that try them."""


@pytest.fixture(scope="module")
def collected() -> Counter[str]:
    """How many tests pytest finds in each file."""
    files = [f"test_{name}.py" for _, names in TABLE.values() for name in names]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "", *files],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stdout[-2000:]
    return Counter(re.findall(r"test_(\w+)\.py::", run.stdout))


@pytest.mark.parametrize("words", TABLE)
def test_the_numbers_of_the_readme_are_those_of_the_tests(
    collected: Counter[str], words: str
) -> None:
    kinds, files = TABLE[words]
    tests = sum(collected[name] for name in files)
    assert all(collected[name] for name in files)
    row = next(
        line for line in README.read_text().splitlines() if line.startswith(f"| {words}")
    ).split("|")
    assert (row[2].strip(), row[3].strip().replace(",", "")) == (str(len(kinds)), str(tests))


def test_every_row_of_the_readme_is_counted() -> None:
    text = README.read_text()
    table = text[text.index("| tried | kinds | tests |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == len(TABLE)
