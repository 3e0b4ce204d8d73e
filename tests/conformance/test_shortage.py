"""A server under a limit of its address space: what it lacks is 503, with one line of log, and passes with the limit."""

import queue
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from support.background import in_background
from support.calls import load
from support.served import add_python, infer, notes_file
from support.server import RunningServer, serving, wait_until

ELEMENTS = 9 << 20
LARGE_MIB = ELEMENTS * 4 >> 20
"""No request of this size ever succeeds: the C library could keep its memory for the next one."""

LARGE_STACKS = "import threading; threading.stack_size(1 << 30)"
"""Otherwise the C library would keep several stacks of threads that have ended."""

WAIT = """
@staticmethod
def auto_complete_config(config):
    note("waits")
    while not os.path.exists(NOTES + ".end"): time.sleep(0.01)
    return config
"""

MEMORY = "the server has not enough memory for this"
THREAD = "the server cannot start a thread for this"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shortage") / "models"


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[RunningServer]:
    add_python(models, "echo")
    add_python(models, "slow", methods=WAIT)
    arguments = ["--model-repository", models, "--model-control-mode=explicit", "--load-model=echo"]
    with serving(models.parent, arguments, first=LARGE_STACKS) as running:
        yield running


@contextmanager
def limited(server: RunningServer, free_mib: int) -> Iterator[None]:
    """The server can map so much more memory."""
    used = psutil.Process(server.process.pid).memory_info().vms
    before = resource.prlimit(server.process.pid, resource.RLIMIT_AS, (used + (free_mib << 20), resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, before)


def large(library: object) -> list[object]:
    tensor = library.InferInput("IN", [1, ELEMENTS], "FP32")  # type: ignore[attr-defined]
    tensor.set_data_from_numpy(np.ones((1, ELEMENTS), np.float32))
    return [tensor]


def over_http(server: RunningServer) -> tuple[object, str]:
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        return status_of(lambda: client.infer("echo", large(httpclient)))


def over_grpc(server: RunningServer) -> tuple[object, str]:
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        return status_of(lambda: client.infer("echo", large(grpcclient)))


def over_a_stream(server: RunningServer) -> tuple[object, str]:
    answers: queue.Queue[InferenceServerException | None] = queue.Queue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(lambda result, error: answers.put(error))  # noqa: ARG005  # the client's names
        client.async_stream_infer("echo", large(grpcclient))
        error = answers.get(timeout=30)
        client.stop_stream()
    # Memory that an earlier request has left may be enough for the message, but not for its tensors: then the error is
    # an answer in the stream, which has no status.
    return (error.status() or "StatusCode.UNAVAILABLE", error.message()) if error else (None, "")


def inflated(server: RunningServer) -> tuple[object, str]:
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        return status_of(lambda: client.infer("echo", large(httpclient), request_compression_algorithm="gzip"))


def status_of(ask: Callable[[], object]) -> tuple[object, str]:
    try:
        ask()
    except InferenceServerException as error:
        return error.status(), error.message()
    return None, ""


@pytest.mark.parametrize(
    ("ask", "status"),
    [
        pytest.param(inflated, "503", id="http, inflated in steps"),
        pytest.param(over_http, "503", id="http, received"),
        pytest.param(over_grpc, "StatusCode.UNAVAILABLE", id="grpc"),
        pytest.param(over_a_stream, "StatusCode.UNAVAILABLE", id="stream"),
    ],
)
def test_a_request_without_memory_is_unavailable_and_later_ones_succeed(
    server: RunningServer, ask: Callable[[RunningServer], tuple[object, str]], status: str
) -> None:
    begin = len(server.log)
    with limited(server, LARGE_MIB // 4):
        assert ask(server) == (status, MEMORY)
    assert infer(server, "echo", 2) == (200, [2])
    lines = [line for line in server.log[begin:].splitlines() if line.startswith("E")]
    assert (len(lines), "Traceback" in server.log[begin:]) == (1, False), lines


def test_control_calls_without_a_thread_are_unavailable(server: RunningServer, models: Path) -> None:
    begin = len(server.log)
    loading = in_background(lambda: load(server, "slow"))
    # Its thread has the stack that the C library has kept.
    wait_until(notes_file(models, "slow").exists, "the load", server)
    with limited(server, 512):  # less than a stack
        index = server.post("/v2/repository/index")
        loaded = server.post("/v2/repository/models/echo/load")
    notes_file(models, "slow").with_suffix(".notes.end").touch()
    assert (index.status, index.json) == (503, {"error": THREAD})
    text = f"failed to load 'echo', failed to poll from model repository: {THREAD}"
    assert (loaded.status, loaded.json) == (503, {"error": text})
    assert "Traceback" not in server.log[begin:]
    assert loading.result(30) == (200, "")
    assert [load(server, "echo")[0], server.post("/v2/repository/index").status] == [200, 200]
