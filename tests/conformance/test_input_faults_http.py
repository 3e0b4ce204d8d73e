"""Invalid input over HTTP to real models: one error of each part that checks, and requests that are only unusual.

An error of the client is a 400 with Triton's text. The tables of all errors belong to the parts: see the tests of the body,
of arrays, of routes and of `RequestChecker`. After every error the server must still answer correctly, which other tests
with the `server` fixture show, and be alive at the end, which the fixture checks.
"""

import json
import struct

import numpy as np
import pytest

from support.processes import peak_bytes
from support.server import Answer, RunningServer


def infer(server: RunningServer, model: str, body: object, headers: dict[str, str] | None = None) -> Answer:
    return server.post(f"/v2/models/{model}/infer", body, headers)


def tensor(**changes: object) -> dict[str, object]:
    fields = {"name": "IN", "shape": [1, 16], "datatype": "FP32", "data": [0.5] * 16, **changes}
    return {key: value for key, value in fields.items() if value is not None}


def ident(**changes: object) -> dict[str, object]:
    return {"inputs": [tensor(**changes)]}


def binary(server: RunningServer, model: str, payload: bytes, **changes: object) -> Answer:
    changes = {"data": None, "parameters": {"binary_data_size": len(payload)}, **changes}
    head = json.dumps(ident(**changes)).encode()
    return infer(server, model, head + payload, {"Inference-Header-Content-Length": str(len(head))})


@pytest.mark.parametrize(
    ("model", "body", "text"),
    [
        ("ident", b"{nope", "failed to parse the request JSON buffer: "),
        ("ident", b"", "input byte size mismatch for input 'raw_input' for model 'ident'. Expected 64, got 0"),
        ("ident", b'{"inputs":1}', "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        (
            "two",
            {"inputs": [tensor(name="IN0")]},
            "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'two'. Got input(s) ['IN0'], but missing "
            "required input(s) ['IN1']. Please provide all required input(s).",
        ),
        ("ident", {**ident(), "outputs": [{"name": "ZZ"}]}, "unexpected inference output 'ZZ' for model 'ident'"),
        ("ident", ident(datatype="FLOAT"), "invalid datatype for input IN"),
        ("ident", ident(datatype="INT32", data=[1] * 16), "data-type is 'INT32', but model 'ident' expects 'FP32'"),
        ("ident", ident(shape=[16]), "unexpected shape for input 'IN' for model 'ident'. Expected [-1,16], got [16]. "),
        ("ident", ident(shape=[33, 16], data=[0.5] * 528), "inference request batch-size must be <= 32 for 'ident'"),
        ("ident", ident(data=[0.5] * 15), "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ("ident", ident(shape=[-1, 16]), "invalid shape for input 'IN': shape [-1,16] contains one or more invalid"),
        ("unbatched", ident(shape=[2**62]), "input 'IN' has too many elements for model 'unbatched'"),
        ("ident_uint8", ident(shape=[1, 1], datatype="UINT8", data=[300]), "Unable to parse"),
        ("ident", {**ident(), "parameters": {"priority": -1}}, "Unable to parse 'priority'"),
    ],
)
def test_an_invalid_request(server: RunningServer, model: str, body: object, text: str) -> None:
    answer = infer(server, model, body)
    assert (answer.status, text in answer.error) == (400, True), answer.body


@pytest.mark.parametrize(
    ("model", "payload", "changes", "text"),
    [
        (
            "ident",
            bytes(64),
            {"parameters": {"binary_data_size": 1059}},
            "unexpected size for input 'IN', expecting 995 additional bytes for model 'ident'",
        ),
        (
            "text",
            struct.pack("<I", 100) + b"abcd",
            {"shape": [1, 1], "datatype": "BYTES"},
            "incomplete string data for inference input 'IN', expecting string of length 100 but only 4 bytes available",
        ),
    ],
)
def test_an_invalid_binary_request(
    server: RunningServer, model: str, payload: bytes, changes: dict[str, object], text: str
) -> None:
    answer = binary(server, model, payload, **changes)
    assert (answer.status, text in answer.error) == (400, True), answer.body


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("ident/versions/9", 404, "Request for unknown model: 'ident' version 9 is not found"),
        ("nope/ready", 404, "Request for unknown model: 'nope' is not found"),
        ("ident%0a", 404, "Request for unknown model: 'ident\n' is not found"),
        ("nope/stats", 400, "requested model 'nope' is not available"),
    ],
)
def test_an_unknown_model_or_version(server: RunningServer, path: str, status: int, text: str) -> None:
    answer = server.get(f"/v2/models/{path}")
    assert (answer.status, answer.error) == (status, text)


def test_a_large_declared_shape_without_data_allocates_nothing(server: RunningServer) -> None:
    before = peak_bytes(server)
    assert infer(server, "unbatched", ident(shape=[2**40], data=[1.0])).status == 400
    answer = binary(server, "unbatched", bytes(4), shape=[2**40], parameters={"binary_data_size": 2**42})
    assert answer.status == 400
    assert peak_bytes(server) - before <= 16 << 20


def test_client_data_in_an_error_is_cut(server: RunningServer) -> None:
    for changes in ({"name": "x" * 1_000_000}, {"shape": [1] * 100_000}):
        answer = infer(server, "ident", ident(**changes))
        assert answer.status == 400
        assert len(answer.body) <= 4096


def test_empty_tensors_nan_infinity_and_nul_bytes_pass_both_ways(server: RunningServer) -> None:
    empty = infer(server, "unbatched", ident(shape=[0], data=[]))
    assert empty.json["outputs"] == [{"name": "OUT", "datatype": "FP32", "shape": [0], "data": []}]
    numbers = json.dumps(ident(shape=[3], data=[0, 0, 0])).replace("[0, 0, 0]", "[NaN, Infinity, -Infinity]")
    assert b'"data":[NaN,Infinity,-Infinity]' in infer(server, "unbatched", numbers).body
    texts = infer(server, "text", ident(shape=[1, 2], datatype="BYTES", data=["a\0b", ""]))
    assert b'"data":["a\\u0000b",""]' in texts.body


def test_right_requests_still_get_right_answers(server: RunningServer) -> None:
    values = np.arange(16, dtype=np.float32)
    answer = infer(server, "ident", ident(data=values.tolist()))
    assert answer.json == {
        "model_name": "ident",
        "model_version": "1",
        "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [1, 16], "data": values.tolist()}],
    }
