"""Opening a Lance table by its path or URI, with errors that say what is there instead."""

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_lance_stream.credentials import public_uri
from hf_lance_stream.lance_errors import (
    hint_of_opening,
    is_network_error,
    is_reading_error,
    lance_errors,
    reason_of,
)
from hf_lance_stream.processes import refuse_unsafe_fork

if TYPE_CHECKING:
    import lance


def open_lance(
    uri: str,
    version: int | None,
    storage_options: dict[str, str] | None,
    argument: str,
) -> "lance.LanceDataset":
    """Open the table at a path or URI.

    Args:
        uri: where it is.
        version: version number; None for the latest.
        storage_options: passed to Lance.
        argument: the user's name for `uri`, for errors.

    Raises:
        FileNotFoundError: there is no such table, or no such version.
        OSError: it cannot be read.
        ValueError: it is none.
    """
    import lance

    refuse_unsafe_fork()
    name, at = public_uri(uri), "" if version is None else f" at version {version}"
    if "://" not in uri:
        _check_directory(Path(uri), argument)
    try:
        with lance_errors(uri, storage_options):
            handle = lance.dataset(uri, version=version, storage_options=storage_options)
            _ = handle.schema  # of a damaged manifest it is unreadable
            return handle
    except (ValueError, OSError) as error:
        is_missing = "not found" in str(error).lower()
        is_fault = is_network_error(error) or is_reading_error(error)
        if version is not None and (is_missing or not is_fault):
            raise no_such_version(uri, version, error) from error
        if is_missing:
            raise FileNotFoundError(
                f"`{argument}`: there is no Lance table at {name!r}: {reason_of(error)}"
            ) from error
        kind = OSError if is_reading_error(error) else ValueError
        raise kind(
            f"`{argument}`: {name!r} cannot be opened{at}: {reason_of(error)}"
            + hint_of_opening(error)
        ) from error


def _check_directory(path: Path, argument: str) -> None:
    try:
        exists, is_one = path.exists(), is_table(path)
    except OSError as error:
        raise type(error)(f"`{argument}`: {str(path)!r} cannot be opened: {error}") from error
    if not exists:
        near = difflib.get_close_matches(path.name, tables_in(path.parent), n=1)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise FileNotFoundError(f"`{argument}`: there is no table at {str(path)!r}{hint}")
    if not is_one:
        inside = tables_in(path)
        hint = f"; it holds the tables {inside}: name one of them" if inside else ""
        raise ValueError(
            f"`{argument}`: {str(path)!r} is not a Lance table: it has no _versions directory{hint}"
        )


def no_such_version(uri: str, version: Any, error: Exception) -> FileNotFoundError:
    """The error for a version, tag or branch that a table does not have."""
    return FileNotFoundError(
        f"`version`: {public_uri(uri)!r} has no version {version!r}: {reason_of(error)}; "
        "versions can be cleaned up unless they are tagged; pass a version, tag or branch that "
        "exists, or leave it out"
    )


def is_table(path: Path) -> bool:
    """Whether a local directory is a Lance table."""
    return (path / "_versions").is_dir()


def tables_in(directory: Path) -> list[str]:
    """Names of the tables in a local directory."""
    try:
        return sorted(p.name for p in directory.iterdir() if is_table(p))
    except OSError:
        return []
