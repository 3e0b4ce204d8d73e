"""Pages of other sites: what a browser may show them, and which calls they may make."""

import json
from typing import Any

import pytest

from halimede.core.types import ApiCategory, Secret
from halimede.frontends.http.server import HttpServer

APP = "https://app.example"
OTHER = "https://other.example"
INFER = "/v2/models/echo/infer"
LOAD = "/v2/repository/models/echo/load"
BODY = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[1]}],"outputs":[{"name":"OUT"}]}'
EXPOSED = "Inference-Header-Content-Length"


@pytest.fixture
def cors(serve: Any) -> Any:
    """Starts a server that allows some sites."""

    def start(*origins: str, **more: Any) -> Any:
        return serve(
            make=lambda core, log: HttpServer(
                core, max_input_size=1 << 20, log=log.append, cors_origins=origins, **more
            )
        )

    return start


def allowed(answer: Any) -> dict[str, str]:
    """The header fields of an answer that browsers read, without the prefix that they share."""
    prefix = "access-control-"
    return {name.removeprefix(prefix): value for name, value in answer.headers.items() if name.startswith(prefix)}


def ask(http: Any, method: str, path: str, origin: str, **headers: str) -> Any:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.ask(method, path, BODY if method == "POST" and path == INFER else None, {"Origin": origin, **sent})


def preflight(http: Any, path: str, origin: str, method: str = "POST") -> Any:
    return ask(
        http,
        *("OPTIONS", path, origin),
        Access_Control_Request_Method=method,
        Access_Control_Request_Headers="content-type,inference-header-content-length",
    )


def test_a_page_of_a_named_site_may_read_every_answer(cors: Any) -> None:
    http = cors(APP, "http://localhost:3000")
    for method, path, status in (("POST", INFER, 200), ("GET", "/v2", 200), ("GET", "/", 404), ("POST", LOAD, 200)):
        answer = ask(http, method, path, APP)
        assert (answer.status, answer.headers["vary"]) == (status, "Origin")
        assert allowed(answer) == {"allow-origin": APP, "expose-headers": EXPOSED}


def test_a_page_may_read_why_its_body_is_refused(cors: Any) -> None:
    with cors(APP).connect() as connection:
        connection.sendall(
            f"POST {INFER} HTTP/1.1\r\nHost: x\r\nOrigin: {APP}\r\nContent-Length: 9999999\r\n\r\n".encode()
        )
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert f"\r\nAccess-Control-Allow-Origin: {APP}\r\n".encode() in answer
    assert b"Use --http-max-input-size" in answer


def test_events_may_be_read_too(cors: Any) -> None:
    http = cors(APP)
    answer = http.ask("POST", "/v2/models/echo/generate_stream", b'{"IN":1}', {"Origin": APP})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert allowed(answer)["allow-origin"] == APP


def test_only_the_exact_origin_is_allowed(cors: Any) -> None:
    http = cors(APP)
    for origin in (OTHER, "http://app.example", f"{APP}:8443", f"{APP}.evil.example", "null"):
        answer = ask(http, "POST", INFER, origin)
        assert (answer.status, allowed(answer), answer.headers["vary"]) == (200, {}, "Origin")
        assert preflight(http, INFER, origin).status == 405
    assert allowed(http.ask("GET", "/v2")) == {}


def test_a_browser_is_told_what_a_page_may_send(cors: Any) -> None:
    http = cors(APP)
    for path, methods in ((INFER, "POST"), (LOAD, "POST"), ("/v2/logging", "GET, POST")):
        answer = preflight(http, path, APP)
        assert (answer.status, answer.body) == (200, b"")
        assert allowed(answer) == {
            "allow-origin": APP,
            "allow-methods": methods,
            "allow-headers": "content-type,inference-header-content-length",
            "expose-headers": EXPOSED,
            "max-age": "600",
        }
    assert http.core.requests == http.core.calls == []
    assert preflight(http, "/v2/nothing", APP).status == 404


def test_a_secret_is_not_asked_of_the_browser_but_of_the_call(cors: Any) -> None:
    http = cors(APP, restricted={ApiCategory.INFERENCE: Secret("x-key", "sesame")})
    assert preflight(http, INFER, APP).status == 200
    assert preflight(http, INFER, OTHER).status == 403
    assert ask(http, "POST", INFER, APP).status == 403
    assert ask(http, "POST", INFER, APP, x_key="sesame").status == 200


def test_any_site_may_infer_but_not_control(cors: Any) -> None:
    http = cors("*", APP)
    answer = ask(http, "POST", INFER, OTHER)
    assert (answer.status, allowed(answer)) == (200, {"allow-origin": "*", "expose-headers": EXPOSED})
    assert preflight(http, INFER, OTHER).status == 200
    assert preflight(http, LOAD, OTHER).status == 405
    assert ask(http, "POST", LOAD, OTHER).status == 403
    assert http.core.calls == []
    assert ask(http, "POST", LOAD, APP).status == 200


def test_a_page_of_another_site_may_not_control_a_server_without_the_flag(http: Any) -> None:
    for path in (LOAD, "/v2/repository/index", "/v2/logging", "/v2/systemsharedmemory/region/r/register"):
        for origin in (OTHER, "null"):
            answer = ask(http, "POST", path, origin)
            assert answer.status == 403
            assert json.loads(answer.body)["error"] == (
                f"a page of '{origin}' may not make this call; --http-cors-origin names the sites that may"
            )
            assert allowed(answer) == {}
    assert http.core.calls == []
    # What only reads is answered, and the browser withholds the answer from the page.
    answer = ask(http, "POST", INFER, OTHER)
    assert (answer.status, allowed(answer), "vary" in answer.headers) == (200, {}, False)
    assert preflight(http, INFER, OTHER).status == 405


def test_pages_that_the_server_or_its_proxy_has_delivered_may_control_it(http: Any) -> None:
    assert ask(http, "POST", LOAD, "https://Models.example", Host="models.example").status == 200
    assert ask(http, "POST", LOAD, OTHER, Sec_Fetch_Site="same-origin").status == 200
    assert ask(http, "POST", LOAD, OTHER, Sec_Fetch_Site="same-site").status == 403
    assert http.ask("POST", LOAD).status == 200
