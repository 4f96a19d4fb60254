"""A read-only object store over a local directory, in the dialects of Azure, Google and the Hub.

It speaks real HTTP, so that Lance's own clients talk to it, and it keeps what they asked.

    with Store(directory, "gs") as store:
        lance.dataset(store.uri("pets.lance"), storage_options=store.options)
        store.requests  # [Request(method="GET", path="/bucket?list-type=2…", …), …]
"""

import base64
import json
import re
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SECRET = "the-secret-of-the-store"
KEY = base64.b64encode(SECRET.encode()).decode()
DIALECTS = ("az", "gs", "hf")
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"
_ROOTS = {"az": "/account/container", "gs": "/bucket", "hf": "/datasets/user/repo/resolve/main"}


@dataclass(frozen=True)
class Request:
    """What a client asked."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


class Store:
    """A server for the files below a directory.

    Attributes:
        requests: what was asked so far.
        status: of all answers; 0 answers as asked.
    """

    def __init__(self, directory: Path, dialect: str) -> None:
        self.directory, self.dialect = directory, dialect
        self.requests: list[Request] = []
        self.status = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def options(self) -> dict[str, str]:
        """`storage_options` with which Lance finds the server; the Hub is found by HF_ENDPOINT."""
        plain = {"allow_http": "true", "client_max_retries": "0"}
        return {
            "az": {
                "azure_storage_account_name": "account",
                "azure_storage_account_key": KEY,
                "azure_endpoint": f"{self.endpoint}/account",
                **plain,
            },
            "gs": {
                "google_service_account_key": json.dumps(
                    {
                        "gcs_base_url": self.endpoint,
                        "disable_oauth": True,
                        "client_email": "",
                        "private_key": SECRET,
                        "private_key_id": "",
                    }
                ),
                **plain,
            },
            "hf": {"hf_token": SECRET},
        }[self.dialect]

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables."""
        return {
            "az": {
                "AZURE_STORAGE_ACCOUNT_NAME": "account",
                "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/account",
                "AZURE_ALLOW_HTTP": "true",
            },
            "gs": {
                "GOOGLE_SERVICE_ACCOUNT_KEY": self.options.get("google_service_account_key", ""),
                "GOOGLE_ALLOW_HTTP": "true",
            },
            "hf": {"HF_TOKEN": SECRET, "HF_ENDPOINT": self.endpoint},
        }[self.dialect]

    def uri(self, name: str) -> str:
        """URI of a table."""
        root = {"az": "container", "gs": "bucket", "hf": "datasets/user/repo"}[self.dialect]
        return f"{self.dialect}://{root}/{name}"

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a request."""
        url = urlsplit(request.path)
        path, query = unquote(url.path), {k: v[0] for k, v in parse_qs(url.query).items()}
        if self.status:
            return self.status, {}, b"no"
        who = {"az": "SharedKey account:", "gs": "", "hf": f"Bearer {SECRET}"}[self.dialect]
        if not request.headers.get("authorization", "").startswith(who):
            return 403, {}, b"who are you?"
        if self.dialect == "az" and query.get("comp") == "list":
            return 200, {"content-type": "application/xml"}, self._azure_list(query)
        if self.dialect == "gs" and "list-type" in query:
            return 200, {"content-type": "application/xml"}, self._google_list(query)
        if self.dialect == "hf" and path.startswith("/api/"):
            return self._hub_list(path, request.body)
        file = self.directory / path.removeprefix(_ROOTS[self.dialect]).lstrip("/")
        if not path.startswith(_ROOTS[self.dialect]) or not file.is_file():
            return 404, {}, b""
        return _part_of(file.read_bytes(), request.headers.get("range"))

    def _files(self, prefix: str) -> list[tuple[str, int]]:
        found = (p for p in sorted(self.directory.rglob("*")) if p.is_file())
        names = ((p.relative_to(self.directory).as_posix(), p.stat().st_size) for p in found)
        return [(name, size) for name, size in names if name.startswith(prefix)]

    def _azure_list(self, query: dict[str, str]) -> bytes:
        blobs = "".join(
            f"<Blob><Name>{name}</Name><Properties><Last-Modified>{_DATE}</Last-Modified>"
            f"<Content-Length>{size}</Content-Length><Content-Type>x</Content-Type>"
            "<Etag>kept</Etag></Properties></Blob>"
            for name, size in self._files(query.get("prefix", ""))
        )
        return f"<EnumerationResults><Blobs>{blobs}</Blobs></EnumerationResults>".encode()

    def _google_list(self, query: dict[str, str]) -> bytes:
        contents = "".join(
            f"<Contents><Key>{name}</Key><Size>{size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>kept</ETag></Contents>"
            for name, size in self._files(query.get("prefix", ""))
        )
        return f"<ListBucketResult>{contents}</ListBucketResult>".encode()

    def _hub_list(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        inside = path.partition("/main")[2].strip("/")
        asked = re.findall(r"pets[^\"&]*", unquote(body.decode()))  # of `paths-info`
        files = [
            {"type": "file", "oid": "0", "size": size, "path": name}
            for name, size in self._files(f"{inside}/" if inside else "")
            if not asked or name in asked
        ]
        if not files:
            return 404, {}, b'{"error": "Entry not found"}'
        return 200, {"content-type": "application/json"}, json.dumps(files).encode()


def _part_of(content: bytes, asked: str | None) -> tuple[int, dict[str, str], bytes]:
    headers = {"etag": '"kept"', "last-modified": _DATE}
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", asked or "")
    if found is None:
        return 200, headers, content
    last = len(content) - 1
    if found[1]:
        first, last = int(found[1]), min(int(found[2] or last), last)
    else:
        first = max(0, len(content) - int(found[2]))
    headers["content-range"] = f"bytes {first}-{last}/{len(content)}"
    return 206, headers, content[first : last + 1]


def _handler(store: Store) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers, content)
            store.requests.append(request)
            status, more, body = store.answer(request)
            self.send_response(status)
            for name, value in {**more, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
