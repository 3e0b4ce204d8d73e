"""The tables of errors agree with the server."""

import http.client
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from halimede.core.types import ErrorCode
from halimede.core.wire.status_map import GRPC_STATUS, HTTP_STATUS
from support.models import add_onnx_identity, write_config
from support.server import Answer, RunningServer, start_server, wait_until

PAGE = (Path(__file__).parents[2] / "docs" / "pages" / "errors.md").read_text()
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|")) for line in PAGE.splitlines() if line.startswith("| ")
]
TEXTS = {what: (int(status), text) for what, status, text in (row for row in ROWS if len(row) == 3) if status.isdigit()}


def test_every_code_has_its_numbers() -> None:
    names = {status.value[0]: status.name for status in grpc.StatusCode}
    written = {(row[0], row[1], row[2]) for row in ROWS if len(row) == 4 and row[0] in ErrorCode.__members__}
    assert written == {(code.name, str(HTTP_STATUS[code]), names[GRPC_STATUS[code]]) for code in ErrorCode}


PYTHON_HEAD = """\
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
"""
PYTHON_MODELS = {
    "raises": "    def execute(self, requests): 1 / 0",
    "number": "    def execute(self, requests): return 5",
    "other": "    def execute(self, requests):\n"
    "        tensor = pb_utils.Tensor('OUT', np.zeros(1, np.float32))\n"
    "        return [pb_utils.InferenceResponse([tensor]) for _ in requests]",
    "dies": "    def execute(self, requests): os._exit(3)",
    "parks": "    def execute(self, requests): os._exit(3)",
    "hangs": "    def execute(self, requests): time.sleep(60)",
    "streams": "    def execute(self, requests): pass",
    "quiet": "    def execute(self, requests):\n"
    "        for request in requests:\n"
    "            request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)",
    "startraises": "    def initialize(self, args): 1 / 0\n    def execute(self, requests): pass",
    "startdies": "    def initialize(self, args): os._exit(3)\n    def execute(self, requests): pass",
}
PYTHON_SETTINGS = {
    "other": 'parameters { key: "STRICT_OUTPUTS" value: { string_value: "true" } }',
    "hangs": 'parameters { key: "EXECUTION_TIMEOUT_MS" value: { string_value: "200" } }',
    "streams": "model_transaction_policy { decoupled: true }",
    "quiet": "model_transaction_policy { decoupled: true }",
}


def add_python(folder: Path, code: str, settings: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(f"{PYTHON_HEAD}{code}\n")
    tensors = (
        "input [ { name: 'IN' data_type: TYPE_FP32 dims: [ 1, 4 ] } ]"
        " output [ { name: 'OUT' data_type: TYPE_STRING dims: [ 1 ] } ]"
    )
    write_config(folder, f"backend: 'python' {tensors} {settings}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("errors")
    add_onnx_identity(root / "models", "m", "FP32", ["N", 4])
    (root / "models" / "bad" / "1").mkdir(parents=True)
    (root / "models" / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    write_config(root / "models" / "m", 'max_batch_size: 8 backend: "onnxruntime"')
    for name, code in PYTHON_MODELS.items():
        add_python(root / "models" / f"python_{name}", code, PYTHON_SETTINGS.get(name, ""))
    running = start_server(
        root,
        [
            *("--model-repository", root / "models", "--model-control-mode=explicit", "--load-model=m"),
            *(f"--load-model=python_{name}" for name in PYTHON_MODELS if not name.startswith("start")),
            "--http-restricted-api=logging:key=value",
        ],
    )
    yield running
    running.kill()


def infer(server: RunningServer, path: str = "/v2/models/m/infer", outputs: Any = None, **changes: Any) -> Answer:
    tensor = {"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4], **changes}
    body: dict[str, Any] = {"inputs": [tensor]}
    if outputs:
        body["outputs"] = outputs
    return server.post(path, body)


def too_large(server: RunningServer, fields: bytes = b"") -> Answer:
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=30) as client:
        client.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n%bContent-Length: 67108865\r\n\r\n" % fields)
        head, _, body = client.recv(4096).partition(b"\r\n\r\n")
    return Answer(int(head.split()[1]), {}, body)


def ask_python(name: str, times: int = 1) -> Callable[[RunningServer], Answer]:
    def ask(server: RunningServer) -> Answer:
        return [infer(server, f"/v2/models/python_{name}/infer") for _ in range(times)][-1]

    return ask


PROVOKED = {
    "no such model": lambda s: infer(s, "/v2/models/n/infer"),
    "no such version": lambda s: infer(s, "/v2/models/m/versions/9/infer"),
    "the body is not JSON": lambda s: s.post("/v2/models/m/infer", "{nope"),
    "no inputs": lambda s: s.post("/v2/models/m/infer", {}),
    "an input that the model does not have": lambda s: infer(s, name="z"),
    "the wrong number of inputs": lambda s: s.post("/v2/models/m/infer", {"inputs": []}),
    "the wrong datatype": lambda s: infer(s, datatype="INT32"),
    "the wrong shape": lambda s: infer(s, shape=[1, 3], data=[1, 2, 3]),
    "too large a batch": lambda s: infer(s, shape=[9, 4], data=[1] * 36),
    "too little data": lambda s: infer(s, data=[1]),
    "an output that the model does not have": lambda s: infer(s, outputs=[{"name": "z"}]),
    "a body above the limit": too_large,
    "a body with binary data above the limit": lambda s: too_large(s, b"Inference-Header-Content-Length: 0\r\n"),
    "`generate` with a list under a name that is no input": lambda s: s.post("/v2/models/m/generate", {"z": [1]}),
    "`generate` with an input twice": lambda s: s.post("/v2/models/m/generate", '{"IN":[1,2,3,4],"IN":[1,2,3,4]}'),
    "a call of an extension that is not there": lambda s: s.get("/v2/trace/setting"),
    "statistics of an unknown model": lambda s: s.get("/v2/models/n/stats"),
    "load: no such model, or a wrong configuration": lambda s: s.post("/v2/repository/models/n/load"),
    "load: the name is empty or blank": lambda s: s.post("/v2/repository/models/%20/load"),
    "load: the name is `..` or has a `/` in it": lambda s: s.post("/v2/repository/models/..%2Fn/load"),
    "load: the model file is broken": lambda s: s.post("/v2/repository/models/bad/load"),
    "a python model raises an exception": ask_python("raises"),
    "a python model returns no list": ask_python("number"),
    "an output has another datatype than configured, with `STRICT_OUTPUTS`": ask_python("other"),
    "the process dies under a request": ask_python("dies"),
    "an execution takes longer than `EXECUTION_TIMEOUT_MS`": ask_python("hangs"),
    "every instance has died five times within a minute": ask_python("parks", 6),
    "a decoupled model is asked over HTTP": ask_python("streams"),
    "`generate` of a model that does not answer exactly once": lambda s: s.post(
        "/v2/models/python_quiet/generate", {"IN": [1, 2, 3, 4]}
    ),
    "`generate` with values that fit no shape of the input": lambda s: s.post("/v2/models/m/generate", {"IN": [1, 2]}),
    "`generate` with a compressed body": lambda s: s.post("/v2/models/m/generate", {}, {"Content-Encoding": "gzip"}),
    "load: a python model's `initialize` raises": lambda s: s.post("/v2/repository/models/python_startraises/load"),
    "load: the process dies in `initialize`": lambda s: s.post("/v2/repository/models/python_startdies/load"),
    "a restricted call without its header": lambda s: s.get("/v2/logging"),
}


@pytest.mark.parametrize("what", PROVOKED)
def test_an_error_is_the_one_of_the_table(server: RunningServer, what: str) -> None:
    status, text = TEXTS[what]
    answer = PROVOKED[what](server)
    pattern = ".*".join(re.escape(part) for part in text.split("…"))
    # The tables use the names `m` for every model and `x` for every input.
    text = answer.error.replace("'n'", "'m'").replace("'bad'", "'m'").replace("'IN'", "'x'").strip()
    text = re.sub(r"'python_[a-z]+", "'m", text)
    assert answer.status == status, text
    assert re.fullmatch(pattern.strip(), text, re.DOTALL), text


def test_another_method_is_a_405_and_the_connection_stays_open(server: RunningServer) -> None:
    assert "another method is a 405 with `Allow`, and the connection stays open" in " ".join(PAGE.split())
    client = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    client.connect()
    sock = client.sock
    for method, path, allow in (
        ("POST", "/v2/health/live", "GET"),
        ("GET", "/v2/models/m/infer", "POST"),
        ("DELETE", "/v2/models/m", "GET"),
        ("OPTIONS", "/v2/logging", "GET, POST"),
    ):
        client.request(method, path, headers={"key": "value"})
        answer = client.getresponse()
        assert (answer.status, answer.headers["Allow"]) == (405, allow)
        assert answer.read() == b'{"error":"Method Not Allowed"}'
        assert client.sock is sock
    client.request("NOPE", "/v2/health/live")
    assert client.getresponse().status == 400
    assert client.sock is None
    client.close()


def test_only_the_listed_answers_have_retry_after(server: RunningServer, tmp_path: Path) -> None:
    infer_503 = ask_python("parks", 6)(server)
    assert (infer_503.status, infer_503.headers.get("retry-after")) == (503, "1")
    (tmp_path / "models").mkdir()
    stopping = start_server(tmp_path, ["--model-repository", tmp_path / "models", "--drain-delay=30"])
    try:
        for verb in ("load", "unload"):
            refused = stopping.post(f"/v2/repository/models/m/{verb}")
            assert (refused.status, refused.headers.get("retry-after")) == (503, None)
        stopping.process.terminate()
        wait_until(lambda: stopping.get("/v2/health/ready").status != 200, "its drain", stopping)
        answer = stopping.get("/v2/health/ready")
        assert (answer.status, answer.error, answer.headers.get("retry-after")) == (503, "Server exiting", None)
    finally:
        stopping.kill()
