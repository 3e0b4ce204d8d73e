"""Stores for tests: moto's S3 behind a proxy that injects faults, and web servers of generated files."""

import http.client
import http.server
import json
import logging
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from support.forked import Process, start_python

KEY = "AKIATESTTESTTESTTEST"
SECRET = "top/secret+value/that=nobody&may%see"
PIECE = 1 << 16


@dataclass(frozen=True)
class Asked:
    """One request: `start` and `stop` of its range, `stop` excluded; `number` counts all requests from 0."""

    number: int
    method: str
    path: str
    query: str
    start: int | None = None
    stop: int | None = None
    headers: dict[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Fault:
    """A fault of an answer: another status and body; truncated after a number of bytes; slow; other headers.

    After `silent_after` bytes of the body the server sends nothing; -1 for no answer at all."""

    status: int | None = None
    body: bytes = b""
    cut_after: int | None = None
    bytes_per_sec: float | None = None
    silent_after: int | None = None
    headers: dict[str, str] = field(default_factory=dict)


def s3_error(status: int, code: str) -> Fault:
    return Fault(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>".encode())


class Proxy:
    """Forwards requests to `upstream`, unless `rule` returns a fault. `sent` counts the bytes of objects."""

    def __init__(self, upstream: str, rule: Callable[[Asked], Fault | None] = lambda _: None) -> None:
        self.rule = rule
        self.asked: list[Asked] = []
        self.sent: dict[str, int] = {}
        self._upstream = urlsplit(upstream)
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                proxy.pass_on(self)

            do_HEAD = do_GET  # noqa: N815 - as above

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def pass_on(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        with self._lock:
            asked = asked_of(len(self.asked), handler)
            self.asked.append(asked)
        fault = self.rule(asked) or Fault()
        if fault.silent_after == -1:
            _until_closed(handler)
            return
        if fault.status is not None:
            answer(handler, fault.status, fault.headers, fault.body)
            return
        upstream = http.client.HTTPConnection(self._upstream.netloc, timeout=60)
        try:
            upstream.request(handler.command, handler.path, headers=dict(handler.headers))
            passed = upstream.getresponse()
            handler.send_response(passed.status)
            for name, value in {**dict(passed.headers), **fault.headers}.items():
                if name.lower() not in ("transfer-encoding", "connection"):
                    handler.send_header(name, value)
            handler.end_headers()
            sent = 0
            while piece := passed.read(PIECE):
                if fault.cut_after is not None and sent + len(piece) > fault.cut_after:
                    handler.wfile.write(piece[: fault.cut_after - sent])
                    self._count(asked, fault.cut_after - sent)
                    handler.close_connection = True
                    handler.connection.shutdown(socket.SHUT_RDWR)
                    break
                if fault.silent_after is not None and sent + len(piece) > fault.silent_after:
                    _until_closed(handler)
                    break
                handler.wfile.write(piece)
                self._count(asked, len(piece))
                sent += len(piece)
                if fault.bytes_per_sec is not None:
                    time.sleep(len(piece) / fault.bytes_per_sec)
        finally:
            upstream.close()

    def _count(self, asked: Asked, size: int) -> None:
        with self._lock:
            self.sent[asked.path] = self.sent.get(asked.path, 0) + size

    def gets(self, path: str) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == "GET" and asked.path == path]

    @contextmanager
    def running(self) -> Iterator["Proxy"]:
        with _running(self._server):
            yield self


@dataclass(frozen=True)
class Served:
    """One file of a web server. `hidden_size` gives no length; `ranges`: whether the server supports ranges."""

    content: bytes = b""
    size: int | None = None
    etag: str = '"one"'
    ranges: bool = True
    hidden_size: bool = False
    redirect: str = ""
    authorization: str = ""
    cut_after: int | None = None


class WebServer:
    """Serves files by path; a `size` without content stands for this number of zeros. Lists files as S3 does."""

    def __init__(self, files: dict[str, Served], tls: ssl.SSLContext | None = None) -> None:
        self.files = files
        self.asked: list[Asked] = []
        self._lock = threading.Lock()
        web = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                web.serve(self)

            do_HEAD = do_GET  # noqa: N815 - as above

        self._server = _Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_port}"

    def put(self, bucket: str, objects: dict[str, bytes]) -> None:
        self.files |= {f"/{bucket}/{key}": Served(body) for key, body in objects.items()}

    def serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        with self._lock:
            asked = asked_of(len(self.asked), handler)
            self.asked.append(asked)
        if "list-type=2" in asked.query:
            answer(handler, 200, {"Content-Type": "application/xml"}, self._listing(asked.path.strip("/")))
            return
        served = self.files.get(asked.path)
        if served is None:
            answer(handler, 404, {}, b"")
        elif served.authorization and asked.headers.get("authorization") != served.authorization:
            answer(handler, 401, {}, b"")
        elif served.redirect:
            answer(handler, 302, {"Location": served.redirect}, b"")
        else:
            self._send(handler, asked, served)

    def _send(self, handler: http.server.BaseHTTPRequestHandler, asked: Asked, served: Served) -> None:
        size = served.size if served.size is not None else len(served.content)
        ranged = asked.start is not None and served.ranges
        start, stop = (asked.start or 0, min(asked.stop or size, size)) if ranged else (0, size)
        if ranged and start >= size:
            answer(handler, 416, {"Content-Range": f"bytes */{size}"}, b"")
            return
        handler.send_response(206 if ranged else 200)
        if served.etag:
            handler.send_header("ETag", served.etag)
        handler.send_header("Last-Modified", "Sat, 21 Nov 2026 08:00:00 GMT")
        if ranged:
            handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        if not served.hidden_size:
            handler.send_header("Content-Length", str(stop - start))
        else:
            handler.send_header("Connection", "close")
            handler.close_connection = True
        handler.end_headers()
        if asked.method == "HEAD":
            return
        zeros = bytes(PIECE)
        end = stop if served.cut_after is None else min(stop, start + served.cut_after)
        for at in range(start, end, PIECE):
            last = min(at + PIECE, end)
            handler.wfile.write(zeros[: last - at] if served.size is not None else served.content[at:last])
        if end < stop:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)

    def _listing(self, bucket: str) -> bytes:
        items = "".join(
            f"<Contents><Key>{path.removeprefix(f'/{bucket}/')}</Key><LastModified>2026-11-21T08:00:00.000Z</LastModified>"
            f"<ETag>{served.etag}</ETag><Size>{served.size if served.size is not None else len(served.content)}</Size></Contents>"
            for path, served in sorted(self.files.items())
            if path.startswith(f"/{bucket}/")
        )
        return f"<?xml version='1.0'?><ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()

    @contextmanager
    def running(self) -> Iterator["WebServer"]:
        with _running(self._server):
            yield self


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    # Tests kill clients during a download.
    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, (OSError, http.client.HTTPException)):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass


def _until_closed(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.recv(1)


@contextmanager
def _running(server: http.server.ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked_of(number: int, handler: http.server.BaseHTTPRequestHandler) -> Asked:
    parts = urlsplit(handler.path)
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
    start = int(found[1]) if found else None
    stop = int(found[2]) + 1 if found and found[2] else None
    headers = {name.lower(): value for name, value in handler.headers.items()}
    return Asked(number, handler.command, unquote(parts.path), parts.query, start, stop, headers)


def answer(handler: http.server.BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


class Moto:
    """moto's S3 in the test process; buckets are created on demand."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    def __enter__(self) -> "Moto":
        import boto3

        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._server.stop()

    def put(self, bucket: str, objects: dict[str, bytes], *, acl: str = "private") -> None:
        self._client.create_bucket(Bucket=bucket)
        for key, body in objects.items():
            self._client.put_object(Bucket=bucket, Key=key, Body=body, ACL=acl)


def write_credentials(folder: Path, **values: str) -> str:
    """A folder like a mounted Secret; by default with credentials of S3."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, value in (values or {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}).items():
        (folder / key).write_text(value + "\n")
    return str(folder)


@dataclass(frozen=True)
class Fetched:
    """The result of `halimede fetch`: `report` is the termination message, `log` its standard output and error."""

    code: int
    report: str
    log: str

    @property
    def models(self) -> list[dict[str, Any]]:
        return json.loads(self.report)["models"]


Running = Process | subprocess.Popen[bytes]
COMMAND = [sys.executable, "-m", "halimede", "fetch"]
# Not by the command line's entry point: to find that one reads the metadata of all installed packages.
FETCH = "from halimede.commands.fetch import fetch; fetch()"


class Fetch:
    """Runs `halimede fetch` in a process, with a plan that is written to `folder`."""

    def __init__(
        self,
        folder: Path,
        plan: dict[str, Any] | str,
        *,
        timeout: float = 60,
        name: str = "plan",
        into: str = "models",
        options: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.into = folder / into
        self._report = folder / f"{name}.report"
        self._log = folder / f"{name}.log"
        self._report.unlink(missing_ok=True)
        file = folder / f"{name}.json"
        file.write_text(plan if isinstance(plan, str) else json.dumps(plan))
        self.arguments = ["--plan", str(file), "--into", str(self.into), "--timeout", str(timeout)]
        self.arguments += [*options, "--termination-log", str(self._report)]

    def start(self, environment: dict[str, str] | None = None, program: list[str] | None = None) -> Running:
        """Start it as a fork of a process that has imported it, or as this program."""
        variables = {"PATH": "/usr/bin:/bin", **(environment or {})}
        with self._log.open("wb") as log:
            if program is None:
                return start_python("-c", FETCH, *self.arguments, stdout=log, stderr=log, environment=variables)
            return subprocess.Popen([*program, *self.arguments], stdout=log, stderr=log, env=variables)

    def wait_for(self, text: str, process: Running, count: int = 1) -> None:
        """Wait until the log has this text this number of times."""
        deadline = time.monotonic() + 60
        while self._log.read_text().count(text) < count:
            assert process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)

    def end(self, process: Running) -> Fetched:
        code = process.wait(timeout=100)
        report = self._report.read_text() if self._report.exists() else ""
        return Fetched(code, report, self._log.read_text())

    def run(self, environment: dict[str, str] | None = None) -> Fetched:
        return self.end(self.start(environment))


def numbered_bytes(size: int) -> bytes:
    """Content whose every eight bytes are another number: a misplaced piece shows."""
    return np.arange(size // 8).tobytes()


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below `folder` with its content, links followed; empty folders with None. Without hidden top-level entries."""
    found: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.startswith("."):
            continue
        if path.is_file():
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[name] = None
    return found
