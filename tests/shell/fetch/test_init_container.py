"""`halimede fetch --init-container`: a store without the model is reported at once, and retried until it has it."""

import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import support.silent_names
import support.stores
from shell.fetch.conftest import Store
from support.stores import Asked, Fault, Fetch, Served, WebServer, numbered_bytes, s3_error, tree

MB = 1 << 20
PKI = Path(support.stores.__file__).parent / "pki"
REFUSED = "http://127.0.0.1:1"
FIRST_SECS = 4.0
"""Maximum time of the first tries."""
STARTS_SECS = 5.0
BUSY_SECS = 3.0
"""Additional time on a busy machine."""


@contextmanager
def listening(answer: bytes = b"", *, tls: ssl.SSLContext | None = None, is_full: bool = False) -> Iterator[int]:
    """The port of a server that accepts connections, answers with these bytes and closes; with none it stays silent.
    One that `is_full` accepts no connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port: int = server.getsockname()[1]
        held = [socket.create_connection(("127.0.0.1", port))] if is_full else []
        thread = threading.Thread(target=_serve, args=(server, answer, tls, held), daemon=True)
        if not is_full:
            thread.start()
        yield port
        server.shutdown(socket.SHUT_RDWR)
        for each in held:
            each.close()
    if not is_full:
        thread.join()


def _serve(server: socket.socket, answer: bytes, tls: ssl.SSLContext | None, held: list[socket.socket]) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        try:
            if tls is not None:
                connection = tls.wrap_socket(connection, server_side=True)
            if answer:
                connection.recv(1 << 16)
                connection.sendall(answer)
                connection.close()
        except OSError:
            pass
        held.append(connection)


def untrusted() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PKI / "server.pem", PKI / "server.key")
    return context


def model(server: str, kind: str) -> dict[str, str]:
    return {"name": "digits", "uri": f"s3://{server}/models/digits/" if kind == "s3" else f"{server}/digits.onnx"}


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_every_way_of_not_answering_is_reported(tmp_path: Path, kind: str) -> None:
    busy = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with (
        listening() as silent,
        listening(is_full=True) as full,
        listening(busy) as bad_gateway,
        listening(b"HTTP/1.1") as cutting,
        listening(tls=untrusted()) as unknown,
    ):
        cases = {
            "http://store.invalid:9000": "(its name is not known|Name or service not known)",
            REFUSED: "[Cc]onnection refused",
            f"http://127.0.0.1:{silent}": "no answer in time",
            f"http://127.0.0.1:{full}": "no answer in time",
            f"https://127.0.0.1:{silent}": "no answer in time",
            f"http://127.0.0.1:{bad_gateway}": r"answers with an error \(502\)",
            f"http://127.0.0.1:{cutting}": "cannot be reached",
            f"https://127.0.0.1:{unknown}": "its certificate is not trusted; a private authority's goes into a CA bundle",
            f"https://127.0.0.1:{bad_gateway}": "cannot be reached",
        }
        fetching = {
            server: Fetch(tmp_path / str(number), {"models": [model(server, kind)]}, options=["--init-container"])
            for number, server in enumerate(cases)
        }
        processes = {server: each.start() for server, each in fetching.items()}
        ended = {server: each.end(processes[server]) for server, each in fetching.items()}

    for server, cause in cases.items():
        report = ended[server].report
        assert (ended[server].code, server in report, bool(re.search(cause, report))) == (15, True, True), report


class Container:
    """An init container: each run has the folder of the run before."""

    def __init__(self, store: Store, *, others: Sequence[dict[str, str]] = ()) -> None:
        plan = store.plan()
        self._plan = {**plan, "models": [*plan["models"], *others]}
        self._folder = store.folder
        self._runs = 0

    def fetching(self, *, timeout: float = 60) -> Fetch:
        self._runs += 1
        name = f"run{self._runs}"
        return Fetch(self._folder, self._plan, timeout=timeout, name=name, options=["--init-container"])


def test_silent_store_is_reported_within_seconds(store: Store) -> None:
    asked_at = []

    def silent(_: Asked) -> Fault:
        asked_at.append(time.monotonic())
        return Fault(silent_after=-1)

    store.proxy.rule = silent

    fetched = Container(store).fetching().run()

    assert time.monotonic() - asked_at[0] < FIRST_SECS + BUSY_SECS
    assert (fetched.code, fetched.report) == (
        15,
        f"{store.uri('digits/')}: the store {store.proxy.url} cannot be reached: no answer in time",
    )


NAMESPACES = ("unshare", "--net", "--mount")
MAY_UNSHARE = (
    shutil.which("unshare") and not subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False).returncode
)


@pytest.mark.skipif(not MAY_UNSHARE, reason=f"this machine does not allow `{' '.join(NAMESPACES)}`")
@pytest.mark.parametrize("kind", ["s3", "http"])
def test_silent_name_server_is_reported_within_seconds(tmp_path: Path, kind: str) -> None:
    plan = {"models": [model("http://store.example.com:9000", kind)]}
    fetching = Fetch(tmp_path, plan, options=["--init-container"])
    silent = [*NAMESPACES, sys.executable, support.silent_names.__file__]

    begun = time.monotonic()
    fetched = fetching.end(fetching.start(program=[*silent, sys.executable, "-m", "halimede", "fetch"]))

    assert time.monotonic() - begun < STARTS_SECS + FIRST_SECS + BUSY_SECS
    assert (fetched.code, "store.example.com" in fetched.report) == (15, True), fetched.report


def test_reported_failure_is_retried_until_the_store_answers(store: Store) -> None:
    """The second run has no timeout."""
    store.put({"digits/1/model.onnx": b"x"})
    store.proxy.rule = lambda _: s3_error(500, "InternalError")
    container = Container(store)
    assert container.fetching().run().code == 15

    second = container.fetching(timeout=1)
    process = second.start()
    second.wait_for("InternalError); trying again", process, count=4)
    store.proxy.rule = lambda _: None

    fetched = second.end(process)
    assert (fetched.code, tree(store.models)) == (0, {"digits/1/model.onnx": b"x"})


def test_different_failure_is_reported_again(store: Store) -> None:
    store.proxy.rule = lambda _: s3_error(500, "InternalError")
    container = Container(store)
    assert container.fetching().run().code == 15

    second = container.fetching(timeout=1)
    process = second.start()
    second.wait_for("InternalError); trying again", process)
    store.proxy.rule = lambda _: s3_error(503, "SlowDown")

    fetched = second.end(process)
    assert (fetched.code, "503 SlowDown" in fetched.report) == (15, True)


def test_failure_of_a_killed_run_is_reported_again(store: Store) -> None:
    store.proxy.rule = lambda _: s3_error(500, "InternalError")
    container = Container(store)
    first = container.fetching().run()
    second = container.fetching()
    process = second.start()
    second.wait_for("trying again", process)
    process.kill()
    assert second.end(process).report == ""

    third = container.fetching().run()

    assert (third.code, third.report) == (15, first.report)


def test_failure_of_a_second_store_is_reported_and_retried(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    container = Container(store, others=({"name": "other", "uri": f"s3://{REFUSED}/models/other/"},))
    begun = time.monotonic()
    assert container.fetching().run().code == 15
    assert time.monotonic() - begun < STARTS_SECS + FIRST_SECS + BUSY_SECS

    second = container.fetching(timeout=1)
    process = second.start()
    second.wait_for("connection refused; trying again", process, count=4)
    process.kill()
    second.end(process)


def test_credentials_and_endpoint_are_read_at_each_try(store: Store) -> None:
    """They come from a Secret that may be the cause of the failure."""
    store.put({"digits/1/model.onnx": b"x"})
    endpoint = Path(store.credentials) / "AWS_ENDPOINT_URL"
    endpoint.write_text(REFUSED)
    container = Container(store)
    assert container.fetching().run().code == 15
    second = container.fetching()
    process = second.start()
    second.wait_for("connection refused; trying again", process)

    endpoint.write_text(store.proxy.url)

    assert second.end(process).code == 0


def test_a_failure_that_a_person_repairs_is_retried(store: Store) -> None:
    """A Secret that is completed, and then a bucket that is made again."""
    keys = Path(store.credentials)
    kept = {path.name: path.read_text() for path in keys.iterdir()}
    for path in list(keys.iterdir()):
        path.unlink()
    container = Container(store)
    first = container.fetching().run()
    assert (first.code, first.report.startswith(f"{store.uri('digits/')}: the credentials in ")) == (10, True)

    second = container.fetching(timeout=1)
    process = second.start()
    second.wait_for("AWS_ACCESS_KEY_ID", process, count=2)
    for name, value in kept.items():
        (keys / name).write_text(value)
    missing = second.end(process)
    assert (missing.code, missing.report) == (11, f"{store.uri('digits/')}: it does not exist (404 NoSuchBucket)")

    third = container.fetching(timeout=1)
    process = third.start()
    third.wait_for("NoSuchBucket); trying again", process, count=4)
    store.put({"digits/1/model.onnx": b"x"})
    assert (third.end(process).code, tree(store.models)) == (0, {"digits/1/model.onnx": b"x"})


def test_a_file_that_is_listed_and_denied_is_retried_until_it_is_allowed(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x" * 100})
    path = f"/{store.bucket}/digits/1/model.onnx"
    denied = s3_error(403, "AccessDenied")
    store.proxy.rule = lambda asked: denied if asked.path == path else None
    container = Container(store)
    message = f"{store.uri('digits/1/model.onnx')}: access was denied (403 AccessDenied)"
    first = container.fetching().run()
    assert (first.code, first.report) == (10, message)
    second = container.fetching(timeout=1)
    process = second.start()
    second.wait_for(f"{message}; trying again", process, count=3)
    store.proxy.rule = lambda _: None
    assert (second.end(process).code, tree(store.models)) == (0, {"digits/1/model.onnx": b"x" * 100})


def test_a_completed_ca_bundle_is_read(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("to be filled in")
    with WebServer({"/files/1/model.onnx": Served(b"x")}, untrusted()).running() as web:
        uri = f"s3://{web.url}/files/"
        plan = {"models": [{"name": "digits", "uri": uri, "ca_bundle": str(bundle)}]}
        first = Fetch(tmp_path, plan, name="first", options=["--init-container"]).run()
        assert (first.code, first.report) == (15, f"{uri}: its CA bundle holds no certificate")
        second = Fetch(tmp_path, plan, name="second", options=["--init-container"])
        process = second.start()
        second.wait_for("trying again", process)
        bundle.write_text((PKI / "root.pem").read_text())
        assert second.end(process).code == 0


def test_a_folder_of_a_claim_that_appears_is_found(tmp_path: Path) -> None:
    mount = tmp_path / "claim"
    mount.mkdir()
    plan = {"models": [{"name": "digits", "uri": "pvc://claim/digits", "mount": str(mount)}]}
    assert Fetch(tmp_path, plan, name="first", options=["--init-container"]).run().code == 11
    second = Fetch(tmp_path, plan, name="second", options=["--init-container"])
    process = second.start()
    second.wait_for("trying again", process)
    (mount / "digits" / "1").mkdir(parents=True)
    (mount / "digits" / "1" / "model.onnx").write_bytes(b"x")
    assert second.end(process).code == 0


@pytest.mark.parametrize(("fails", "code"), [("store", 15), ("file", 10)])
def test_recovery_is_reported_before_a_long_download(large_store: Store, fails: str, code: int) -> None:
    """Otherwise the container's status would show the failure of the earlier run during the whole download."""
    store, content = large_store, numbered_bytes(24 * MB)
    store.put({"digits/1/model.onnx": content})
    denied, busy = s3_error(403, "AccessDenied"), s3_error(500, "InternalError")
    store.proxy.rule = lambda asked: busy if fails == "store" else denied if "model.onnx" in asked.path else None
    container = Container(store)
    assert container.fetching().run().code == code
    store.proxy.rule = lambda asked: Fault(bytes_per_sec=MB / 2) if asked.start == 0 else None

    second = container.fetching().run()

    assert (second.code, second.report) == (
        16,
        f"{store.uri('digits/')}: the store answers again; the next run continues",
    )
    store.proxy.rule = lambda _: None
    before = store.sent("digits/1/model.onnx")
    assert container.fetching().run().code == 0
    assert tree(store.models) == {"digits/1/model.onnx": content}
    # One of its two ranges, and its received bytes that were not written yet.
    assert 8 * MB <= store.sent("digits/1/model.onnx") - before < 10 * MB


def test_failure_is_not_recorded_without_the_option(store: Store) -> None:
    store.proxy.rule = lambda _: s3_error(500, "InternalError")
    for run in ("first", "second"):
        assert store.fetch(timeout=1, process=run).code == 15
