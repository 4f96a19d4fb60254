"""Environment and fixtures of all tests. Helper functions are in `helpers`."""

import os
import tempfile

# Before `datasets` is imported: no network, and a cache that is thrown away. Spawned processes
# inherit both.
os.environ["HF_HUB_OFFLINE"] = "1"
_home = tempfile.TemporaryDirectory(prefix="hf_lance_stream_tests_")
os.environ["HF_HOME"] = _home.name
os.environ["HF_DATASETS_CACHE"] = f"{_home.name}/datasets"

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from command import Command  # noqa: E402
from helpers import make_table  # noqa: E402

SLOW = {
    "accelerate",
    "bench_command",
    "conformance",
    "elastic",
    "faults",
    "fuzz",
    "lightning",
    "notebooks",
    "torchrun",
    "trainer_torchrun",
    "version_states",
    "writing",
}
"""Files of tests that take longest, most of it for starting processes; `pytest -m ""` runs all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of these files as slow."""
    for item in items:
        if item.path.stem.removeprefix("test_") in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def table(tmp_path: Path) -> str:
    """T(1000, 250) with the columns id, text and label."""
    return make_table(tmp_path / "pets.lance", 1000, 250, ["id", "text", "label"])


@pytest.fixture(scope="module")
def ranks_table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """T(1010, 250) with the columns id, vector and score: 24 splits do not divide it."""
    path = tmp_path_factory.mktemp("table") / "t.lance"
    return make_table(path, 1010, 250, ["id", "vector", "score"])


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``hf-lance-stream`` in this process."""
    return Command(capsys)
