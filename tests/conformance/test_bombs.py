"""Small requests that would use much memory: nesting, counts, and compressed data.

Each gets the documented status and uses bounded memory, and the server answers other requests meanwhile.
"""

import gzip
import json
import re
import socket
import zlib
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from support.calls import ONES_JSON
from support.h2client import INFER as GRPC_INFER
from support.models import add_identity
from support.processes import forget_peak, peak_bytes, resident_bytes
from support.server import RunningServer, serving

MIB = 1 << 20
LIMIT_BYTES = 8 * MIB
SPARE_BYTES = 16 * MIB
"""Memory that a refused request may use in addition to a body of the largest size."""
LONGEST_ERROR = 8 << 10
INFER = ONES_JSON.encode()
INFER_PATH = "/v2/models/ident/infer"
STATUS = re.compile(rb"HTTP/1\.1 (\d+) ")
TOO_DEEP = "JSON nesting depth exceeds maximum allowed limit (100)"
TOO_LARGE = "Decompressed data size exceeds the maximum allowed value of 8388608 bytes. "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    add_identity(models, "ident")
    add_identity(models, "open", dims="-1", max_batch_size=0)
    add_identity(models, "texts", datatype="BYTES", dims="-1", max_batch_size=0)
    arguments = ["--model-repository", models, "--model-control-mode=explicit", "--load-model=*"]
    limits = [f"--http-max-input-size={LIMIT_BYTES}", f"--grpc-max-input-size={LIMIT_BYTES}"]
    with serving(tmp_path_factory.mktemp("log"), [*arguments, *limits]) as running:
        assert running.post(INFER_PATH, INFER).status == 200
        yield running
    assert "unexpected error" not in running.log


def post(body: bytes, fields: bytes = b"", path: str = INFER_PATH) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%bContent-Length: %d\r\n\r\n"
    return head % (path.encode(), fields, len(body)) + body


def exchange(server: RunningServer, data: bytes) -> tuple[int, str]:
    """The status and the error of the answer to these bytes. Checks that other requests are served meanwhile."""
    before = resident_bytes(server)
    forget_peak(server)
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as connection:
        connection.sendall(data)
        assert server.get("/v2/health/live").status == 200
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    answer = b"".join(parts)
    assert peak_bytes(server) - before <= LIMIT_BYTES + SPARE_BYTES
    assert len(STATUS.findall(answer)) == 1, answer[:500]
    status = int(STATUS.findall(answer)[0])
    if status == 200:
        return status, ""
    body = answer.partition(b"\r\n\r\n")[2]
    assert len(body) <= LONGEST_ERROR
    return status, json.loads(body)["error"]


# Nesting, at the place of `%b`.

PLACES = {
    "the document": b"%b",
    "the inputs": b'{"inputs":%b}',
    "the data": b'{"inputs":[{"name":"IN","shape":[1,16],"datatype":"FP32","data":%b}]}',
    "the shape": b'{"inputs":[{"name":"IN","shape":%b,"datatype":"FP32","data":[1]}]}',
    "an input's parameters": b'{"inputs":[{"name":"IN","parameters":%b}]}',
    "the parameters": b'{"parameters":%b,"inputs":[]}',
    "a parameter": b'{"parameters":{"a":%b},"inputs":[]}',
    "the id": b'{"id":%b,"inputs":[]}',
    "the outputs": b'{"inputs":[],"outputs":%b}',
    "a member that means nothing": INFER[:-1] + b',"more":%b}',
}


def nested(opening: bytes, depth: int, *, is_closed: bool) -> bytes:
    closing = {b"[": b"]", b'{"a":': b"}"}[opening]
    return opening * depth + (b"1" + closing * depth if is_closed else b"")


@pytest.mark.parametrize("place", PLACES)
def test_nesting_is_refused_beyond_a_hundred_levels_wherever_it_is(server: RunningServer, place: str) -> None:
    for opening in (b"[", b'{"a":'):
        for depth in (101, 2_000, 20_000, 1_000_000):
            body = PLACES[place] % nested(opening, depth, is_closed=True)
            assert exchange(server, post(body)) == (400, TOO_DEEP), (opening, depth)
        # Unclosed brackets are invalid JSON too; short documents get that error.
        for depth in (2_000, 1_000_000):
            body = PLACES[place] % nested(opening, depth, is_closed=False)
            assert exchange(server, post(body)) == (400, TOO_DEEP), (opening, depth)


@pytest.mark.parametrize("place", PLACES)
def test_nesting_below_the_limit_gets_an_ordinary_answer(server: RunningServer, place: str) -> None:
    status, text = exchange(server, post(PLACES[place] % nested(b"[", 90, is_closed=True)))
    assert (status, text == TOO_DEEP) == ((200 if place == "a member that means nothing" else 400), False)


def test_nesting_of_control_calls_is_refused(server: RunningServer) -> None:
    for path in ("/v2/repository/index", "/v2/repository/models/ident/load", "/v2/repository/models/ident/unload"):
        for depth in (1_000, 30_000):
            status, text = exchange(server, post(b'{"parameters":' + b"[" * depth, path=path))
            assert (400 <= status <= 500, len(text) > 0) == (True, True)
    assert server.post(INFER_PATH, INFER).status == 200


# Counts.


def listed(item: bytes, count: int) -> bytes:
    return b",".join([item] * count)


INPUT = b'{"name":"IN","shape":[1,16],"datatype":"FP32","data":[1]}'
EMPTY = b'{"name":"IN","shape":[1,16],"datatype":"FP32","data":%b}'

COUNTS: dict[str, Callable[[], bytes]] = {
    "inputs": lambda: b'{"inputs":[' + listed(INPUT, 100_000) + b"]}",
    "inputs that are nothing": lambda: b'{"inputs":[' + listed(b"{}", 1_000_000) + b"]}",
    "outputs": lambda: INFER[:-1] + b',"outputs":[' + listed(b'{"name":"OUT"}', 100_000) + b"]}",
    "dimensions": lambda: b'{"inputs":[{"name":"IN","shape":[' + listed(b"1", 2_000_000) + b"]}]}",
    "elements": lambda: b'{"inputs":[' + EMPTY % (b"[" + listed(b"1", 4_000_000) + b"]") + b"]}",
    "elements of another datatype": lambda: (
        b'{"inputs":[{"name":"IN","shape":[4000000],"datatype":"FP64","data":[' + listed(b"1", 4_000_000) + b"]}]}"
    ),
    "empty arrays": lambda: b'{"inputs":[' + EMPTY % (b"[" + listed(b"[]", 2_500_000) + b"]") + b"]}",
    "strings": lambda: b'{"inputs":[' + EMPTY % (b"[" + listed(b'""', 2_500_000) + b"]") + b"]}",
    "members that come again": lambda: b'{"inputs":[{' + listed(b'"name":"IN"', 600_000) + b"}]}",
    "spaces": lambda: b" " * (LIMIT_BYTES - 1) + b"[",
    "digits of an element": lambda: b'{"inputs":[' + EMPTY % (b"[" + b"9" * 8_000_000 + b"]") + b"]}",
    "digits of a dimension": lambda: b'{"inputs":[{"name":"IN","shape":[' + b"9" * 60_000 + b"]}]}",
    "digits of a size": lambda: INPUT.join([b'{"inputs":[', b'],"parameters":{"timeout":' + b"9" * 60_000 + b"}}"]),
    "escapes": lambda: b'{"id":"' + b"\\u0000" * 1_300_000 + b'","inputs":[]}',
}


@pytest.mark.parametrize("kind", COUNTS)
def test_many_of_one_kind_are_refused(server: RunningServer, kind: str) -> None:
    status, text = exchange(server, post(COUNTS[kind]()))
    assert (status, len(text) > 0) == (400, True)


def test_many_parameters_are_read_or_refused(server: RunningServer) -> None:
    for count in (1_000, 10_000, 400_000):
        parameters = b",".join(b'"p%d":1' % n for n in range(count))
        status, text = exchange(server, post(INFER[:-1] + b',"parameters":{' + parameters + b"}}"))
        assert (status, bool(text)) in {(200, False), (400, True)}


@pytest.mark.parametrize("field", ["inputs", "outputs", "parameters", "raw_input_contents"])
def test_many_of_one_kind_over_grpc_are_refused(server: RunningServer, field: str) -> None:
    def message(count: int) -> pb.ModelInferRequest:
        made = pb.ModelInferRequest(model_name="ident")
        for number in range(count):
            match field:
                case "parameters":
                    made.parameters[str(number)].bool_param = True
                case "raw_input_contents":
                    made.raw_input_contents.append(b"")
                case _:
                    getattr(made, field).add(name="IN")
        return made

    before = resident_bytes(server)
    forget_peak(server)
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for count in (4_097, 300_000):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(message(count), timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert 0 < len(caught.value.details()) <= 4096
    # A message is parsed completely and uses more memory than its bytes: here 2 MiB of them.
    assert peak_bytes(server) - before <= LIMIT_BYTES + 4 * SPARE_BYTES
    assert server.get("/v2/health/live").status == 200


@pytest.mark.parametrize(
    ("model", "count", "reason"),
    [
        ("texts", 1000, "unexpected number of string elements 1001 for inference input 'IN' for model 'texts'"),
        ("open", 4_000_000, "inference input 'IN' data-type is 'BYTES', but model 'open' expects 'FP32'"),
    ],
)
def test_many_empty_strings_in_a_small_message_are_refused(
    server: RunningServer, model: str, count: int, reason: str
) -> None:
    made = pb.InferTensorContents(bytes_contents=[b""] * 1000).SerializeToString() * 4000
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="BYTES", shape=[count])
    raw = b"".join(
        [
            pb.ModelInferRequest(model_name=model).SerializeToString(),
            sized(5, tensor.SerializeToString() + sized(5, made)),
        ]
    )
    before = resident_bytes(server)
    forget_peak(server)
    with grpc.insecure_channel(server.grpc_url, compression=grpc.Compression.Gzip) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(GRPC_INFER)(raw, timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason in caught.value.details()
    # The message, but not the length before each string, which are 16 MiB more.
    assert peak_bytes(server) - before <= LIMIT_BYTES + SPARE_BYTES // 2


def sized(number: int, value: bytes) -> bytes:
    """A field of a message, with a value of less than 32 MiB."""
    size = len(value)
    return bytes([number << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21]) + value


@pytest.mark.parametrize("count", [5_000, pytest.param(20_000, marks=pytest.mark.large)])
def test_pipelined_requests_are_answered_in_order_and_read_one_by_one(server: RunningServer, count: int) -> None:
    request = b"GET /v2/models/m%05d HTTP/1.1\r\nHost: x\r\n\r\n"
    before = resident_bytes(server)
    forget_peak(server)
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as connection:
        reader = connection.makefile("rb")
        for start in range(0, count, 1_000):
            connection.sendall(b"".join(request % number for number in range(start, start + 1_000)))
            for number in range(start, start + 1_000):
                assert reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
                length = 0
                while (line := reader.readline()) != b"\r\n":
                    length = int(line[16:]) if line.startswith(b"Content-Length: ") else length
                assert b"'m%05d'" % number in reader.read(length)
        reader.close()
    assert peak_bytes(server) - before <= SPARE_BYTES


# Compression.


def bomb_of(content: bytes, coding: str) -> bytes:
    """The content 500 times, as independent blocks after the coding's header, without the checksum."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(content) + packer.flush(zlib.Z_FULL_FLUSH)
    return (b"\x1f\x8b\x08" + bytes(7) if coding == "gzip" else b"\x78\xda") + block * 500


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("content", [b" ", b"\0", b"[", b'{"a":', b"1,"], ids=["spaces", "zeros", "[", "{", "1,"])
def test_a_bomb_with_any_content_is_stopped_at_the_limit(server: RunningServer, coding: str, content: bytes) -> None:
    bomb = bomb_of(content * (MIB // len(content)), coding)
    assert len(bomb) < 2 * MIB
    status, text = exchange(server, post(bomb, b"Content-Encoding: %b\r\n" % coding.encode()))
    assert (status, text[: len(TOO_LARGE)]) == (400, TOO_LARGE)


def test_large_members_of_gzip_are_one_body(server: RunningServer) -> None:
    """Each member needs several calls of zlib."""
    head = b'{"inputs":[{"name":"IN","shape":[%d],"datatype":"FP32","parameters":{"binary_data_size":%d}}]}'
    head %= (MIB, 4 * MIB)
    members = gzip.compress(head) + b"".join(gzip.compress(bytes([byte]) * MIB) for byte in range(1, 5))
    fields = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": str(len(head))}
    fields["Accept-Encoding"] = "identity"
    answer = server.post("/v2/models/open/infer", members, fields)
    assert answer.status == 200
    assert answer.json["outputs"][0]["data"][:: MIB // 4] == [
        float(value) for value in np.frombuffer(bytes([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]), np.float32)
    ]


def test_a_bomb_in_a_bomb_is_inflated_at_most_once(server: RunningServer) -> None:
    twice = gzip.compress(bomb_of(b" " * MIB, "gzip"))
    status, text = exchange(server, post(twice, b"Content-Encoding: gzip\r\n"))
    assert (status, text != "", text[: len(TOO_LARGE)] == TOO_LARGE) == (400, True, False)
    for codings in (b"gzip, gzip", b"gzip, deflate", b"gzip," * 1_000 + b"gzip"):
        status, text = exchange(server, post(twice, b"Content-Encoding: %b\r\n" % codings))
        assert (status, text) == (501, "Unsupported compression type")
    status, text = exchange(server, post(twice, b"Content-Encoding: gzip\r\nContent-Encoding: gzip\r\n"))
    assert (status, len(text) > 0) in {(400, True), (501, True)}


def test_a_bomb_to_a_call_other_than_inference_is_not_inflated(server: RunningServer) -> None:
    bomb = bomb_of(b" " * MIB, "gzip")
    for path in ("/v2/repository/index", "/v2/repository/models/ident/load"):
        status, _ = exchange(server, post(bomb, b"Content-Encoding: gzip\r\n", path))
        assert status in {400, 413, 500, 501}
