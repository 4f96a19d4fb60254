"""Where a table is that only LanceDB can read, and how it is opened."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from hf_lance_stream.credentials import hide_in_error

if TYPE_CHECKING:
    from lancedb.table import Table as Handle

SCHEME = "db://"
"""Of the URI of a LanceDB database on a server."""

_OPTIONS = ("api_key", "host_override", "region")
_HEADERS_OF = ("account_name", "azure_storage_account_name")  # storage options that LanceDB sends
_USER = re.compile(r"(?<=//)[^/?#]*@")  # of a URL, with the password


@dataclass(frozen=True)
class Address:
    """Where a table is.

    Attributes:
        connection: what LanceDB writes of a connection in order to make it again, with its API
            key; None for a table in memory, which has no address.
        name: name of the table.
        namespace: names of the namespaces around it.
        branch: None for the main branch.
    """

    connection: Mapping[str, Any] | None = field(repr=False)
    name: str
    namespace: tuple[str, ...] = ()
    branch: str | None = None

    @property
    def uri(self) -> str:
        """``db://database/namespace/table``, or ``memory://table``."""
        base = "memory:/" if self.connection is None else self.connection["db_url"].rstrip("/")
        branch = () if self.branch is None else ("tree", self.branch)
        return "/".join((base, *self.namespace, self.name, *branch))

    def secrets(self) -> dict[str, str]:
        """What of the connection is secret, by name."""
        if self.connection is None:
            return {}
        headers = (self.connection.get("client_config") or {}).get("extra_headers") or {}
        user = _USER.search(self.connection.get("host_override") or "")
        found = {"api_key": self.connection.get("api_key"), "host_override": user and user[0]}
        return {name: str(value) for name, value in (found | headers).items() if value}

    def without_secrets(self) -> "Address":
        """The same address; whoever opens it must have the API key."""
        if self.connection is None:
            return self
        public = dict(self.connection) | {"api_key": None}
        public["client_config"] = dict(public.get("client_config") or {}) | {"extra_headers": None}
        public["host_override"] = _USER.sub("", public.get("host_override") or "") or None
        return replace(self, connection=public)

    def open(self, version: int | None) -> "Handle":
        """The table at `version`, None for the latest; it stays there."""
        import lancedb

        if self.connection is None:
            raise ValueError(f"{self.uri} is in the memory of the process that made it")
        connection = dict(self.connection)
        connection["api_key"] = connection.get("api_key") or os.environ.get("LANCEDB_API_KEY")
        if not connection["api_key"]:
            raise ValueError("the API key is missing: set it as LANCEDB_API_KEY in the environment")
        # Not by pickle: a pickled table of LanceDB has the key in it.
        database = lancedb.deserialize_conn(json.dumps(connection))
        table = database.open_table(
            self.name, namespace_path=list(self.namespace), branch=self.branch, version=version
        )
        if version is None:
            table.checkout(table.version)
        return table

    def reason_of(self, error: BaseException) -> str:
        """The first line of an error of LanceDB and of what caused it; its secrets are hidden."""
        hide_in_error(error, self.secrets().values())
        lines = [str(error).strip().partition("\n")[0] or repr(error)]
        if error.__cause__ is not None:
            lines.append(str(error.__cause__).strip().partition("\n")[0])
        return re.sub(r", \S+\.rs:\d+:\d+|\(request_id=[^)]*\) ", "", ": ".join(lines))


def address_of(item: Any, options: Mapping[str, str] | None, argument: str) -> Address:
    """Where a table is that only LanceDB can read.

    Args:
        item: ``"db://database/table"``, or a table of `lancedb`, on a server or in memory.
        options: ``api_key``, ``host_override`` and ``region`` of the database.
        argument: the user's name for `item`, for errors.

    Raises:
        ValueError: it is no address of a table, or no other process could use it.
    """
    options = options or {}
    unknown = sorted(set(options) - {*_OPTIONS, *_HEADERS_OF})
    if unknown:
        raise ValueError(
            f"`storage_options` of a LanceDB database may have {[*_OPTIONS, *_HEADERS_OF]}: got "
            f"{unknown}; give lancedb.connect what else there is, and pass the table"
        )
    if isinstance(item, str):
        return _address_of_uri(item, options, argument)
    if not type(item).__module__.startswith("lancedb.remote."):
        return Address(None, item.name, branch=item.current_branch())
    # Private: what a table pickles to. It has the connection in the words of
    # `DBConnection.serialize`, which is public, but a table does not give its connection.
    try:
        state = item.__getstate__()
    except Exception as error:  # a provider of headers, or OAuth
        raise ValueError(
            f"`{argument}`: the connection of {item!r} cannot be made again in another process: "
            f"{error}"
        ) from error
    connection = json.loads(state["connection_state"])
    connection |= {name: options[name] for name in _OPTIONS if name in options}
    return Address(connection, state["name"], tuple(state["namespace_path"]), state["branch"])


def _address_of_uri(uri: str, options: Mapping[str, str], argument: str) -> Address:
    import lancedb

    parts = urlsplit(uri)
    names = [unquote(name) for name in parts.path.split("/") if name]
    if not parts.netloc or not names or parts.query or parts.fragment or "@" in parts.netloc:
        got = f"{SCHEME}{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ValueError(
            f"`{argument}` must name a table of the database, as db://database/table, or "
            f"db://database/namespace/table, with nothing else: got {got!r}"
        )
    known = {name: value for name, value in options.items() if name in _OPTIONS}
    others = {name: value for name, value in options.items() if name in _HEADERS_OF}
    try:
        database = lancedb.connect(
            f"{SCHEME}{parts.netloc}", **known, storage_options=others or None
        )
    except ValueError as error:
        raise ValueError(
            f"`{argument}`: {uri!r} cannot be opened: {error}; give storage_options="
            '{"api_key": …}, or set LANCEDB_API_KEY in the environment'
        ) from error
    return Address(json.loads(database.serialize()), names[-1], tuple(names[:-1]))
