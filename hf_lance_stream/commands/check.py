"""The sub-command ``check``."""

from typing import Any


def add(commands: Any) -> None:
    """Add its parser."""
