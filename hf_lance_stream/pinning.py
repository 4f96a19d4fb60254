"""From what a user names as a table to a table at a pinned version."""

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_lance_stream.credentials import redacted
from hf_lance_stream.lance_errors import lance_errors, reason_of
from hf_lance_stream.open_table import no_such_version, open_lance
from hf_lance_stream.refs import Version, find_named, uri_of_handle
from hf_lance_stream.remote import is_remote_table, pin_remote
from hf_lance_stream.stored import StoredTable
from hf_lance_stream.table import Table

if TYPE_CHECKING:
    import lance


def pin(
    item: Any,
    version: Version | None,
    storage_options: dict[str, str] | None,
    argument: str = "source",
) -> StoredTable:
    """Open what a user named as a table, and pin its version.

    Args:
        item: a path or URI, a `lance.LanceDataset` or a `lancedb` table.
        version: version number, tag or branch; None for the latest.
        storage_options: passed to Lance.
        argument: the user's name for `item`, for errors.
    """
    import lance

    if is_remote_table(item):
        return pin_remote(item, version, storage_options, argument)
    if isinstance(item, str | os.PathLike):
        uri = os.fspath(item)
        if isinstance(uri, str):
            if "://" not in uri:
                uri = os.path.realpath(Path(uri).expanduser())
            number = version if isinstance(version, int) else None
            handle = open_lance(uri, number, storage_options, argument)
            return _at(handle, uri, version, storage_options)
    is_lancedb = type(item).__module__.startswith("lancedb.") and hasattr(item, "to_lance")
    if is_lancedb and not inspect.iscoroutinefunction(item.to_lance):
        try:
            with lance_errors(str(getattr(item, "uri", "")), storage_options):
                item = item.to_lance()
        except Exception as error:
            raise ValueError(
                f"`{argument}` is a LanceDB table that has no local Lance table behind it: "
                f"got {type(item).__name__}; Lance says: {reason_of(error)}"
            ) from error
    if isinstance(item, lance.LanceDataset):
        options = storage_options or getattr(item, "_storage_options", None)
        uri = item.uri if "://" in item.uri else os.path.realpath(item.uri)
        return _at(item, uri_of_handle(item, uri), version, options)
    raise ValueError(
        f"`{argument}` must be a path or URI (str or Path), a lance.LanceDataset, a "
        f"lancedb table (not an AsyncTable), or a list of these: got {type(item).__name__}"
    )


def _at(
    handle: "lance.LanceDataset",
    uri: str,
    version: Version | None,
    storage_options: dict[str, str] | None,
) -> Table:
    """The open table at `version`; None for where it is."""
    is_fixed = version is not None
    try:
        with lance_errors(uri, storage_options):
            if isinstance(version, int) and version != handle.version:
                handle = handle.checkout_version(version)
            elif isinstance(version, str | tuple):
                uri, handle, is_fixed = find_named(handle, uri, version)
    except (ValueError, OSError, LookupError) as error:
        raise no_such_version(uri, version, error) from error
    return Table(uri, handle.version, storage_options, is_fixed, _handles={os.getpid(): handle})


def check_version_argument(version: Any) -> None:
    """Raise ValueError unless `version` is a `Version` or None."""
    is_pair = isinstance(version, tuple) and len(version) == 2
    name, number = version if is_pair else (version, version)
    is_number = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63
    is_name = isinstance(name, str) and bool(name)
    is_known = is_name and (is_number or number is None) if is_pair else is_name or is_number
    if version is not None and not is_known:
        raise ValueError(
            "`version` must be a version number, a tag, a branch, or a tuple of a branch and a "
            f"version number (or None, for the latest): got version={version!r}"
        )


def check_storage_options(options: Any) -> None:
    """Raise ValueError unless `options` maps names to texts, or is None."""
    is_dict = isinstance(options, dict) and all(
        isinstance(text, str) for pair in options.items() for text in pair
    )
    if options is not None and not is_dict:
        got = redacted(options) if isinstance(options, dict) else f"a {type(options).__name__}"
        raise ValueError(f"`storage_options` must be a dict of str to str or None: got {got}")
