"""Credentials: what of options and URIs is secret, and keeping it out of pickles and errors.

Secrets go to Lance, and to child processes that multiprocessing starts, which must read too. They
are in no state, no `repr` and no error; and in another pickle only if the user asks for it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

HIDDEN = "***"
"""What takes the place of a secret in a text."""

_NAMES = re.compile(
    r"key|secret|token|passw|passphrase|credential|signature|bearer|authorization|connection_?str"
    r"|(?<![a-z])(sas|sig|pwd|jwt|pat)(?![a-z])",
    re.IGNORECASE,
)
_SWITCHES = {"", "0", "1", "true", "false", "yes", "no", "on", "off"}  # no secrets, by any name
_CONTAINER = re.compile(r"^(abfss?|wasbs?)$")  # of Azure: container@account.host
_PARAMETER = re.compile(r"([?&;#]([^=&;#\s'\"]+)=)([^&;#\s'\")]+)")
_USER = re.compile(r"\b([a-z][a-z0-9+.-]*)://([^/\s?#'\"]*)@", re.IGNORECASE)
_SHORT = 6  # characters; a shorter value would be found where it is none


def is_secret(name: str, value: Any) -> bool:
    """Whether an option, such as one of ``storage_options``, holds a credential or a part of one.

    Args:
        name: its name, in any case, such as ``"aws_secret_access_key"``.
        value: a switch, such as ``"true"``, is none; a URL with a password is one by any name.
    """
    text = str(value)
    if text.lower() in _SWITCHES:
        return False
    return _NAMES.search(str(name)) is not None or public_uri(text) != text


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without those that are secret."""
    return {name: value for name, value in options.items() if not is_secret(name, value)}


def redacted(options: Mapping[Any, Any]) -> dict[Any, Any]:
    """Options for an error: no secret is in them."""
    return {
        name: HIDDEN if not isinstance(name, str) or is_secret(name, value) else value
        for name, value in options.items()
    }


def public_uri(uri: str) -> str:
    """A URI, or a text with some, without users, passwords and secret parameters."""
    return _PARAMETER.sub(_parameter, _USER.sub(_user, uri))


def _user(found: re.Match[str]) -> str:
    scheme, user = found[1], found[2]
    if _CONTAINER.match(scheme.lower()) and ":" not in user:
        return found[0]
    return f"{scheme}://"


def _parameter(found: re.Match[str]) -> str:
    is_one = _NAMES.search(unquote(found[2])) is not None and found[3].lower() not in _SWITCHES
    return f"{found[1]}{HIDDEN}" if is_one else found[0]


def bare_uri(uri: str) -> str:
    """A URI that still opens, where the environment has what is left out: no secret is in it."""
    if "://" not in uri or public_uri(uri) == uri:
        return uri
    parts = urlsplit(_USER.sub(_user, uri))
    pairs = [pair for pair in parts.query.split("&") if public_uri(f"?{pair}") == f"?{pair}"]
    return urlunsplit(parts._replace(query="&".join(pairs)))


def secret_texts(uri: str, options: Mapping[str, Any] | None) -> set[str]:
    """The secrets in a URI and in options, as they may turn up in an error.

    The id of a key, such as ``aws_access_key_id``, is none: it says who asks, which is of use.
    """
    texts = {
        str(value)
        for name, value in (options or {}).items()
        if is_secret(name, value) and not str(name).lower().endswith("_id")
    }
    for user in _USER.finditer(uri):
        texts |= set(user[2].split(":")) if _user(user) != user[0] else set()
    texts |= {value for _, name, value in _PARAMETER.findall(uri) if is_secret(name, value)}
    long = {text for text in texts if len(text) >= _SHORT}
    return long | {quote(text, safe="") for text in long} | {unquote(text) for text in long}


def hide(text: str, secrets: Iterable[str]) -> str:
    """`text` without `secrets`, and without what of a URI in it is secret."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return public_uri(text)


def hide_in_error(error: BaseException, secrets: Iterable[str]) -> None:
    """Hide secrets in the words of an error, in place, and in those of the errors behind it."""
    known = set(secrets)
    for one in _chain(error):
        one.args = tuple(hide(arg, known) if isinstance(arg, str) else arg for arg in one.args)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]
