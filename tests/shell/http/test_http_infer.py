"""Inference over sockets: the order of the errors, codings, large requests, disconnected clients."""

import gzip
import json
import socket
import struct
import zlib
from typing import Any

import numpy as np
import pytest
import tritonclient.http as tritonhttp
from tritonclient.utils import InferenceServerException

from halimede.core.types import ErrorCode, InferenceError
from halimede.frontends.http.compression import choose_coding, decompress_steps
from support.calls import DECOUPLED_OVER_HTTP

LIMIT = 1 << 20


def body(*values: float, **changes: Any) -> bytes:
    return json.dumps(
        {"inputs": [{"name": "IN", "shape": [len(values)], "datatype": "FP32", "data": list(values)}], **changes}
    ).encode()


def infer(running: Any, model: str, content: bytes, headers: dict[str, str] | None = None) -> Any:
    return running.ask("POST", f"/v2/models/{model}/infer", content, headers)


def error(running: Any, model: str, content: bytes, headers: dict[str, str] | None = None) -> tuple[int, str]:
    answer = infer(running, model, content, headers)
    return answer.status, json.loads(answer.body)["error"]


ECHO = {
    "model_name": "echo",
    "model_version": "1",
    "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [2], "data": [1.0, 2.5]}],
}


def test_json_in_and_json_out(http: Any) -> None:
    answer = infer(http, "echo", body(1, 2.5))
    assert (answer.status, answer.headers["content-type"], json.loads(answer.body)) == (200, "application/json", ECHO)
    assert "inference-header-content-length" not in answer.headers


def test_the_clients_of_triton_send_binary_tensors(http: Any) -> None:
    for size in (4, 300_000 // 4):
        values = np.arange(size, dtype=np.float32)
        client = tritonhttp.InferenceServerClient(f"127.0.0.1:{http.port}")
        tensor = tritonhttp.InferInput("IN", [size], "FP32")
        tensor.set_data_from_numpy(values)
        result = client.infer("echo", [tensor], request_id="7", model_version="1")
        np.testing.assert_array_equal(result.as_numpy("OUT"), values)
        assert result.get_response()["id"] == "7"
        client.close()


@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_coding", [None, "gzip", "deflate"])
def test_the_clients_of_triton_may_compress(http: Any, request_coding: str | None, response_coding: str | None) -> None:
    values = np.zeros(100_000, dtype=np.float32)
    client = tritonhttp.InferenceServerClient(f"127.0.0.1:{http.port}")
    tensor = tritonhttp.InferInput("IN", [100_000], "FP32")
    tensor.set_data_from_numpy(values)
    result = client.infer(
        "echo",
        [tensor],
        request_compression_algorithm=request_coding,
        response_compression_algorithm=response_coding,
    )
    np.testing.assert_array_equal(result.as_numpy("OUT"), values)
    client.close()


def test_the_clients_of_triton_see_errors(http: Any) -> None:
    client = tritonhttp.InferenceServerClient(f"127.0.0.1:{http.port}")
    tensor = tritonhttp.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, np.float32))
    with pytest.raises(InferenceServerException) as raised:
        client.infer("full", [tensor])
    assert (raised.value.status(), raised.value.message()) == ("503", "Exceeds maximum queue size")
    client.close()


def test_the_model_is_checked_before_the_body(http: Any) -> None:
    garbage = {"Content-Encoding": "br", "Inference-Header-Content-Length": "x"}
    assert error(http, "nope", b"{", garbage) == (404, "Request for unknown model: 'nope' is not found")
    assert error(http, "echo/versions/9", b"{", garbage) == (
        404,
        "Request for unknown model: 'echo' version 9 is not found",
    )
    assert error(http, "stream", b"{", garbage) == (
        501,
        DECOUPLED_OVER_HTTP,
    )
    assert error(http, "echo", b"{", garbage) == (501, "Unsupported compression type")
    assert error(http, "echo", b"{", {"Inference-Header-Content-Length": "9"}) == (
        400,
        "inference header size should be in range (0, 1), got: 9",
    )
    assert error(http, "echo", b"{}") == (
        400,
        "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'",
    )


def test_only_503_has_retry_after(http: Any) -> None:
    for model, status, after in [("full", 503, "1"), ("asleep", 503, "1"), ("broken", 500, None), ("nope", 404, None)]:
        answer = infer(http, model, body(1))
        assert (answer.status, answer.headers.get("retry-after")) == (status, after)


def test_an_unexpected_exception_is_a_500_and_a_line_of_the_log(http: Any) -> None:
    status, text = error(http, "bug", body(1))
    assert (status, "secret" in text) == (500, False)
    assert len(http.log) == 1
    assert "POST /v2/models/bug/infer" in http.log[0]
    assert "RuntimeError: a bug with a secret" in http.log[0]


def test_more_than_one_response_is_an_error(http: Any) -> None:
    assert error(http, "chatty", body(1)) == (500, "expected a single response, got 2")
    # Acknowledged anyway: otherwise the model would wait and never send its final answer.
    assert len(http.core.acknowledged) == 1


def large_json(count: int) -> tuple[bytes, list[float]]:
    values = [float(n) for n in range(count)]
    return body(*values), values


def test_large_json_is_read_and_written_in_steps(http: Any) -> None:
    content, values = large_json(50_000)
    assert len(content) > 300_000
    answer = infer(http, "echo", content)
    assert (answer.status, json.loads(answer.body)["outputs"][0]["data"]) == (200, values)


def test_large_invalid_json_is_refused(http: Any) -> None:
    content, _ = large_json(50_000)
    assert error(http, "echo", content[:-3] + b"]]]")[0] == 400
    assert error(http, "echo", content.replace(b"40000.0", b'"4"'))[0] == 400
    assert infer(http, "echo", body(1)).status == 200


def test_concurrent_large_requests_each_get_their_own_answer(http: Any) -> None:
    connections = [http.connect() for _ in range(4)]
    contents = [large_json(20_000 + n)[0] for n in range(4)]
    for connection, content in zip(connections, contents, strict=True):
        connection.sendall(
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (len(content), content)
        )
    for n, connection in enumerate(connections):
        with connection, connection.makefile("rb") as reader:
            answer = json.loads(reader.read().partition(b"\r\n\r\n")[2])
            assert answer["outputs"][0]["shape"] == [20_000 + n]


def packed(coding: str, content: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, {"gzip": 31, "zlib": 15, "raw": -15}[coding])
    return packer.compress(content) + packer.flush()


@pytest.mark.parametrize(("coding", "header"), [("gzip", "gzip"), ("zlib", "deflate"), ("raw", "Deflate")])
def test_a_compressed_request(http: Any, coding: str, header: str) -> None:
    answer = infer(http, "echo", packed(coding, body(1, 2.5)), {"Content-Encoding": header})
    assert (answer.status, json.loads(answer.body)) == (200, ECHO)


def test_the_header_length_counts_the_decompressed_body(http: Any) -> None:
    tensor = {"name": "IN", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [tensor]}).encode()
    content = packed("gzip", head + struct.pack("<2f", 1, 2.5))
    headers = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": str(len(head))}
    answer = infer(http, "echo", content, headers)
    assert (answer.status, json.loads(answer.body)) == (200, ECHO)


def test_identity_is_a_coding_and_gzip_may_have_members(http: Any) -> None:
    for none in ("identity", ""):
        assert infer(http, "echo", body(1, 2.5), {"Content-Encoding": none}).status == 200
    content = body(1, 2.5)
    members = packed("gzip", content[:20]) + packed("gzip", content[20:])
    assert json.loads(infer(http, "echo", members, {"Content-Encoding": "gzip"}).body) == ECHO


def test_gzip_members_are_counted() -> None:
    empty = gzip.compress(b"")
    for _ in decompress_steps(empty * 65_536, "gzip", LIMIT):
        pass
    with pytest.raises(InferenceError) as raised:
        for _ in decompress_steps(empty * 65_537, "gzip", LIMIT):
            pass
    assert raised.value == InferenceError(
        ErrorCode.INVALID_ARG, "the request body has more than 65536 gzip members. Send fewer or larger ones."
    )


GZIPPED = gzip.compress(b"x" * 100, mtime=0)


@pytest.mark.parametrize(
    ("content", "coding", "reason"),
    [
        (b"garbage", "gzip", "incorrect header check"),
        (b"garbage!", "deflate", "invalid"),
        (b"", "gzip", "it ends before its data does"),
        (GZIPPED[:-9], "gzip", "it ends before its data does"),
        (zlib.compress(b"x" * 100)[:-1], "deflate", "it ends before its data does"),
        (GZIPPED + b"junk", "gzip", "incorrect header check"),
        (zlib.compress(b"x" * 100) + b"junk", "deflate", "4 bytes follow its end"),
        (GZIPPED[:-8] + bytes(8), "gzip", "incorrect data check"),
    ],
)
def test_a_broken_compressed_body(http: Any, content: bytes, coding: str, reason: str) -> None:
    status, text = error(http, "echo", content, {"Content-Encoding": coding})
    assert (status, text.startswith(f"the request body is not valid {coding} data: "), reason in text) == (
        400,
        True,
        True,
    ), text


def test_the_error_for_an_unknown_coding_has_the_known_ones(http: Any) -> None:
    answer = infer(http, "echo", b"x", {"Content-Encoding": "gzip, br"})
    assert (answer.status, json.loads(answer.body)) == (501, {"error": "Unsupported compression type"})
    assert answer.headers["accept-encoding"] == "gzip, deflate"


def test_a_bomb_stops_at_the_limit(http: Any) -> None:
    text = (
        f"Decompressed data size exceeds the maximum allowed value of {LIMIT} bytes. "
        "Use --http-max-input-size to increase the limit."
    )
    tensor = {"name": "IN", "shape": [250_000], "datatype": "FP32", "parameters": {"binary_data_size": 1_000_000}}
    just_right = json.dumps({"inputs": [tensor]}).encode().ljust(LIMIT - 1_000_000) + bytes(1_000_000)
    headers = {"Inference-Header-Content-Length": str(LIMIT - 1_000_000)}
    for coding, header in [("gzip", "gzip"), ("raw", "deflate")]:
        bomb = packed(coding, bytes(100 << 20))
        assert error(http, "echo", bomb, {"Content-Encoding": header}) == (400, text)
        assert error(http, "echo", packed(coding, bytes(LIMIT + 1)), {"Content-Encoding": header}) == (400, text)
        assert infer(http, "echo", packed(coding, just_right), headers | {"Content-Encoding": header}).status == 200


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("deflate, gzip", "gzip"),
        ("gzip;q=0.5, deflate;q=0.8", "deflate"),
        ("GZIP ; Q=1.0", "gzip"),
        ("gzip;q=0", "identity"),
        ("gzip;q=0.5, identity", "identity"),
        ("identity;q=0.5, gzip;q=0.5", "gzip"),
        ("br, *", "identity"),
        ("gzip;q=x", "identity"),
        ("gzip;q=7", "identity"),
        ("gzip;q=nan", "identity"),
        ("", "identity"),
        (";;,,=", "identity"),
    ],
)
def test_the_coding_of_the_answer(accepted: str, coding: str) -> None:
    assert choose_coding(accepted.encode()) == coding


def test_an_answer_is_compressed_on_request_if_it_gets_smaller(http: Any) -> None:
    zeros = body(*([0.0] * 1000))
    plain = infer(http, "echo", zeros)
    assert "content-encoding" not in plain.headers
    for coding, unpack in [("gzip", gzip.decompress), ("deflate", zlib.decompress)]:
        answer = infer(http, "echo", zeros, {"Accept-Encoding": coding})
        assert (answer.headers["content-encoding"], unpack(answer.body)) == (coding, plain.body)
        assert len(answer.body) < len(plain.body)

    noise = np.random.default_rng(0).bytes(8)
    tensor = {"name": "IN", "shape": [2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Accept-Encoding": "gzip"}
    answer = infer(http, "echo", head + noise, headers)
    length = int(answer.headers["inference-header-content-length"])
    content = gzip.decompress(answer.body) if "content-encoding" in answer.headers else answer.body
    assert (answer.headers["content-type"], content[length:]) == ("application/octet-stream", noise)
    assert len(answer.body) <= length + 8


def test_an_answer_that_cannot_be_written_is_an_error(http: Any) -> None:
    tensor = {"name": "IN", "shape": [1], "datatype": "FP16", "parameters": {"binary_data_size": 2}}
    head = json.dumps({"inputs": [tensor]}).encode()
    status, text = error(http, "half", head + b"\0\0", {"Inference-Header-Content-Length": str(len(head))})
    assert (status, text[:35]) == (400, "sending FP16 data via JSON is not s")


HELD = b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body(1)), body(1))


def test_answers_of_one_connection_arrive_in_order(http: Any) -> None:
    with http.connect() as connection, connection.makefile("rb") as reader:
        connection.sendall(HELD + b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        http.wait_until(lambda: len(http.core.held) == 1)
        http.call(http.core.release)
        answers = reader.read()
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert answers.index(b'"model_name":"held"') < answers.index(b"text/plain")


@pytest.mark.parametrize("how", ["close", "shutdown", "reset"])
def test_a_client_that_disconnects_cancels_its_request(http: Any, how: str) -> None:
    connection = http.connect()
    connection.sendall(HELD)
    http.wait_until(lambda: len(http.core.held) == 1)
    if how == "shutdown":
        connection.shutdown(socket.SHUT_WR)
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how != "shutdown":
        connection.close()
    http.wait_until(lambda: http.core.cancelled == [1])
    connection.close()
    assert infer(http, "echo", body(1)).status == 200
    assert http.log == []


def test_a_client_that_disconnects_stops_the_steps_of_its_request(http: Any) -> None:
    content, _ = large_json(60_000)
    for _ in range(3):
        with http.connect() as connection:
            connection.sendall(
                b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
                % (len(content), content)
            )
    assert infer(http, "echo", body(1)).status == 200
    assert http.log == []
    assert http.core.cancelled == []
