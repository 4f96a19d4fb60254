"""Lance's errors in words: short, without secrets, and a panic of its code as an error too."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hf_lance_stream.credentials import hide_in_error, public_uri, secret_texts

_PANIC = "PanicException"  # of pyo3, which cannot be imported
_DAMAGED = ("fill whole buffer", "corrupt", "panicked", "invalid magic", "not appear to be")
_READING = ("lanceerror(io)", "external error: not found")
_NETWORK = ("error performing", "http error", "after 3 retries")


@contextmanager
def lance_errors(uri: str, storage_options: Mapping[str, str] | None) -> Iterator[None]:
    """Where Lance is called: what it raises is an Exception, without the secrets of a table.

    Raises:
        OSError: Lance's code panicked, as it does over some damaged files.
    """
    try:
        yield
    except Exception as error:
        hide_in_error(error, secret_texts(uri, storage_options))
        raise
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        hide_in_error(error, secret_texts(uri, storage_options))
        raise OSError(f"Lance panicked, as it does over damaged files: {error}") from error


def reason_of(error: BaseException) -> str:
    """The first line of a Lance error, without the places in Lance's own source."""
    text = public_uri(str(error).strip())
    return re.sub(r", \S+\.rs:\d+:\d+", "", text.splitlines()[0]) if text else repr(error)


def is_reading_error(error: Exception) -> bool:
    """Whether files could not be read, where Lance may have made a ValueError of it."""
    text = str(error).lower()
    return isinstance(error, OSError) or any(word in text for word in (*_READING, *_DAMAGED))


def is_network_error(error: Exception) -> bool:
    """Whether the object store could not be asked, or did not let us."""
    text = str(error).lower()
    return any(word in text for word in _NETWORK)


def hint_of_opening(error: Exception) -> str:
    """What to try after a table could not be opened."""
    if "builder error" in str(error):  # what the HTTP client says of a URL it may not use
        return '; an http:// endpoint needs storage_options={"allow_http": "true"}'
    return ""


def hint_of_reading(error: Exception, name: str) -> str:
    """What may be the cause when rows of the table `name` could not be read."""
    text = str(error).lower()
    is_own_file = name.rstrip("/").rpartition("/")[2].lower() in text  # not an external blob
    if "not found" in text and is_own_file:
        return (
            "; its files may have been removed by a clean-up of old versions: tag the versions "
            "that are in use"
        )
    if "permission denied" in text:
        return "; this user may not read the file: change its permissions"
    if any(word in text for word in _DAMAGED):
        return (
            "; the file seems to be damaged: restore it and go on from the last state, or delete "
            "its rows"
        )
    return ""
