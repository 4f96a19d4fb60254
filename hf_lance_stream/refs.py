"""Names of the versions of a Lance table: its tags and its branches.

A branch has versions and a URI of its own, ``<table>/tree/<branch>``; the tags of a table are
for the versions of all its branches.
"""

import difflib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    import lance

Version = int | str | tuple[str, int | None]
"""A version number; a tag or branch; or a branch with a number of its own, None for its latest."""

_MAIN = "main"  # Lance's name of the branch that a table begins with
_BRANCH_FIELD = 20  # of Lance's manifest


def find_named(
    handle: "lance.LanceDataset", uri: str, version: str | tuple[str, int | None]
) -> tuple[str, "lance.LanceDataset", bool]:
    """The version that a name stands for.

    Args:
        handle: the table, at any version.
        uri: where it, or a branch of it, is.
        version: a tag or branch; or a branch and one of its version numbers.

    Returns:
        The URI of its branch, the table at it, and whether the name is for this one version, as
        that of a branch is not.

    Raises:
        LookupError: there is no tag or branch of that name; it tells those there are.
        ValueError, OSError: the branch has no such version, from Lance.
    """
    tags, branches = handle.tags.list(), [_MAIN, *handle.branches.list()]
    name, number = (version, None) if isinstance(version, str) else version
    if isinstance(version, str) and name in tags:
        name, number = tags[name]["branch"] or _MAIN, tags[name]["version"]
    elif name not in branches:
        known = [*branches[1:], *(tags if isinstance(version, str) else [])]
        raise LookupError(_names(name, known, "tags and branches" if tags else "branches"))
    found = handle.checkout_version((name, number))
    return _uri_of_branch(uri, name, branches), found, number is not None


def uri_of_handle(handle: "lance.LanceDataset", uri: str) -> str:
    """Where the branch of an open table is: a handle keeps the URI that it was opened with.

    Args:
        handle: the table, which may have been checked out on a branch.
        uri: that URI.
    """
    branches = handle.branches.list()
    return _uri_of_branch(uri, _branch_of(handle), [_MAIN, *branches]) if branches else uri


def tag(handle: "lance.LanceDataset", uri: str, name: str) -> bool:
    """Tag the version of `handle`.

    Returns:
        Whether the tag is new.

    Raises:
        LookupError: the tag is that of another version; it tells which.
        ValueError, OSError: Lance refuses the name, or cannot write.
    """
    if is_tagged(handle, uri, name):
        return False
    if name in handle.branches.list():
        raise ValueError("ref is invalid: it is the name of a branch, which would be hidden")
    try:
        handle.tags.create(name, handle.version)
    except (ValueError, OSError):
        if is_tagged(handle, uri, name):  # by another rank, in between
            return False
        raise
    return True


def untag(handle: "lance.LanceDataset", uri: str, name: str) -> bool:
    """Remove the tag of the version of `handle`.

    Returns:
        Whether there was one.

    Raises:
        LookupError: the tag is that of another version; it tells which.
        ValueError, OSError: Lance cannot write.
    """
    if not is_tagged(handle, uri, name):
        return False
    handle.tags.delete(name)
    return True


def is_tagged(handle: "lance.LanceDataset", uri: str, name: str) -> bool:
    """Whether the version of `handle` has this tag; LookupError when another version has it."""
    found = handle.tags.list().get(name)
    if found is None:
        return False
    branch = _branch_of_uri(uri, handle.branches.list())
    if (found["branch"] or _MAIN, found["version"]) != (branch, handle.version):
        on = f" of branch {found['branch']!r}" if found["branch"] else ""
        raise LookupError(f"version {found['version']}{on}")
    return True


def _names(name: str, known: list[str], kind: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"it has no such name{hint} (its {kind}: {sorted(known)[:20]})"


def _uri_of_branch(uri: str, branch: str, branches: list[str]) -> str:
    """The URI of a branch, from that of any branch of the table."""
    parts = urlsplit(uri) if "://" in uri else None
    path = uri if parts is None else parts.path
    own = _branch_of_uri(path, branches)
    if own == branch:
        return uri
    path = path.rstrip("/").removesuffix(f"/tree/{own}")
    if branch != _MAIN:
        path += f"/tree/{branch}"
    return path if parts is None else urlunsplit(parts._replace(path=path))


def _branch_of_uri(uri: str, branches: list[str]) -> str:
    path = urlsplit(uri).path if "://" in uri else uri
    own = (b for b in branches if path.rstrip("/").endswith(f"/tree/{b}"))
    return max(own, key=len, default=_MAIN)


def _branch_of(handle: "lance.LanceDataset") -> str:
    """The branch that an open table is on.

    Private: nothing public tells it. The manifest, a protobuf message, has its name.
    """
    message, place = handle._ds.serialized_manifest(), 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        size = {1: 8, 5: 4}.get(kind, 0)
        if kind in (0, 2):
            size, place = _varint(message, place)
        if key >> 3 == _BRANCH_FIELD:
            return str(message[place : place + size], "utf-8")
        place += 0 if kind == 0 else size
    return _MAIN


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A protobuf integer at `place`, and the place after it."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
