"""Restricted APIs: every path of the router, in every form, requires the secret of its category and no other."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from halimede.core.types import ApiCategory, Secret
from halimede.frontends.http.routes import Action, resolve
from halimede.frontends.http.server import HttpServer
from support.http_memory import SentExchange

SECRET = Secret("x-key", "open sesame")
METHODS = (b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE")

# Possible segments of a path, by placeholder.
WORDS = [
    *("v2", "health", "live", "ready", "models", "versions", "config", "stats", "infer", "generate", "generate_stream"),
    *("repository", "index", "load", "unload", "systemsharedmemory", "cudasharedmemory", "region", "status"),
    *("register", "unregister", "trace", "setting", "logging", "halimede", "devices", "1", "m"),
]

CATEGORIES = {
    "/v2": "metadata",
    "/v2/health/live": "health",
    "/v2/health/ready": "health",
    "/v2/models/{m}": "metadata",
    "/v2/models/{m}/versions/{v}": "metadata",
    "/v2/models/{m}/ready": "health",
    "/v2/models/{m}/versions/{v}/ready": "health",
    "/v2/models/{m}/config": "model-config",
    "/v2/models/{m}/versions/{v}/config": "model-config",
    "/v2/models/stats": "statistics",
    "/v2/models/{m}/stats": "statistics",
    "/v2/models/{m}/versions/{v}/stats": "statistics",
    "/v2/models/{m}/infer": "inference",
    "/v2/models/{m}/versions/{v}/infer": "inference",
    "/v2/models/{m}/generate": "inference",
    "/v2/models/{m}/versions/{v}/generate": "inference",
    "/v2/models/{m}/generate_stream": "inference",
    "/v2/models/{m}/versions/{v}/generate_stream": "inference",
    "/v2/repository/index": "model-repository",
    "/v2/repository/{r}/index": "model-repository",
    "/v2/repository/models/{m}/load": "model-repository",
    "/v2/repository/{r}/models/{m}/load": "model-repository",
    "/v2/repository/models/{m}/unload": "model-repository",
    "/v2/repository/{r}/models/{m}/unload": "model-repository",
    **{
        f"/v2/{kind}sharedmemory{region}/{verb}": "shared-memory"
        for kind in ("system", "cuda")
        for region in ("", "/region/{m}")
        for verb in ("status", "register", "unregister")
    },
    "/v2/halimede/devices": "model-repository",
    "/v2/trace/setting": "trace",
    "/v2/models/{m}/trace/setting": "trace",
    "/v2/logging": "logging",
}


def spellings(form: str) -> Iterator[bytes]:
    """The ways to write one path: with each prefix and suffix, and with each of the names."""
    around = list(
        itertools.product(("", "http://elsewhere", "HTTP://user@host:1"), ("", "?", "?a=/v2/health/live", "?/../../v2"))
    )
    names = (("echo", "1"), ("e%63ho", "01"), ("%65%63%68%6f", "0001"), ("none", "7"), ("infer", "1"))
    written = itertools.islice(zip(around, itertools.cycle(names), strict=False), len(around))
    for (prefix, suffix), (model, version) in (*written, *((("", ""), each) for each in names[1:])):
        path = form.format(m=model, v=version, r="models" if model == "echo" else "repo%2F")
        yield f"{prefix}{path}{suffix}".encode()


def status(server: HttpServer, method: bytes, target: bytes, headers: dict[bytes, bytes]) -> tuple[int, bytes]:
    """The status and the body; status 0 if the answer comes later, because the front end accepted the request."""
    exchange = SentExchange(method, target, headers, b"")
    server.handle(exchange)
    return exchange.status, exchange.answer_body


def restricted(running: Any, *categories: str) -> HttpServer:
    secrets = {ApiCategory(name): SECRET for name in categories}
    made: HttpServer = running.call(
        lambda: HttpServer(running.core, max_input_size=1000, log=running.log.append, restricted=secrets)
    )
    return made


def test_the_table_has_every_path_of_the_router() -> None:
    """Of all paths of known words, each that the router accepts is an instance of a form of the table."""
    paths = [rest for length in range(4) for rest in itertools.product(WORDS, repeat=length)]
    inner = ("models", "versions", "1", "repository", "region")
    paths += [(first, *rest, last) for first in WORDS for rest in itertools.product(inner, repeat=2) for last in WORDS]
    paths += [(*rest, last) for length in (4, 5) for rest in itertools.product(inner, repeat=length) for last in WORDS]
    found = set()
    for path in paths:
        route = resolve("/".join(("/v2", *path)).encode())
        if route is not None:
            found.add((route.action, route.methods, bool(route.version), bool(route.repository)))
    known = set()
    for form in CATEGORIES:
        route = resolve(form.format(m="m", v="1", r="r").encode())
        assert route is not None, form
        known.add((route.action, route.methods, bool(route.version), bool(route.repository)))
    assert found == known
    assert {action for action, *_ in known} == set(Action)


@pytest.mark.parametrize("category", [each.value for each in ApiCategory])
def test_all_forms_of_a_restricted_call_need_the_secret_others_do_not(http: Any, category: str) -> None:
    closed = restricted(http, category)
    expected = (403, b'{"error":"This API is restricted, expecting header \'x-key\'"}')

    def check() -> None:
        for form, belongs_to in CATEGORIES.items():
            for target, method in itertools.product(spellings(form), METHODS):
                reached = len(http.core.requests), len(http.core.calls)
                for wrong in ({}, {b"x-key": b""}, {b"x-key": b"open sesam"}, {b"x-kez": b"open sesame"}):
                    answer = status(closed, method, target, wrong)
                    assert (answer == expected) == (belongs_to == category), (method, target, answer)
                if belongs_to == category:
                    assert (len(http.core.requests), len(http.core.calls)) == reached, (method, target)
                assert status(closed, method, target, {b"x-key": b"open sesame"})[0] != 403, (method, target)

    http.call(check)


def test_all_categories_together_leave_only_unknown_paths_open(http: Any) -> None:
    closed = restricted(http, *(each.value for each in ApiCategory))

    def check() -> None:
        for form in CATEGORIES:
            for target, method in itertools.product(spellings(form), METHODS):
                assert status(closed, method, target, {})[0] == 403
        for target in (b"/", b"/v2/", b"/metrics", b"//v2/health/live", b"/v2/%68ealth/live", b"/V2/health/live", b"*"):
            assert status(closed, b"GET", target, {})[0] == 404

    http.call(check)
    assert (http.core.requests, http.core.calls) == ([], [])


def test_each_category_has_its_own_secret(serve: Any) -> None:
    secrets = {ApiCategory.HEALTH: Secret("h", "1"), ApiCategory.INFERENCE: Secret("i", "2")}
    running = serve(make=lambda core, log: HttpServer(core, max_input_size=1000, log=log.append, restricted=secrets))
    assert running.ask("GET", "/v2/health/live", headers={"i": "2"}).status == 403
    assert running.ask("GET", "/v2/health/live", headers={"H": "1"}).status == 200
    answer = running.ask("POST", "/v2/models/echo/infer", b"not json", {"h": "1"})
    assert (answer.status, json.loads(answer.body)) == (403, {"error": "This API is restricted, expecting header 'i'"})
    assert running.ask("POST", "/v2/models/echo/infer", b"not json", {"i": "2"}).status == 400
    assert running.ask("GET", "/v2").status == 200


def test_a_connection_stays_usable_after_a_403(serve: Any) -> None:
    secrets = {ApiCategory.HEALTH: SECRET}
    running = serve(make=lambda core, log: HttpServer(core, max_input_size=1000, log=log.append, restricted=secrets))
    live = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"
    answers = running.exchange(
        live + b"\r\n" + live + b"X-Key: open sesame\r\n\r\n" + b"HEAD" + live[3:] + b"Connection: close\r\n\r\n"
    )
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"403", b"200", b"403"]
