"""Paths, methods, and the control routes."""

import asyncio
import base64
import json
from typing import Any

import pytest

from halimede.frontends.http.routes import Action, Route, resolve

GET, POST, BOTH = (b"GET",), (b"POST",), (b"GET", b"POST")

KNOWN = {
    "/v2": Route(Action.SERVER_METADATA, GET),
    "/v2?x=/models": Route(Action.SERVER_METADATA, GET),
    "http://host:8000/v2": Route(Action.SERVER_METADATA, GET),
    "/v2/health/live": Route(Action.SERVER_LIVE, GET),
    "/v2/health/ready": Route(Action.SERVER_READY, GET),
    "/v2/models/m": Route(Action.MODEL_METADATA, GET, "m"),
    "/v2/models/a%20b%2Fc": Route(Action.MODEL_METADATA, GET, "a b/c"),
    "/v2/models/caf%C3%A9%00x": Route(Action.MODEL_METADATA, GET, "café\0x"),
    "/v2/models/m/versions/007": Route(Action.MODEL_METADATA, GET, "m", "7"),
    "/v2/models/m/versions/0": Route(Action.MODEL_METADATA, GET, "m", "0"),
    "/v2/models/m/ready": Route(Action.MODEL_READY, GET, "m"),
    "/v2/models/m/versions/2/ready": Route(Action.MODEL_READY, GET, "m", "2"),
    "/v2/models/m/config": Route(Action.MODEL_CONFIG, GET, "m"),
    "/v2/models/m/versions/2/config": Route(Action.MODEL_CONFIG, GET, "m", "2"),
    "/v2/models/m/stats": Route(Action.MODEL_STATISTICS, GET, "m"),
    "/v2/models/m/versions/2/stats": Route(Action.MODEL_STATISTICS, GET, "m", "2"),
    "/v2/models/stats": Route(Action.MODEL_STATISTICS, GET),
    "/v2/models/m/infer": Route(Action.INFER, POST, "m"),
    "/v2/models/versions/versions/3/infer": Route(Action.INFER, POST, "versions", "3"),
    "/v2/repository/index": Route(Action.REPOSITORY_INDEX, POST),
    "/v2/repository/r/index": Route(Action.REPOSITORY_INDEX, POST, repository="r"),
    "/v2/repository/models/index": Route(Action.REPOSITORY_INDEX, POST, repository="models"),
    "/v2/repository/models/m/load": Route(Action.MODEL_LOAD, POST, "m"),
    "/v2/repository/models/m/unload": Route(Action.MODEL_UNLOAD, POST, "m"),
    "/v2/repository/r/models/m/load": Route(Action.MODEL_LOAD, POST, "m", repository="r"),
    "/v2/models/m/generate": Route(Action.GENERATE, POST, "m"),
    "/v2/models/m/versions/1/generate_stream": Route(Action.GENERATE_STREAM, POST, "m", "1"),
    "/v2/halimede/devices": Route(Action.DEVICES, GET),
    "/v2/logging": Route(Action.LOGGING, BOTH),
    "/v2/trace/setting": Route(Action.TRACE, BOTH),
    "/v2/models/m/trace/setting": Route(Action.TRACE, BOTH, "m"),
    "/v2/systemsharedmemory/status": Route(Action.SYSTEM_SHARED_MEMORY, GET, verb="status"),
    "/v2/cudasharedmemory/region/r/register": Route(Action.CUDA_SHARED_MEMORY, POST, region="r", verb="register"),
}


@pytest.mark.parametrize("target", KNOWN)
def test_a_path_has_a_route(target: str) -> None:
    assert resolve(target.encode()) == KNOWN[target]


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "*",
        "/v2/",
        "/v3",
        "//v2",
        "/metrics",
        "/v2/health",
        "/v2/health/live/",
        "/v2/models",
        "/v2/models/",
        "/v2/models//infer",
        "/v2/models/m/",
        "/v2/models/m/infer/",
        "/v2/models/m/nope",
        "/v2/halimede",
        "/v2/halimede/devices/0",
        "/v2/models/m/versions",
        "/v2/models/m/versions/",
        "/v2/models/m/versions/x",
        "/v2/models/m/versions/-1/infer",
        "/v2/models/m/versions/1.0/infer",
        "/v2/models/m/versions/%31/infer",
        "/v2/models/m/versions/1/nope",
        "/v2/models/m/versions/1/trace/setting",
        "/v2/repository",
        "/v2/repository//index",
        "/v2/repository/models//load",
        "/v2/repository/models/m",
        "/v2/systemsharedmemory",
        "/v2/systemsharedmemory/region//status",
        "example.com:80",
    ],
)
def test_a_path_has_no_route(target: str) -> None:
    assert resolve(target.encode()) is None


def test_a_long_path_has_the_same_route() -> None:
    name = "m" * 5000
    assert resolve(f"/v2/models/{name}/infer".encode()) == Route(Action.INFER, POST, name)


def answer(running: Any, method: str, path: str, body: bytes | None = None) -> tuple[int, str, Any]:
    """Status, content type, and the body as JSON, None when empty."""
    got = running.ask(method, path, body)
    return got.status, got.headers.get("content-type", ""), json.loads(got.body) if got.body else None


JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


def test_unknown_paths_and_wrong_methods(http: Any) -> None:
    for path in ("/", "/docs", "/v2/", "/v2/models", "/metrics"):
        status, media, body = answer(http, "GET", path)
        assert (status, media, list(body)) == (404, JSON, ["error"])
        assert body["error"].startswith("Not Found: paths begin with /v2, such as GET /v2/health/ready")
        assert "docs/pages/quickstart.md" in body["error"]
    for method, path, allow in [
        ("GET", "/v2/models/echo/infer", "GET"),
        ("POST", "/v2", "POST"),
        ("DELETE", "/v2/health/live", "DELETE"),
        ("GET", "/v2/repository/index", "GET"),
    ]:
        got = http.ask(method, path)
        assert (got.status, json.loads(got.body)) == (405, {"error": "Method Not Allowed"})
        assert got.headers["allow"] != allow
    assert http.ask("PUT", "/v2/logging").headers["allow"] == "GET, POST"


def test_health(http: Any) -> None:
    assert answer(http, "GET", "/v2/health/live") == (200, TEXT, None)
    assert answer(http, "GET", "/v2/health/ready") == (200, TEXT, None)
    http.core.ready = False
    assert answer(http, "GET", "/v2/health/ready") == (400, TEXT, None)
    http.core.draining = True
    assert answer(http, "GET", "/v2/health/ready") == (503, JSON, {"error": "Server exiting"})
    assert answer(http, "GET", "/v2/health/live") == (200, TEXT, None)


def test_model_readiness(http: Any) -> None:
    assert answer(http, "GET", "/v2/models/echo/ready") == (200, TEXT, None)
    assert answer(http, "GET", "/v2/models/asleep/ready") == (400, JSON, {"error": "Model version not ready"})
    unknown = {"error": "Request for unknown model: 'nope' is not found"}
    assert answer(http, "GET", "/v2/models/nope/ready") == (404, JSON, unknown)


def test_metadata_config_and_statistics(http: Any) -> None:
    assert answer(http, "GET", "/v2") == (
        200,
        JSON,
        {"name": "triton", "version": "1.0", "extensions": ["statistics"]},
    )
    for path in ("/v2/models/echo", "/v2/models/echo/versions/1"):
        status, kind, metadata = answer(http, "GET", path)
        assert (status, kind, metadata["name"], metadata["versions"]) == (200, JSON, "echo", ["1"])
    status, kind, config = answer(http, "GET", "/v2/models/echo/config")
    assert (status, kind, config["name"], config["input"][0]["data_type"]) == (200, JSON, "echo", "TYPE_FP32")
    for path in ("/v2/models/stats", "/v2/models/echo/stats", "/v2/models/echo/versions/1/stats"):
        status, kind, statistics = answer(http, "GET", path)
        assert (status, kind, [row["name"] for row in statistics["model_stats"]]) == (200, JSON, ["echo"])


def test_errors_of_the_server_keep_their_numbers(http: Any) -> None:
    for path, status, text in [
        ("/v2/models/nope", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/echo/versions/9", 404, "Request for unknown model: 'echo' version 9 is not found"),
        ("/v2/models/nope/config", 404, "Request for unknown model: 'nope' is not found"),
        ("/v2/models/asleep", 503, "Request for unknown model: 'asleep' version 1 is not at ready state"),
        ("/v2/models/nope/stats", 400, "requested model 'nope' is not available"),
    ]:
        assert answer(http, "GET", path) == (status, JSON, {"error": text})


def test_a_model_that_is_loading_gets_503_with_retry_after(http: Any) -> None:
    for path in ("/v2/models/asleep", "/v2/models/asleep/config"):
        answered = http.ask("GET", path)
        assert (answered.status, answered.headers.get("retry-after")) == (503, "1")


def test_errors_of_unsupported_extensions_have_their_names(http: Any) -> None:
    for method, path, extension in [
        ("GET", "/v2/trace/setting", "trace"),
        ("POST", "/v2/logging", "logging"),
        ("POST", "/v2/systemsharedmemory/region/r/register", "system_shared_memory"),
        ("POST", "/v2/cudasharedmemory/region/r/register", "cuda_shared_memory"),
    ]:
        text = f"the '{extension}' extension is not available in this server"
        assert answer(http, method, path, b"{}") == (501, JSON, {"error": text})


def test_shared_memory_lists_are_empty_and_unregister_succeeds(http: Any) -> None:
    for kind in ("system", "cuda"):
        path = f"/v2/{kind}sharedmemory"
        assert answer(http, "GET", f"{path}/status") == (200, JSON, [])
        error = {"error": f"Unable to find {kind} shared memory region: 'r s'"}
        assert answer(http, "GET", f"{path}/region/r%20s/status") == (404, JSON, error)
        assert answer(http, "POST", f"{path}/unregister", b"") == (200, TEXT, None)
        assert answer(http, "POST", f"{path}/region/r/unregister", b"") == (200, TEXT, None)


def test_the_repository_index(http: Any) -> None:
    expected = [{"name": "echo", "version": "1", "state": "READY"}]
    assert answer(http, "POST", "/v2/repository/index") == (200, JSON, expected)
    assert answer(http, "POST", "/v2/repository/any/index", b'{"ready":true}') == (200, JSON, expected)
    assert http.core.calls == [("index", False), ("index", True)]
    status, _, error = answer(http, "POST", "/v2/repository/index", b'{"ready":"x"}')
    assert (status, error) == (400, {"error": "Invalid value for 'ready': expected a boolean"})


def test_load_and_unload(http: Any) -> None:
    assert answer(http, "POST", "/v2/repository/models/echo/load", b"") == (200, TEXT, None)
    assert answer(http, "POST", "/v2/repository/models/echo/load", b'{"parameters":{"config":"{}"}}')[0] == 200
    assert answer(http, "POST", "/v2/repository/models/echo/unload", b"") == (200, TEXT, None)
    body = b'{"parameters":{"unload_dependents":true}}'
    assert answer(http, "POST", "/v2/repository/models/echo/unload", body) == (200, TEXT, None)
    assert http.core.calls == [
        ("load", "echo", {}),
        ("load", "echo", {"config": "{}"}),
        ("unload", "echo", False),
        ("unload", "echo", True),
    ]


def test_a_load_that_fails(http: Any) -> None:
    text = "failed to load 'nope', failed to poll from model repository"
    assert answer(http, "POST", "/v2/repository/models/nope/load") == (500, JSON, {"error": text})
    assert answer(http, "POST", "/v2/repository/models/echo/load", b"{")[0] in {400, 500}
    text = "'repository_name' specification is not supported"
    assert answer(http, "POST", "/v2/repository/r/models/echo/load") == (501, JSON, {"error": text})
    assert answer(http, "POST", "/v2/repository/r/models/echo/unload") == (501, JSON, {"error": text})
    status, _, error = answer(http, "POST", "/v2/repository/models/bug/load")
    assert (status, "secret" in str(error)) == (500, False)
    assert len(http.log) == 1
    assert "RuntimeError: a bug with a secret" in http.log[0]


def test_a_load_with_a_file(http: Any) -> None:
    content = bytes(40_000)
    body = json.dumps({"parameters": {"config": "{}", "file:1/model.onnx": base64.b64encode(content).decode()}})
    assert answer(http, "POST", "/v2/repository/models/echo/load", body.encode())[0] == 200
    assert http.core.calls == [("load", "echo", {"config": "{}", "file:1/model.onnx": content})]


@pytest.mark.parametrize("call", ["index", "models/echo/load", "models/echo/unload"])
def test_a_large_control_request_is_refused_unread(http: Any, call: str) -> None:
    http.listener.max_body = 2 << 20
    body = b'{"parameters":[' + b"[]," * 30_000 + b"[]]}"
    status, _, error = answer(http, "POST", f"/v2/repository/{call}", body)
    assert status == 400
    assert f"the request has {len(body)} bytes, at most 65536 are taken" in error["error"]
    assert http.core.calls == []


def test_a_slow_load_does_not_delay_other_calls(http: Any) -> None:
    http.core.load_gate = http.call(asyncio.Event)
    with http.connect() as loading:
        loading.sendall(b"POST /v2/repository/models/echo/load HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        http.wait_until(lambda: len(http.core.calls) == 1)
        assert answer(http, "GET", "/v2/health/live")[0] == 200
        http.call(http.core.load_gate.set)
        assert loading.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
