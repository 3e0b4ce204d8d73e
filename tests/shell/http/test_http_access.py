"""The exchanges with lines in the access log, their shared limits, and the content of the lines."""

import pytest

from halimede.core.observe.access_lines import Protocol
from halimede.frontends.http.access import access_of, error_of, kind_of
from halimede.frontends.http.framing import Head
from halimede.frontends.peer import client_of


def head(method: str, target: str) -> Head:
    return Head(method.encode(), target.encode(), {}, b"", 0)


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/models/m/ready"])
def test_only_refused_probes_have_a_line(path: str) -> None:
    probe = head("GET", path)
    assert [kind_of(Protocol.HTTP, probe, status) for status in (200, 400, 503)] == [None, None, None]
    assert all(kind_of(Protocol.HTTP, probe, status) is not None for status in (403, 405, 500))
    assert kind_of(Protocol.METRICS, probe, 400) is not None


def test_each_known_model_has_its_own_limit() -> None:
    request = head("POST", "/v2/models/m/infer")
    assert [
        kind.model for kind in (kind_of(Protocol.HTTP, request, 400, "m"), kind_of(Protocol.HTTP, request, 400)) if kind
    ] == [
        "m",
        "",
    ]


def test_record_has_no_query_and_the_version_that_ran() -> None:
    exchange = head("POST", "/v2/models/a%2Fb/versions/3/infer?token=hush")
    kind = kind_of(Protocol.HTTP, exchange, 400)
    assert kind is not None
    asked = access_of(kind, Protocol.HTTP, exchange, 1.0, "c")
    assert (asked.method, asked.route, asked.model, asked.version) == (
        *("POST", "/v2/models/a%2Fb/versions/3/infer"),
        *("a/b", "3"),
    )
    assert access_of(kind, Protocol.HTTP, exchange, 1.0, "c", version="7").version == "7"
    assert "hush" not in repr(asked)


@pytest.mark.parametrize(
    ("peer", "client"),
    [(("10.0.0.7", 80), "10.0.0.7:80"), (("fe80::1", 80, 0, 2), "[fe80::1]:80"), ("", "unix"), (None, "unix")],
)
def test_client_is_named_by_its_address(peer: object, client: str) -> None:
    assert client_of(peer) == client


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ((b'{"error":"no"}',), "no"),
        ((b'{"err', b'or":"no"}'), "no"),
        ((b'data: {"error":"no"}\n\n',), "no"),
        ((b'{"error":7}',), ""),
        ((b"[1]",), ""),
        ((b"plain",), ""),
        ((), ""),
    ],
)
def test_error_is_read_from_the_answer(chunks: tuple[bytes, ...], text: str) -> None:
    assert error_of(chunks) == text
