"""An S3 server (moto) over real HTTP, and a proxy in front of it with latency and faults.

Both are processes of their own, so that they share no interpreter lock with the reader, and both
end when the process that started them does: their standard input closes.

    with S3(delay=0.03) as s3:
        lance.write_dataset(table, s3.uri("pets.lance"), storage_options=s3.options)
        s3.proxy.set(delay=0.0)
        s3.proxy.stats()  # {"requests": 12, "bytes": 34567, "at_once": 3}
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import IO, Any

BUCKET = "bucket"
REGION = "us-east-1"
SECRET = "very-secret"
MODES = ("work", "gone", "silent", "refuse", "throttle")
"""What the proxy does with a request: pass it on; nobody listens; never answer; 403; 503."""


class _Child:
    """A process that runs this file, says on which port it listens, and answers JSON lines."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self._read())

    def ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        return line

    @property
    def cpu_seconds(self) -> float:
        """Processor time it has used."""
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Proxy(_Child):
    """An HTTP proxy for one server; requests are delayed at the same time, not one by one."""

    def __init__(self, server_port: int, delay: float = 0.0) -> None:
        super().__init__("proxy", str(server_port))
        self.set(delay=delay)

    def set(
        self,
        *,
        delay: float | None = None,
        mode: str = "work",
        after: int = 0,
        keep: bool = False,
    ) -> None:
        """Change what happens to requests.

        Args:
            delay: seconds added to every request; None for no change.
            mode: one of `MODES`.
            after: requests that are still served as before the mode takes effect.
            keep: answer reads of data files from memory, some ten times faster than moto.
        """
        assert mode in MODES
        self.ask({"delay": delay, "mode": mode, "after": after, "keep": keep})

    def stats(self) -> dict[str, int]:
        """Requests taken and bytes answered so far, and the most requests under way at once.

        `at_once` is counted from the last call on.
        """
        found: dict[str, int] = self.ask({})
        return found


class S3:
    """moto with one bucket, behind a `Proxy`."""

    def __init__(self, delay: float = 0.0) -> None:
        self.server = _Child("server")
        self.proxy = Proxy(self.server.port)
        self.endpoint = f"http://127.0.0.1:{self.proxy.port}"
        self._make_bucket()
        self.proxy.set(delay=delay)

    @property
    def options(self) -> dict[str, str]:
        """`storage_options` with which Lance finds the server."""
        return {
            "aws_access_key_id": "test",
            "aws_secret_access_key": SECRET,
            "aws_region": REGION,
            "aws_endpoint": self.endpoint,
            "allow_http": "true",
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables."""
        return {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    def uri(self, name: str) -> str:
        """URI of a table."""
        return f"s3://{BUCKET}/{name}"

    def _make_bucket(self) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT", data=b"")
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(request, timeout=30).close()
                return
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def close(self) -> None:
        self.proxy.close()
        self.server.close()

    def __enter__(self) -> "S3":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# What runs in the processes.

_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_READ = re.compile(rb"GET (/\S+/data/\S+) .*\r\nrange: bytes=(\d+)-(\d+)\r\n", re.I | re.S)
_ANSWERS = {"refuse": (403, "AccessDenied"), "throttle": (503, "SlowDown")}


def _download(url: str) -> bytes:
    # moto reads the name, and does not check the signature.
    signed = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, Signature=0"
    request = urllib.request.Request(url, headers={"Authorization": signed})
    with urllib.request.urlopen(request, timeout=60) as answer:
        whole: bytes = answer.read()
        return whole


class _ProxyLoop:
    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.delay = 0.0
        self.mode = "work"
        self.after = 0
        self.keep = False
        self.kept: dict[str, asyncio.Task[bytes]] = {}
        self.requests = 0
        self.bytes = 0
        self.waiting = 0
        self.at_once = 0
        self.port = 0
        self.listener: asyncio.Server | None = None
        self.clients: set[asyncio.StreamWriter] = set()

    async def run(self) -> None:
        await self.listen()
        print(self.port, flush=True)
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            stats = {"requests": self.requests, "bytes": self.bytes, "at_once": self.at_once}
            await self.command(json.loads(line))
            print(json.dumps(stats), flush=True)

    async def command(self, command: dict[str, Any]) -> None:
        if "mode" not in command:
            self.at_once = 0
            return
        if command["delay"] is not None:
            self.delay = command["delay"]
        self.mode, self.after, self.keep = command["mode"], command["after"], command["keep"]
        if self.mode == "gone" and not self.after:
            self.go()
        elif self.listener is None:
            await self.listen()

    async def listen(self) -> None:
        self.listener = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = self.listener.sockets[0].getsockname()[1]

    def go(self) -> None:
        """Close the port and every connection."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        for client in self.clients:
            client.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients.add(writer)
        server: tuple[asyncio.StreamWriter, asyncio.Task[None]] | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                await self.wait()
                if not await self.may_pass(writer):
                    return
                if self.keep and (read := _READ.match(head)):
                    await self.answer_kept(writer, read[1].decode(), int(read[2]), int(read[3]))
                    continue
                if server is None or server[1].done():
                    server = await self.connect(writer)
                server[0].write(head)
                found = _LENGTH.search(head)
                await self.copy_body(reader, server[0], int(found[1]) if found else 0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.clients.discard(writer)
            writer.close()
            if server is not None:
                server[0].close()
                server[1].cancel()

    async def wait(self) -> None:
        """Delay a request, while others are delayed too."""
        self.waiting += 1
        self.at_once = max(self.at_once, self.waiting)
        await asyncio.sleep(self.delay)
        self.waiting -= 1

    async def may_pass(self, writer: asyncio.StreamWriter) -> bool:
        if self.mode == "work":
            return True
        if self.after > 0:
            self.after -= 1
            return True
        if self.mode == "gone":
            self.go()
        elif self.mode == "silent":
            while self.mode == "silent":
                await asyncio.sleep(0.05)
        else:
            status, code = _ANSWERS[self.mode]
            body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
            writer.write(
                f"HTTP/1.1 {status} {code}\r\nconnection: close\r\n"
                f"content-length: {len(body)}\r\n\r\n{body}".encode()
            )
            await writer.drain()
        return False

    async def answer_kept(
        self, writer: asyncio.StreamWriter, path: str, first: int, last: int
    ) -> None:
        """Answer the bytes `first` to `last` of an object from memory."""
        if path not in self.kept:
            url = f"http://127.0.0.1:{self.server_port}{path}"
            self.kept[path] = asyncio.create_task(asyncio.to_thread(_download, url))
        whole = await self.kept[path]
        part = whole[first : last + 1]
        head = (
            f"HTTP/1.1 206 PARTIAL CONTENT\r\ncontent-length: {len(part)}\r\n"
            f'content-range: bytes {first}-{last}/{len(whole)}\r\netag: "kept"\r\n'
            "last-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n"
        ).encode()
        self.bytes += len(head) + len(part)
        writer.write(head + part)
        await writer.drain()

    async def connect(
        self, client: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamWriter, asyncio.Task[None]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server_port)
        return writer, asyncio.create_task(self.copy_answers(reader, client))

    async def copy_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                self.bytes += len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def copy_body(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int
    ) -> None:
        while length:
            data = await reader.read(min(length, 1 << 18))
            if not data:
                raise ConnectionError
            writer.write(data)
            length -= len(data)
        await writer.drain()


def _serve_moto() -> None:
    # Objects of this size or less stay in memory.
    os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(1 << 30)
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)


def _wait_for_parent(stdin: IO[str]) -> None:
    stdin.read()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "server":
        _serve_moto()
        _wait_for_parent(sys.stdin)
    else:
        asyncio.run(_ProxyLoop(int(sys.argv[2])).run())
