"""Hostile text from clients and file names, wherever it is shown: in answers, in the log, in the metrics.

Answers stay well formed, errors stay short, and no text can forge a line.
"""

import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import grpc
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from support.calls import ONES
from support.models import add_identity, write_config
from support.server import RunningServer, Start, start_server, wait_until

LONGEST_HTTP_ERROR = 8 << 10
LONGEST_DETAILS = 4 << 10
LONG_HEAD = 20_000
LONG_BODY = 1_000_000
FORGED = 'E1121 07:50:51.767849 597 x.py:1] "forged"'
LINE = re.compile(r'[EWI]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ [\w.]+:\d+\] (".*")')

FRAGMENTS = [
    *("\0", "\n", "\r\n", "\t", "\b", "\x1b]0;title\x07", "\x1b[2J", "\x7f", "\x85", "\x9b31m", "\u2028", "\u2029"),
    *('"', "'", "\\", "\\n", "\\u0000", "{", "}", "[", "<script>", "&", ";", "=", ",", "`id`", "$(id)"),
    *("%", "%0d%0a", "%00", "%2e%2e%2f", "%25", "%s%n", "../", "/", "//", "?", "#", "+", " ", "."),
    *(
        "é",
        "\u202e",
        "\u200f",
        "\ufeff",
        "\ufffd",
        "\ue000",
        "\U0001f600",
        "e\u0301",
        "\u0600",
        "a",
        "ident",
        "IN",
        "1",
    ),
    *("\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", f"\n{FORGED}\n", '"} 1\nnv_forged{a="', "\n# TYPE x"),
]


def spell(drawn: bytes) -> str:
    """Fragments, characters below U+0300 and any characters but surrogates: one for each three bytes."""
    text = ""
    for at in range(0, len(drawn) - 2, 3):
        number = int.from_bytes(drawn[at : at + 3])
        if number % 2:
            text += FRAGMENTS[number // 2 % len(FRAGMENTS)]
        else:
            code = number // 4 % (0x300 if number % 4 else 0x110000)
            text += chr(code) if not 0xD800 <= code < 0xE000 else "\ufffd"
    return text


# Drawn as bytes: one draw takes as long for a text as for a character.
texts = st.binary(min_size=3, max_size=15).map(spell)
lengths = st.sampled_from(["", "", "", "", "long"])
some = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def grown(text: str, length: str, to: int) -> str:
    return text if not length else (text * (to // len(text) + 1))[:to]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    add_identity(models, "ident")
    add_identity(models, "text", datatype="BYTES", dims="-1", max_batch_size=0)
    running = start_server(
        tmp_path_factory.mktemp("log"),
        [
            *("--model-repository", models, "--model-control-mode=explicit", "--load-model=*", "--log-verbose=1"),
            *("--http-header-forward-pattern=x-.*", "--grpc-header-forward-pattern=x-.*"),
        ],
    )
    wait_until(lambda: "Started Metrics Service" in running.log, "the start's last line", running)
    begun = len(running.log)
    yield running
    assert running.process.poll() is None, f"the server died\n{running.log}"
    families = {family.name for family in text_string_to_metric_families(running.metrics())}
    assert "nv_inference_request_success" in families
    assert not any("forged" in family for family in families)
    assert running.stop() == 0, running.log[-5000:]
    check_lines(running.log_path.read_bytes().decode()[begun:])


def check_lines(log: str) -> None:
    """Each line is one record whose text is a JSON string, without terminal control characters."""
    lines = log.split("\n")
    assert lines.pop() == ""
    assert lines
    for line in lines:
        found = LINE.fullmatch(line)
        assert found is not None, repr(line)
        assert line.isprintable()
        assert isinstance(json.loads(found[1]), str)
        assert len(line.encode()) <= 16 << 10


# Over HTTP.

STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Za-z -]+")
KNOWN_HEADERS = {
    *(b"Accept-Encoding", b"Allow", b"Connection", b"Content-Encoding", b"Content-Length", b"Content-Type"),
    *(b"Inference-Header-Content-Length", b"Retry-After", b"Vary"),
}
HttpRequest = tuple[str, bytes, list[tuple[str, bytes]], bytes]
"""Method, target, headers, body."""


def exchange(server: RunningServer, request: HttpRequest) -> tuple[int, bytes]:
    """The status and the body. Fails if the head has anything that could come from the client."""
    method, target, fields, body = request
    head = [b"%b %b HTTP/1.1" % (method.encode(), target), b"Connection: close", b"Content-Length: %d" % len(body)]
    head += [name.encode() + b": " + value for name, value in fields]
    if "Host" not in dict(fields):
        head.append(b"Host: x")
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=30) as connection:
        connection.sendall(b"\r\n".join(head) + b"\r\n\r\n" + body)
        answer = b""
        while part := connection.recv(1 << 20):
            answer += part
    raw_head, _, content = answer.partition(b"\r\n\r\n")
    status_line, *lines = raw_head.split(b"\r\n")
    status = STATUS_LINE.fullmatch(status_line)
    assert status is not None, answer[:500]
    headers = dict(line.split(b": ", 1) for line in lines)
    assert set(headers) <= KNOWN_HEADERS
    assert all(re.fullmatch(rb"[ -~]*", value) for value in headers.values())
    assert int(headers[b"Content-Length"]) == len(content)
    return int(status[1]), content


def check_answer(status: int, content: bytes, documented: set[int]) -> None:
    assert status in documented, (status, content[:500])
    if status == 200:
        assert content == b"" or json.loads(content) is not None
        return
    assert len(content) <= LONGEST_HTTP_ERROR
    if content:
        assert list(json.loads(content)) == ["error"]
        assert json.loads(content)["error"]


def segment(text: str) -> bytes:
    return quote(text, safe="").encode()


def raw_segment(text: str) -> bytes:
    """The text unchanged, except for characters that end the request line."""
    return re.sub(rb"[\0-\x20]", b"", text.encode())


MODEL_CALLS = [
    ("GET", b"/v2/models/%b"),
    ("GET", b"/v2/models/%b/config"),
    ("GET", b"/v2/models/%b/ready"),
    ("GET", b"/v2/models/%b/stats"),
    ("GET", b"/v2/models/%b/versions/1"),
    ("GET", b"/v2/models/ident/versions/%b"),
    ("GET", b"/v2/models/ident/versions/%b/stats"),
    ("POST", b"/v2/models/%b/infer"),
    ("POST", b"/v2/models/ident/versions/%b/infer"),
    ("POST", b"/v2/models/%b/generate"),
    ("POST", b"/v2/repository/models/%b/load"),
    ("POST", b"/v2/repository/models/%b/unload"),
    ("POST", b"/v2/repository/%b/index"),
    ("GET", b"/v2/systemsharedmemory/region/%b/status"),
    ("POST", b"/v2/cudasharedmemory/region/%b/register"),
    ("GET", b"/%b"),
    ("GET", b"/v2/health/ready?%b"),
]


@settings(some, max_examples=150)
@given(text=texts, length=lengths, call=st.sampled_from(MODEL_CALLS), is_raw=st.booleans())
@example(text="\r\nX: y", length="", call=MODEL_CALLS[0], is_raw=False)
@example(text="%0d%0aX:%20y", length="", call=MODEL_CALLS[0], is_raw=True)
def test_names_in_paths(server: RunningServer, text: str, length: str, call: tuple[str, bytes], is_raw: bool) -> None:
    method, path = call
    if "load" in path.decode() and text == "ident":
        return  # the model that other tests need
    name = (raw_segment if is_raw else segment)(text)
    target = path % grown(name.decode("latin-1"), length if name else "", LONG_HEAD).encode("latin-1")
    status, content = exchange(server, (method, target, [], json.dumps(ONES).encode() if method == "POST" else b""))
    documented = {200, 400, 404, 405, 501} | ({500} if "repository" in path.decode() else set())
    check_answer(status, content, documented)


def body(**changes: object) -> dict[str, object]:
    tensor = {"name": "IN", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
    document: dict[str, object] = {"inputs": [tensor]}
    for key, value in changes.items():
        (tensor if key in {"name", "datatype", "data", "shape", "tensor_parameters"} else document)[key] = value
    if "tensor_parameters" in tensor:
        tensor["parameters"] = tensor.pop("tensor_parameters")
    return document


BODIES: list[Callable[[str], dict[str, object]]] = [
    lambda text: body(id=text),
    lambda text: body(name=text),
    lambda text: body(datatype=text),
    lambda text: body(shape=text),
    lambda text: body(shape=[text]),
    lambda text: body(data=[text, "b"]),
    lambda text: body(data=text),
    lambda text: body(parameters={text: 1}),
    lambda text: body(parameters={text: []}),
    lambda text: body(parameters={f"triton_{text}": 1}),
    lambda text: body(parameters={"a": text}),
    lambda text: body(parameters={"timeout": text}),
    lambda text: body(parameters={"sequence_id": text}),
    lambda text: body(parameters=text),
    lambda text: body(tensor_parameters={text: text}),
    lambda text: body(tensor_parameters={"binary_data_size": text}),
    lambda text: body(tensor_parameters={"shared_memory_region": text}),
    lambda text: body(outputs=[{"name": text}]),
    lambda text: body(outputs=[{"name": "OUT"}, {"name": text}]),
    lambda text: body(outputs=[{"name": "OUT", "parameters": {"classification": text}}]),
    lambda text: body(outputs=[{"name": "OUT", "parameters": {"shared_memory_region": text}}]),
    lambda text: body(id=text, name=text, parameters={text: text}, outputs=[{"name": text}]),
    lambda text: {text: text},
    lambda text: {"inputs": text},
    lambda text: {"inputs": [text]},
    lambda text: {"inputs": [{text: text}]},
]


@settings(some, max_examples=150)
@given(
    text=texts, length=lengths, make=st.sampled_from(BODIES), escaped=st.booleans(), damage=st.sampled_from(range(8))
)
def test_names_and_values_in_bodies(
    server: RunningServer,
    text: str,
    length: str,
    make: Callable[[str], dict[str, object]],
    escaped: bool,
    damage: int,
) -> None:
    document = make(grown(text, length, LONG_BODY))
    raw = json.dumps(document, ensure_ascii=escaped).encode()
    if damage == 1:
        raw = raw.replace(b'"', b'"\\ud83d', 1)  # half a character
    elif damage == 2:
        raw = raw.replace(b'"', b'"\xff\xfe', 1)
    elif damage == 3:
        raw = raw[: len(raw) // 2]
    status, content = exchange(server, ("POST", b"/v2/models/text/infer", [], raw))
    check_answer(status, content, {200, 400, 501})
    if status == 200:
        assert json.loads(content).get("id", "") == document.get("id", "")
        assert json.loads(content)["outputs"][0]["data"] == document["inputs"][0]["data"]  # type: ignore[index]


@settings(some, max_examples=60)
@given(
    text=texts | st.sampled_from(["config", "file:1/model.onnx"]),
    value=texts,
    length=lengths,
    path=st.sampled_from(["models/ident/load", "models/none/load", "models/ident/unload", "index"]),
    place=st.sampled_from(range(4)),
)
def test_parameters_of_control_calls(
    server: RunningServer, text: str, value: str, length: str, path: str, place: int
) -> None:
    long = grown(value, length, 60_000)
    documents: list[object] = [{"parameters": {text: long}}, {"parameters": {long: 1}}, {long: text}, long]
    content = json.dumps(documents[place]).encode()
    check_answer(*exchange(server, ("POST", f"/v2/repository/{path}".encode(), [], content)), {200, 400, 404, 500, 501})


HEADERS = [
    *("Inference-Header-Content-Length", "Content-Encoding", "Accept-Encoding", "Content-Type", "Accept", "Expect"),
    *("Host", "X-Forwarded", "x-", "triton_x", "Cookie", "Authorization", "traceparent"),
]


@settings(some, max_examples=80)
@given(text=texts | st.sampled_from([b"\xff\xfe", b"\x80"]), length=lengths, name=st.sampled_from(HEADERS))
def test_values_of_headers(server: RunningServer, text: str | bytes, length: str, name: str) -> None:
    whole = text if isinstance(text, bytes) else grown(text, length, LONG_HEAD).encode()[:LONG_HEAD]
    value = re.sub(rb"[\0\r\n]", b" ", whole)
    content = json.dumps(body()).encode()
    status, answer = exchange(server, ("POST", b"/v2/models/text/infer", [(name, value)], content))
    check_answer(status, b"" if status == 200 else answer, {200, 400, 417, 501})


@settings(some, max_examples=40)
@given(text=texts, name=st.sampled_from(["X-Forwarded", "Host"]))
def test_line_ends_in_header_values(server: RunningServer, text: str, name: str) -> None:
    """A line end in a value begins another header or the next request; each request gets its own answer."""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=30) as connection:
        connection.sendall(b"GET /v2/models/none HTTP/1.1\r\n" + f"{name}: {text}\r\n".encode())
        connection.sendall(b"Connection: close\r\n\r\n" if name == "Host" else b"Host: x\r\nConnection: close\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    for each in answer.split(b"HTTP/1.1 ")[1:]:
        head, _, content = each.partition(b"\r\n\r\n")
        status = int(head[:3])
        length = int(re.findall(rb"\r\nContent-Length: (\d+)", head)[0])
        assert len(content) == length
        check_answer(status, content, {400, 404, 405, 431, 501, 505})


# Over gRPC.

CODES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED}
LOAD_CODES = CODES | {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}


@pytest.fixture(scope="module")
def stub(server: RunningServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def message(place: str, text: str) -> pb.ModelInferRequest:
    raw = b"\1\0\0\0a"
    made = pb.ModelInferRequest(model_name="text", raw_input_contents=[raw])
    made.inputs.add(name="IN", datatype="BYTES", shape=[1])
    match place:
        case "model_name" | "model_version" | "id":
            setattr(made, place, text)
        case "name" | "datatype":
            setattr(made.inputs[0], place, text)
        case "output":
            made.outputs.add(name=text)
        case "two outputs":
            made.outputs.add(name=text)
            made.outputs.add(name=text)
        case "key":
            made.parameters[text].bool_param = True
        case "key without a value":
            made.parameters[text].SetInParent()
        case "reserved key":
            made.parameters["triton_" + text].bool_param = True
        case "value":
            made.parameters["a"].string_param = text
        case "timeout":
            made.parameters["timeout"].string_param = text
        case "input's key":
            made.inputs[0].parameters[text].string_param = text
        case "region":
            made.inputs[0].parameters["shared_memory_region"].string_param = text
        case "everything":
            made.model_version = made.id = made.inputs[0].name = text
            made.outputs.add(name=text)
            made.parameters[text].string_param = text
    return made


PLACES = [
    *("model_name", "model_version", "id", "name", "datatype", "output", "two outputs", "key", "key without a value"),
    *("reserved key", "value", "timeout", "input's key", "region", "everything"),
]


def check_status(error: grpc.RpcError, documented: set[grpc.StatusCode]) -> None:
    assert error.code() in documented, (error.code(), error.details()[:500])
    assert 0 < len(error.details().encode()) <= LONGEST_DETAILS


@settings(some, max_examples=100)
@given(text=texts, length=lengths, place=st.sampled_from(PLACES), is_streamed=st.booleans())
def test_names_and_values_in_messages(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, text: str, length: str, place: str, is_streamed: bool
) -> None:
    request = message(place, grown(text, length, LONG_BODY))
    try:
        if is_streamed:
            (answer,) = stub.ModelStreamInfer(iter([request]), timeout=30)
            if answer.error_message:
                assert len(answer.error_message.encode()) <= LONGEST_DETAILS
            assert answer.infer_response.id == request.id
        else:
            assert stub.ModelInfer(request, timeout=30).id == request.id
    except grpc.RpcError as error:
        check_status(error, CODES)


CALLS: list[tuple[str, Callable[[str], object]]] = [
    ("ModelReady", lambda text: pb.ModelReadyRequest(name=text)),
    ("ModelReady", lambda text: pb.ModelReadyRequest(name="ident", version=text)),
    ("ModelMetadata", lambda text: pb.ModelMetadataRequest(name=text)),
    ("ModelMetadata", lambda text: pb.ModelMetadataRequest(name="ident", version=text)),
    ("ModelConfig", lambda text: pb.ModelConfigRequest(name=text, version=text)),
    ("ModelStatistics", lambda text: pb.ModelStatisticsRequest(name=text)),
    ("ModelStatistics", lambda text: pb.ModelStatisticsRequest(name="ident", version=text)),
    ("RepositoryIndex", lambda text: pb.RepositoryIndexRequest(repository_name=text)),
    ("RepositoryModelLoad", lambda text: pb.RepositoryModelLoadRequest(model_name=f"x{text}")),
    ("RepositoryModelLoad", lambda text: pb.RepositoryModelLoadRequest(repository_name=text, model_name="none")),
    ("RepositoryModelLoad", lambda text: loading({text: text})),
    ("RepositoryModelLoad", lambda text: loading({"config": text})),
    ("RepositoryModelUnload", lambda text: pb.RepositoryModelUnloadRequest(model_name=f"x{text}")),
    ("SystemSharedMemoryStatus", lambda text: pb.SystemSharedMemoryStatusRequest(name=text)),
    ("SystemSharedMemoryRegister", lambda text: pb.SystemSharedMemoryRegisterRequest(name=text, key=text)),
    ("TraceSetting", lambda text: pb.TraceSettingRequest(model_name=text)),
]


def loading(parameters: dict[str, str]) -> object:
    request = pb.RepositoryModelLoadRequest(model_name="ident")
    for key, value in parameters.items():
        request.parameters[key].string_param = value
    return request


@settings(some, max_examples=100)
@given(text=texts, length=lengths, call=st.sampled_from(CALLS))
def test_names_in_calls_other_than_inference(
    stub: service_pb2_grpc.GRPCInferenceServiceStub, text: str, length: str, call: tuple[str, Callable[[str], object]]
) -> None:
    method, make = call
    try:
        getattr(stub, method)(make(grown(text, length, 15_000)), timeout=30)
    except grpc.RpcError as error:
        check_status(error, LOAD_CODES if method.startswith("Repository") else CODES | {grpc.StatusCode.UNAVAILABLE})


@settings(some, max_examples=40)
@given(
    key=st.sampled_from(["x-a", "x-triton_b", "x-b-bin", "user-agent-x", "traceparent", "authorization"]),
    value=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=3000),
)
def test_values_of_metadata(stub: service_pb2_grpc.GRPCInferenceServiceStub, key: str, value: str) -> None:
    metadata = [(key, value.encode() if key.endswith("-bin") else value)]
    try:
        stub.ModelInfer(message("id", "i"), timeout=30, metadata=metadata)
    except grpc.RpcError as error:
        check_status(error, CODES)


# In the repository.

NAMES = [
    *(b"two\nlines", b'quo"te', b"back\\slash", b"\x1b]0;title\x07", b"right\xe2\x80\xaeleft", b"sp ace", b"\xff\xfe"),
    *(b'"} 1\nnv_forged{a="', FORGED.encode(), b"n" * 255, "é".encode() * 120, b"%0d%0a", b"<b>", b"a;b", b"-rf"),
]


def test_names_of_directories(start: Start, repository: Path) -> None:
    """Each folder is a model served under its name, or is ignored with a line that has the reason."""
    add_identity(repository, "ident")
    for name in NAMES:
        directory = repository / os.fsdecode(name)
        (directory / "1").mkdir(parents=True)
        write_config(directory, (repository / "ident" / "config.pbtxt").read_text().replace('name: "ident"', ""))
        (directory / os.fsdecode(b"v" + name[:200])).mkdir()
    server = start("--model-repository", repository, "--model-control-mode=explicit", "--log-verbose=1")
    wait_until(lambda: "Started Metrics Service" in server.log, "the start's last line", server)
    begun = len(server.log_path.read_bytes())
    known = {entry["name"] for entry in server.post("/v2/repository/index").json}
    assert "ident" in known
    loaded = set()
    for name in NAMES:
        path = quote(name, safe="")
        status, content = exchange(server, ("POST", f"/v2/repository/models/{path}/load".encode(), [], b""))
        check_answer(status, content, {200, 400, 404, 500})
        if status == 200:
            loaded.add(name.decode())
            assert server.post(f"/v2/models/{path}/infer", ONES).json["model_name"] == name.decode()
            assert server.get(f"/v2/models/{path}/stats").json["model_stats"][0]["name"] == name.decode()
    assert loaded <= known
    families = {family.name: family for family in text_string_to_metric_families(server.metrics())}
    assert {sample.labels["model"] for sample in families["nv_inference_request_success"].samples} == loaded
    assert server.stop() == 0
    check_lines(server.log_path.read_bytes()[begun:].decode())
