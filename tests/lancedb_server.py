"""A LanceDB server for the tests: the REST calls of the `lancedb` client, on Lance tables on disk.

    with LanceDBServer(tmp_path) as server:
        make_table(server.path("pets"), 1000, 250)
        table = server.connect().open_table("pets")
        server.requests  # the calls so far: [("pets", "query", {"columns": …}), …]

It answers what Lance finds, in an order of its own, as a server may that reads in parallel. It is
no mock of anything in this package: the client really connects, retries and decodes.
"""

import json
import threading
from collections import deque
from contextlib import suppress
from datetime import UTC
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import lance
import lancedb
import numpy as np
import pyarrow as pa
from lance.schema import schema_to_json

API_KEY = "sk-very-secret-key"
DATABASE = "farm"

_ARROW_FILE = "application/vnd.apache.arrow.file"
_BYTES = "application/octet-stream"
_ARROW_STREAM = "application/vnd.apache.arrow.stream"
_CALLS = {
    "describe",
    "count_rows",
    "query",
    "fetch_blobs",
    "version_list",
    "tags_list",
    "tags_version",
    "tags_create",
    "tags_delete",
    "branches_list",
}
_VERSION = "0.6.0"  # of the server: it can do what the client knows of
_NO_LIMIT = 2**62  # the client sends about 2**63 where there is none


class LanceDBServer:
    """Serves the tables ``root/<name>.lance``; those of the namespace n are ``n$<name>.lance``.

    Args:
        root: directory of the tables.
        api_key: the only key that is let in.
    """

    def __init__(self, root: Path, api_key: str = API_KEY) -> None:
        self.root, self.api_key = root, api_key
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        self.faults: deque[int | str] = deque()
        """What becomes of the next calls: a status; "hang", "cut", "short", "wrong" or "work"."""
        self.fault: int | str | None = None
        """What becomes of all calls after those."""
        self._random = np.random.default_rng(0)
        self._released = threading.Event()

    def __enter__(self) -> "LanceDBServer":
        owner = self

        class Handler(_Handler):
            server_of_tables = owner

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._http.shutdown()
        self._http.server_close()

    @property
    def host(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def uri(self) -> str:
        return f"db://{DATABASE}"

    @property
    def options(self) -> dict[str, str]:
        """What `storage_options` needs."""
        return {"api_key": self.api_key, "host_override": self.host}

    def path(self, name: str) -> Path:
        return self.root / f"{name}.lance"

    def connect(self, api_key: str | None = None, **config: Any) -> Any:
        return lancedb.connect(
            self.uri,
            api_key=api_key or self.api_key,
            host_override=self.host,
            client_config=config or None,
        )

    def calls(self, call: str) -> list[dict[str, Any]]:
        """The bodies of the requests so far of one kind, such as "query"."""
        return [body for _, kind, body in self.requests if kind == call]

    # What the calls do.

    def open(self, name: str, body: dict[str, Any]) -> lance.LanceDataset:
        if not self.path(name).exists():
            raise _HttpError(404, f"table {name} not found")
        dataset = lance.dataset(str(self.path(name)))
        version, branch = body.get("version"), body.get("branch")
        try:
            if branch is not None:
                return dataset.checkout_version((branch, version))
            return dataset if version is None else dataset.checkout_version(version)
        except (ValueError, OSError) as error:
            raise _HttpError(404, f"version {version} of {name} not found") from error

    def describe(self, name: str, body: dict[str, Any]) -> Any:
        dataset = self.open(name, body)
        return {
            "table": name,
            "version": dataset.version,
            "schema": schema_to_json(dataset.schema),
            "location": f"s3://somewhere/{name}.lance",
        }

    def count_rows(self, name: str, body: dict[str, Any]) -> Any:
        try:
            return self.open(name, body).count_rows(body.get("predicate"))
        except (ValueError, OSError) as error:
            raise _HttpError(400, f"invalid predicate: {error}") from error

    def version_list(self, name: str, body: dict[str, Any]) -> Any:
        versions = self.open(name, body).versions()
        return {
            "versions": [
                {
                    "version": v["version"],
                    "timestamp": v["timestamp"].astimezone(UTC).isoformat(),
                    "metadata": {},
                }
                for v in versions
            ]
        }

    def tags_version(self, name: str, body: dict[str, Any]) -> Any:
        tags = self.open(name, {}).tags.list()
        if body["tag"] not in tags:
            raise _HttpError(404, f"tag {body['tag']} not found")
        return {key: tags[body["tag"]][key] for key in ("version", "branch")}

    def tags_list(self, name: str, body: dict[str, Any]) -> Any:
        tags = self.open(name, {}).tags.list()
        return {
            tag: {
                "branch": found["branch"],
                "version": found["version"],
                "manifestSize": found["manifest_size"],
            }
            for tag, found in tags.items()
        }

    def tags_create(self, name: str, body: dict[str, Any]) -> Any:
        dataset = self.open(name, body)
        dataset.tags.create(body["tag"], dataset.version)
        return {}

    def tags_delete(self, name: str, body: dict[str, Any]) -> Any:
        self.open(name, {}).tags.delete(body["tag"])
        return {}

    def branches_list(self, name: str, body: dict[str, Any]) -> Any:
        branches = self.open(name, {}).branches.list()
        return {
            "branches": {
                branch: {
                    "parentVersion": found["parent_version"],
                    "createAt": found["create_at"],
                    "manifestSize": found["manifest_size"],
                }
                for branch, found in branches.items()
            }
        }

    def query(self, name: str, body: dict[str, Any]) -> pa.Table:
        limit = body["k"]
        try:
            return (
                self.open(name, body)
                .scanner(
                    columns=body.get("columns"),
                    filter=body.get("filter"),
                    limit=limit if limit < _NO_LIMIT else None,
                    offset=body.get("offset"),
                    with_row_id=body.get("with_row_id", False),
                )
                .to_table()
            )
        except (ValueError, OSError) as error:
            raise _HttpError(400, f"invalid query: {error}") from error

    def fetch_blobs(self, name: str, body: dict[str, Any]) -> pa.Table:
        found = self.open(name, body).read_blobs(
            body["column"], ids=body["row_ids"], preserve_order=True
        )
        data = pa.array([blob for _, blob in found], pa.large_binary())
        return pa.table({body["column"]: data})

    def answer(self, name: str, call: str, body: dict[str, Any]) -> Any:
        """What a call gives: a table, or JSON."""
        if call not in _CALLS:
            raise _HttpError(404, f"no such call: {call}")
        found = getattr(self, call)(name, body)
        if call == "query":
            found = found.take(pa.array(self._random.permutation(found.num_rows)))
        return found

    def next_fault(self) -> int | str | None:
        with suppress(IndexError):
            fault = self.faults.popleft()
            return None if fault == "work" else fault
        return self.fault


class _HttpError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server_of_tables: LanceDBServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or an answer waits 40 ms for its second packet

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        table, call = self._path().split("/", 1)
        self._answer(unquote(table), call.replace("/", "_"), body | self._parameters())

    def do_GET(self) -> None:  # a range of the bytes of one blob
        table, _, column, row, _ = map(unquote, self._path().split("/"))
        blob = {"column": column, "row_ids": [int(row)], "range": self.headers["Range"]}
        self._answer(table, "blob", blob | self._parameters())

    def _path(self) -> str:
        return urlsplit(self.path).path.removeprefix("/v1/table/").strip("/")

    def _parameters(self) -> dict[str, Any]:
        query = parse_qs(urlsplit(self.path).query)
        return {name: int(v[0]) if name == "version" else v[0] for name, v in query.items()}

    def _answer(self, table: str, call: str, body: dict[str, Any]) -> None:
        server = self.server_of_tables
        server.requests.append((table, call, body))
        try:
            if self.headers.get("x-api-key") != server.api_key:
                raise _HttpError(401, f"wrong API key {self.headers.get('x-api-key')}")
            fault = server.next_fault() if call == "query" else None
            if isinstance(fault, int):
                raise _HttpError(fault, "a fault on purpose")
            if fault == "hang":
                server._released.wait()
            is_for_version = call in ("query", "blob", "describe", "count_rows")
            version = server.open(table, body).version if is_for_version else None
            headers = {"x-lancedb-version": str(version)} if version is not None else {}
            if call == "blob":
                self._send_range(server.fetch_blobs(table, body).column(0)[0].as_py(), headers)
            else:
                self._send_found(server.answer(table, call, body), call, fault, headers)
        except _HttpError as error:
            self._send(error.status, "text/plain", str(error).encode(), {})

    def _send_range(self, data: bytes | None, headers: dict[str, str]) -> None:
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        part = (data or b"")[int(first) : int(last) + 1 if last else None]
        if data is None:
            self._send(204, _BYTES, b"", headers)
        elif not part:
            self._send(416, _BYTES, b"", headers | {"Content-Range": f"bytes */{len(data)}"})
        else:
            place = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            self._send(206, _BYTES, part, headers | {"Content-Range": place})

    def _send_found(self, found: Any, call: str, fault: Any, headers: dict[str, str]) -> None:
        if not isinstance(found, pa.Table):
            self._send(200, "application/json", json.dumps(found).encode(), headers)
            return
        if fault == "short":
            found = found.slice(1)
        if fault == "wrong":
            found = pa.concat_tables([found.slice(1), found.slice(1, 1)])
        sink = pa.BufferOutputStream()
        is_file = call == "query"
        make = pa.ipc.new_file if is_file else pa.ipc.new_stream
        with make(sink, found.schema) as writer:
            writer.write_table(found)
        data = sink.getvalue().to_pybytes()
        kind = _ARROW_FILE if is_file else _ARROW_STREAM
        self._send(200, kind, data, headers, is_cut=fault == "cut")

    def _send(
        self, status: int, kind: str, data: bytes, headers: dict[str, str], is_cut: bool = False
    ) -> None:
        with suppress(OSError):
            self.send_response(status)
            length = {"Content-Type": kind, "Content-Length": str(len(data))}
            for name, value in (length | {"phalanx-version": _VERSION} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
        if is_cut:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass
