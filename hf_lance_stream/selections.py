"""The rows that a filter selects, in a file that the workers of a process map into their memory.

A worker would else apply the filter again, and hold 8 bytes per matching row of its own. The file
has no name, so that nothing is left of it when its process has ended, however that came about. It
is there only when a worker is started. Where it cannot be written, or be opened, the worker
applies the filter.
"""

import logging
import os
import secrets
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from hf_lance_stream.permutation import Int64Array

logger = logging.getLogger(__name__)

_MARK_BYTES = 32  # at the beginning: random, so that no other file is taken for this one
_OPEN_FILES = Path("/proc/self/fd")


@dataclass(frozen=True)
class SelectionFile:
    """Where another process finds selections.

    Attributes:
        path: of the open file of the process that wrote it.
        mark: its first bytes.
        sizes: rows of each selection.
    """

    path: str
    mark: bytes
    sizes: tuple[int, ...]

    def open(self) -> list[Int64Array] | None:
        """The selections, int64, read-only; None where the file is gone."""
        try:
            mapped: Int64Array = np.memmap(self.path, dtype=np.int64, mode="r").view(np.ndarray)
        except (OSError, ValueError):  # ValueError: another file is at its place
            return None
        begin = _MARK_BYTES // mapped.itemsize
        if mapped.size != begin + sum(self.sizes) or mapped[:begin].tobytes() != self.mark:
            return None
        return np.split(mapped[begin:], np.cumsum(self.sizes)[:-1])


class SharedSelections:
    """Selections in a file that lasts as long as this object.

    Args:
        selections: offsets of the rows of each table, int64.
    """

    def __init__(self, selections: Sequence[Int64Array]) -> None:
        self.reference: SelectionFile | None = None
        """Where a worker finds them; None where they could not be written."""
        if not _OPEN_FILES.is_dir():  # outside Linux a file without a name cannot be found
            return
        mark = secrets.token_bytes(_MARK_BYTES)
        try:
            file = _write((mark, *selections))
        except OSError as error:
            logger.warning(
                "the rows that a filter selects could not be written to %s for the workers (%s): "
                "each of them applies the filter itself, and takes 8 bytes of memory per matching "
                "row. Make room, or set TMPDIR to another directory.",
                tempfile.gettempdir(),
                error,
            )
            return
        weakref.finalize(self, file.close)
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        self.reference = SelectionFile(path, mark, tuple(len(part) for part in selections))


def _write(parts: Iterable[bytes | Int64Array]) -> IO[bytes]:
    """A new file without a name."""
    file = tempfile.TemporaryFile(prefix="hf_lance_stream_")  # noqa: SIM115
    try:
        for part in parts:
            file.write(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
        file.flush()
    except OSError:
        with suppress(OSError):  # it tries to write once more
            file.close()
        raise
    return file
