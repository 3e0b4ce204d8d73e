"""Invalid input over HTTP: the status and the text of each error.

An error of the client is always a 4xx; texts are Triton's. After every error the server must still answer correctly, which
other tests with the `server` fixture show, and be alive at the end, which the fixture checks.
"""

import gzip
import json
import socket
import struct
import zlib

import numpy as np
import pytest

from support.processes import peak_bytes
from support.server import Answer, RunningServer


def infer(server: RunningServer, model: str, body: object, headers: dict[str, str] | None = None) -> Answer:
    return server.post(f"/v2/models/{model}/infer", body, headers)


def ident(**changes: object) -> dict[str, object]:
    tensor = {"name": "IN", "shape": [1, 16], "datatype": "FP32", "data": [0.5] * 16, **changes}
    return {"inputs": [{k: v for k, v in tensor.items() if v is not None}]}


def binary(server: RunningServer, model: str, header: object, payload: bytes, *, length: object = None) -> Answer:
    raw = json.dumps(header).encode()
    headers = {"Inference-Header-Content-Length": str(len(raw) if length is None else length)}
    return infer(server, model, raw + payload, headers)


def raw_exchange(server: RunningServer, data: bytes) -> bytes:
    """Send these bytes and read until the server closes."""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=20) as connection:
        connection.sendall(data)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{nope", "failed to parse the request JSON buffer: "),
        (b"[]", "Unable to parse 'inputs': attempt to access "),
        (b"null", "Unable to parse 'inputs': attempt to access "),
        (b"{}", "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
        (b'{"inputs":1}', "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        (b'{"id":5,"inputs":[]}', "Unable to parse 'id': attempt to access JSON non-string as string"),
    ],
)
def test_an_invalid_body(server: RunningServer, body: bytes, text: str) -> None:
    answer = infer(server, "ident", body)
    assert (answer.status, answer.error[: len(text)]) == (400, text)


def test_an_empty_body_is_a_raw_binary_request(server: RunningServer) -> None:
    answer = infer(server, "ident", b"")
    assert answer.status == 400
    assert "input byte size mismatch for input 'raw_input' for model 'ident'. Expected 64, got 0" in answer.error


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/v2/models/nope", "Request for unknown model: 'nope' is not found"),
        ("/v2/models/ident/versions/9", "Request for unknown model: 'ident' version 9 is not found"),
        ("/v2/models/nope/config", "Request for unknown model: 'nope' is not found"),
        ("/v2/models/nope/ready", "Request for unknown model: 'nope' is not found"),
        ("/v2/models/ident/versions/x", "Not Found"),
        ("/v2/models", "Not Found"),
        ("/v2/", "Not Found"),
        ("/metrics", "Not Found"),
    ],
)
def test_an_unknown_model_version_or_path(server: RunningServer, path: str, text: str) -> None:
    answer = server.get(path)
    # The text for an unknown path also says which paths there are.
    assert (answer.status, answer.error.partition(": paths begin with /v2")[0]) == (404, text)


def test_statistics_of_an_unknown_model_are_a_400(server: RunningServer) -> None:
    answer = server.get("/v2/models/nope/stats")
    assert (answer.status, answer.error) == (400, "requested model 'nope' is not available")


def two(*names: str) -> dict[str, object]:
    return {"inputs": [{"name": n, "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16} for n in names]}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            two("IN0"),
            "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'two'. Got input(s) ['IN0'], but missing "
            "required input(s) ['IN1']. Please provide all required input(s).",
        ),
        (two("IN0", "ZZ"), "unexpected inference input 'ZZ' for model 'two'"),
        (two("IN0", "IN0"), "input 'IN0' already exists in request"),
        ({**two("IN0", "IN1"), "outputs": [{"name": "ZZ"}]}, "unexpected inference output 'ZZ' for model 'two'"),
        (
            {**two("IN0", "IN1"), "outputs": [{"name": "OUT0"}, {"name": "OUT0"}]},
            "output 'OUT0' already exists in request",
        ),
    ],
)
def test_wrong_names(server: RunningServer, body: object, text: str) -> None:
    answer = infer(server, "two", body)
    assert answer.status == 400
    assert text in answer.error


def test_every_pair_of_datatypes_that_differ_is_refused_by_name(server: RunningServer) -> None:
    types = [
        "BOOL",
        "UINT8",
        "INT8",
        "UINT16",
        "INT16",
        "UINT32",
        "INT32",
        "UINT64",
        "INT64",
        "FP16",
        "FP32",
        "FP64",
        "BYTES",
        "BF16",
    ]
    for model_type in types:
        for sent in types:
            if sent == model_type:
                continue
            model = f"ident_{model_type.lower()}"
            tensor = {"name": "IN", "shape": [1, 0], "datatype": sent, "parameters": {"binary_data_size": 0}}
            answer = binary(server, model, {"inputs": [tensor], "parameters": {"binary_data_output": True}}, b"")
            text = f"inference input 'IN' data-type is '{sent}', but model '{model}' expects '{model_type}'"
            assert (answer.status, text in answer.error) == (400, True), answer.body


def test_an_unknown_datatype(server: RunningServer) -> None:
    answer = infer(server, "ident", ident(datatype="FLOAT"))
    assert (answer.status, answer.error) == (400, "invalid datatype for input IN")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"shape": [1, 15], "data": [0.5] * 15},
            "unexpected shape for input 'IN' for model 'ident'. Expected [-1,16], got [1,15]. ",
        ),
        ({"shape": [16]}, "unexpected shape for input 'IN' for model 'ident'. Expected [-1,16], got [16]. "),
        ({"shape": [], "data": [0.5]}, "input 'IN' has no shape but model requires batch dimension for 'ident'"),
        ({"shape": [33, 16], "data": [0.5] * 528}, "inference request batch-size must be <= 32 for 'ident'"),
    ],
)
def test_wrong_shapes(server: RunningServer, changes: dict[str, object], text: str) -> None:
    answer = infer(server, "ident", ident(**changes))
    assert answer.status == 400
    assert text in answer.error


@pytest.mark.parametrize("data", [[0.5] * 15, [0.5] * 17, [[0.5] * 16, [0.5] * 16], []])
def test_a_count_that_does_not_match_the_shape(server: RunningServer, data: object) -> None:
    answer = infer(server, "ident", ident(data=data))
    assert answer.status == 400
    assert "Shape does not match true shape of 'data' field" in answer.error or "shape does not match" in answer.error


@pytest.mark.parametrize(
    "shape", [[1, -16], [-1, 16], [1.5, 16], ["1", 16], [True, 16], [2**64, 1], "x", None, [[1, 16]]]
)
def test_shapes_that_are_not_unsigned_integers(server: RunningServer, shape: object) -> None:
    answer = infer(server, "ident", ident(shape=shape))
    assert answer.status == 400
    assert "shape" in answer.error


@pytest.mark.parametrize("shape", [[2**32, 2**32], [2**62, 4], [2**63 - 1, 16], [1, 2**63 - 1]])
def test_shapes_that_overflow(server: RunningServer, shape: list[int]) -> None:
    assert infer(server, "ident", ident(shape=shape)).status == 400
    assert infer(server, "unbatched", ident(shape=[2**62])).status == 400


def test_a_large_declared_shape_without_data_allocates_nothing(server: RunningServer) -> None:
    before = peak_bytes(server)
    answer = infer(server, "unbatched", ident(shape=[2**40], data=[1.0]))
    assert answer.status == 400
    tensor = {"name": "IN", "shape": [2**40], "datatype": "FP32", "parameters": {"binary_data_size": 2**42}}
    assert binary(server, "unbatched", {"inputs": [tensor]}, b"\0" * 4).status == 400
    assert peak_bytes(server) - before <= 16 << 20


def test_a_zero_dimension_is_an_empty_tensor(server: RunningServer) -> None:
    answer = infer(server, "unbatched", ident(shape=[0], data=[]))
    assert answer.status == 200
    assert answer.json["outputs"] == [{"name": "OUT", "datatype": "FP32", "shape": [0], "data": []}]


def test_nan_and_infinity_pass_both_ways(server: RunningServer) -> None:
    body = json.dumps(ident(shape=[3], data=[0, 0, 0])).replace("[0, 0, 0]", "[NaN, Infinity, -Infinity]")
    answer = infer(server, "unbatched", body)
    assert answer.status == 200
    assert b'"data":[NaN,Infinity,-Infinity]' in answer.body


@pytest.mark.parametrize("element", ["null", '"1"', "true", "1e999", "{}", '[1,"x"]'])
def test_elements_that_are_not_numbers(server: RunningServer, element: str) -> None:
    body = json.dumps(ident(shape=[1], data=[7.25])).replace("7.25", element)
    answer = infer(server, "unbatched", body)
    assert answer.status == 400
    assert answer.error.startswith(("Unable to parse 'data'", "failed to parse the request JSON buffer"))


@pytest.mark.parametrize(
    ("datatype", "element"),
    [
        ("UINT8", "300"),
        ("UINT8", "-1"),
        ("INT8", "128"),
        ("INT16", "-32769"),
        ("UINT32", "4294967296"),
        ("INT32", "2147483648"),
        ("UINT64", "-1"),
        ("UINT64", "18446744073709551616"),
        ("INT64", "9223372036854775808"),
        ("INT32", "1.7"),
        ("INT32", "true"),
        ("BOOL", "1"),
        ("BYTES", "1"),
    ],
)
def test_numbers_out_of_the_datatypes_range_never_wrap(server: RunningServer, datatype: str, element: str) -> None:
    body = f'{{"inputs":[{{"name":"IN","shape":[1,1],"datatype":"{datatype}","data":[{element}]}}]}}'
    answer = infer(server, f"ident_{datatype.lower()}", body)
    assert answer.status == 400, answer.body
    assert answer.error.startswith("Unable to parse")


def text_tensor(payload: bytes, count: int) -> tuple[dict[str, object], bytes]:
    tensor = {"name": "IN", "shape": [1, count], "datatype": "BYTES", "parameters": {"binary_data_size": len(payload)}}
    return {"inputs": [tensor]}, payload


@pytest.mark.parametrize(
    ("payload", "count", "text"),
    [
        (
            struct.pack("<I", 100) + b"abcd",
            1,
            "incomplete string data for inference input 'IN', expecting string of length 100 but only 4 bytes available",
        ),
        (
            struct.pack("<I", 0xFFFFFFFF) + b"abcd",
            1,
            "incomplete string data for inference input 'IN', expecting string of length 4294967295 but only 4 bytes available",
        ),
        (
            b"\1\0",
            1,
            "incomplete string length indicator for inference input 'IN' for model 'text', expecting 4 bytes but only 2 bytes",
        ),
        (struct.pack("<I", 1) + b"a", 2, "expected 2 string elements for inference input 'IN' for model 'text', got 1"),
        (
            struct.pack("<I", 1) + b"a" + struct.pack("<I", 1) + b"b",
            1,
            "unexpected number of string elements 2 for inference input 'IN'",
        ),
    ],
)
def test_broken_bytes_tensors(server: RunningServer, payload: bytes, count: int, text: str) -> None:
    answer = binary(server, "text", *text_tensor(payload, count))
    assert answer.status == 400
    assert text in answer.error


def test_nul_bytes_in_strings_survive(server: RunningServer) -> None:
    answer = infer(
        server, "text", {"inputs": [{"name": "IN", "shape": [1, 2], "datatype": "BYTES", "data": ["a\0b", ""]}]}
    )
    assert answer.status == 200
    assert b'"data":["a\\u0000b",""]' in answer.body


@pytest.mark.parametrize("name", ["id%00ent", "ident%0a", "..", "a%2fb", "%ff"])
def test_odd_model_names_are_unknown_and_never_cut(server: RunningServer, name: str) -> None:
    answer = server.get(f"/v2/models/{name}")
    assert 400 <= answer.status < 500
    assert isinstance(answer.error, str)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1059, "unexpected size for input 'IN', expecting 995 additional bytes for model 'ident'"),
        (32, "unexpected additional input data for model 'ident'"),
        (-1, "Unable to parse 'binary_data_size'"),
        (2**63, "unexpected size for input 'IN', expecting 9223372036854775744 additional bytes for model 'ident'"),
        ("64", "Unable to parse 'binary_data_size'"),
    ],
)
def test_a_wrong_binary_data_size(server: RunningServer, size: object, text: str) -> None:
    tensor = {"name": "IN", "shape": [1, 16], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    answer = binary(server, "ident", {"inputs": [tensor]}, b"\0" * 64)
    assert answer.status == 400
    assert text in answer.error


def test_two_sources_of_one_input(server: RunningServer) -> None:
    answer = infer(server, "ident", ident(parameters={"binary_data_size": 64}))
    assert answer.status == 400
    assert answer.error.startswith(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters'"
    )


@pytest.mark.parametrize("length", ["99999", "-1", "abc", "9" * 30])
def test_a_wrong_header_length(server: RunningServer, length: str) -> None:
    answer = binary(server, "ident", ident(), b"", length=length)
    assert answer.status == 400
    assert "header" in answer.error.lower()


def test_a_body_over_the_limit_is_answered_and_closed(server: RunningServer) -> None:
    limit = 64 << 20
    use = f"{limit} bytes. Use --http-max-input-size to increase the limit."
    for size, call in ((limit + 1, "infer"), (2**40, "infer"), (limit + 1, "generate")):
        for fields, excess in {
            "": f"request JSON size of {size} bytes exceeds the maximum allowed input size of",
            "Inference-Header-Content-Length: 0\r\n": f"request binary size of {size} bytes exceeds the maximum allowed"
            " value of",
        }.items():
            head = f"POST /v2/models/ident/{call} HTTP/1.1\r\nHost: x\r\n{fields}Content-Length: {size}\r\n\r\n"
            answer = raw_exchange(server, head.encode() + b"{")
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2]) == {"error": f"{excess} {use}"}
    chunks = b"%x\r\n" % (limit + 1)
    head = b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: 0\r\n"
    answer = raw_exchange(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    assert b"exceeds the maximum allowed value of" in answer


@pytest.mark.parametrize("garbage", [b"garbage", gzip.compress(b"{}" * 100, mtime=0)[:-12]])
def test_broken_gzip(server: RunningServer, garbage: bytes) -> None:
    assert infer(server, "ident", garbage, {"Content-Encoding": "gzip"}).status == 400


def test_an_unknown_coding(server: RunningServer) -> None:
    answer = infer(server, "ident", b"x", {"Content-Encoding": "br"})
    assert (answer.status, answer.error) == (501, "Unsupported compression type")
    assert answer.headers["accept-encoding"] == "gzip, deflate"


def test_a_gzip_bomb_is_stopped_at_the_limit(server: RunningServer) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(200)) + packer.flush()
    answer = infer(server, "ident", bomb, {"Content-Encoding": "gzip"})
    assert answer.status == 400
    assert answer.error == (
        "Decompressed data size exceeds the maximum allowed value of 67108864 bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def test_a_wrong_method(server: RunningServer) -> None:
    for method, path in [
        ("GET", "/v2/models/ident/infer"),
        ("POST", "/v2"),
        ("POST", "/v2/health/ready"),
        ("GET", "/v2/repository/index"),
    ]:
        answer = server.request(method, path)
        assert (answer.status, answer.error) == (405, "Method Not Allowed")
        assert answer.headers["allow"] in {"GET", "POST"}


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + b"".join(b"h%d: x\r\n" % n for n in range(1000)) + b"\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: x\r\nbig: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_too_many_or_too_large_headers(server: RunningServer, head: bytes) -> None:
    status = raw_exchange(server, head).split(b" ", 2)[1]
    assert status in {b"400", b"414", b"431"}


@pytest.mark.parametrize("value", [{"a": {}}, {"a": []}, {"a": None}])
def test_parameters_of_a_wrong_type(server: RunningServer, value: dict[str, object]) -> None:
    answer = infer(server, "ident", {**ident(), "parameters": value})
    assert answer.status == 400
    assert answer.error == "parameter 'a' has invalid type. It should be either 'int', 'bool', or 'string'."


@pytest.mark.parametrize(
    "parameters",
    [
        {"triton_x": 1},
        {"triton_enable_empty_final_response": False},
        {"sequence_start": "x"},
        {"sequence_id": 1.5},
        {"priority": -1},
        {"timeout": -1},
        {"timeout": "x"},
    ],
)
def test_reserved_parameters(server: RunningServer, parameters: dict[str, object]) -> None:
    answer = infer(server, "ident", {**ident(), "parameters": parameters})
    assert answer.status == 400
    assert next(iter(parameters)).split("_")[0] in answer.error


def test_client_data_in_an_error_is_cut(server: RunningServer) -> None:
    answer = infer(
        server, "ident", {"inputs": [{"name": "x" * 1_000_000, "shape": [1] * 16, "datatype": "FP32", "data": [1]}]}
    )
    assert answer.status == 400
    assert len(answer.body) <= 4096
    answer = infer(server, "ident", ident(shape=[1] * 100_000))
    assert answer.status == 400
    assert len(answer.body) <= 4096


def test_nesting_deeper_than_the_limit(server: RunningServer) -> None:
    for depth in (101, 100_000):
        answer = infer(server, "ident", b'{"inputs":' + b"[" * depth + b"]" * depth + b"}")
        assert answer.status == 400
        assert answer.error == "JSON nesting depth exceeds maximum allowed limit (100)"


def test_right_requests_still_get_right_answers(server: RunningServer) -> None:
    values = np.arange(16, dtype=np.float32)
    answer = infer(server, "ident", ident(data=values.tolist()))
    assert answer.json == {
        "model_name": "ident",
        "model_version": "1",
        "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [1, 16], "data": values.tolist()}],
    }
