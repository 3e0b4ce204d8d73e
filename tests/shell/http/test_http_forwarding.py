"""Headers that become request parameters."""

import json
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from halimede.core.types import ApiCategory, Restrictions, Secret
from halimede.core.wire.forwarding import compile_pattern
from halimede.frontends.http.server import HttpServer

BODY = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[1]}]%b}'
PLAIN = BODY % b""


def forwarding(serve: Any, pattern: str, restricted: Restrictions = MappingProxyType({})) -> Any:
    compiled = compile_pattern(pattern)
    return serve(
        make=lambda core, log: HttpServer(
            core, max_input_size=1 << 20, log=log.append, restricted=restricted, forward=compiled
        )
    )


def infer(running: Any, headers: dict[str, str], body: bytes = PLAIN, model: str = "echo") -> Any:
    return running.ask("POST", f"/v2/models/{model}/infer", body, headers)


def test_matching_headers_become_parameters_under_the_name_as_sent(serve: Any) -> None:
    running = forwarding(serve, "x-.*|tenant")
    assert infer(running, {"X-Request-Id": "7", "TENANT": "a b", "Other": "1", "prefix-x-1": "2"}).status == 200
    assert running.core.requests[0].parameters == {"X-Request-Id": "7", "TENANT": "a b"}


def test_headers_with_secrets_are_not_forwarded_by_a_wildcard(serve: Any) -> None:
    restricted = {ApiCategory.INFERENCE: Secret("infer-key", "open sesame")}
    headers = {"Infer-Key": "open sesame", "Authorization": "Bearer token", "x-a": "1"}
    running = forwarding(serve, ".*", restricted)
    assert infer(running, headers).status == 200
    found = running.core.requests[0].parameters
    assert (found["x-a"], "Infer-Key" in found, "Authorization" in found) == ("1", False, False)
    running = forwarding(serve, "authorization|INFER-KEY", restricted)
    generated = running.ask("POST", "/v2/models/echo/generate", b'{"IN":1}', headers)
    assert (generated.status, infer(running, headers).status) == (200, 200)
    for request in running.core.requests:
        assert request.parameters == {"Infer-Key": "open sesame", "Authorization": "Bearer token"}


def test_nothing_is_forwarded_without_a_pattern(http: Any) -> None:
    assert infer(http, {"X-Request-Id": "7", "priority": "1"}).status == 200
    assert (http.core.requests[0].parameters, http.core.requests[0].form.priority) == ({}, 0)


def test_parameters_of_the_body_go_before_headers(serve: Any) -> None:
    running = forwarding(serve, "x-.*")
    assert infer(running, {"x-a": "header", "x-b": "header"}, BODY % b',"parameters":{"x-a":1}').status == 200
    assert running.core.requests[0].parameters == {"x-a": 1, "x-b": "header"}


@pytest.mark.parametrize("name", ["priority", "Sequence_Id", "TIMEOUT", "headers", "triton_x", "Triton_enable"])
def test_a_header_with_the_name_of_a_reserved_parameter_is_refused(serve: Any, name: str) -> None:
    running = forwarding(serve, ".*")
    answer = infer(running, {name: "1"}, b"not even JSON")
    assert (answer.status, json.loads(answer.body)) == (
        400,
        {"error": f"Header '{name}' is reserved for Triton usage and cannot be forwarded."},
    )
    assert running.core.requests == []
    assert infer(running, {name: "1"}, model="none").status == 404


def test_values_are_text_whatever_their_bytes_are(serve: Any) -> None:
    running = forwarding(serve, "x-.*")
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nConnection: close\r\n" % len(PLAIN)
    values = "x-utf8: caf\u00e9 \u2713\r\n".encode() + b"x-latin: caf\xe9\r\nx-empty:\r\nx-spaces:  a  b \r\n"
    assert running.exchange(head + values + b"\r\n" + PLAIN).startswith(b"HTTP/1.1 200 ")
    assert running.core.requests[0].parameters == {
        "x-utf8": "caf\u00e9 \u2713",
        "x-latin": "caf\u00e9",
        "x-empty": "",
        "x-spaces": "a  b",
    }


def test_equal_requests_do_not_share_their_parameters(serve: Any) -> None:
    running = forwarding(serve, "x-.*")
    for number in range(3):
        assert infer(running, {"x-a": "1"}).status == 200
        assert running.core.requests[number].parameters == {"x-a": "1"}
        running.core.requests[number].parameters["left by a model"] = True


def test_binary_raw_and_compressed_requests_have_them_too(serve: Any) -> None:
    running = forwarding(serve, "x-.*")
    tensor = {"name": "IN", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}
    head = json.dumps({"inputs": [tensor]}).encode()
    data = np.float32(1).tobytes()
    for _ in range(2):  # The second time the JSON part is known.
        infer(running, {"x-a": "1", "Inference-Header-Content-Length": str(len(head))}, head + data)
    infer(running, {"x-a": "1", "Inference-Header-Content-Length": "0"}, data)
    many = json.dumps({"inputs": [{"name": "IN", "shape": [50_000], "datatype": "FP32", "data": [0.5] * 50_000}]})
    infer(running, {"x-a": "1"}, many.encode())
    assert [request.parameters for request in running.core.requests] == [{"x-a": "1"}] * 4
