"""Lines of the access log: their content, which of them share a limit, and hostile text."""

import json
from dataclasses import replace

import pytest

from halimede.core.observe.access_lines import Access, Protocol, access_kind, access_line
from halimede.core.observe.log_lines import (
    MAX_LINE_BYTES,
    LineKind,
    Severity,
    render_default,
    render_iso8601,
    render_json,
)

# 2026-11-21T07:50:51.767849Z
AT_US = 1_795_247_451_767_849
REFUSED = Access(
    access_kind(Protocol.HTTP, 400, "m"),
    "POST",
    "/v2/models/m/infer",
    0.0012345,
    "10.0.0.7:52144",
    model="m",
    version="1",
    request_id="abc",
    error="wrong shape",
)
CANCELLED = Access(access_kind(Protocol.GRPC, 1, "m"), "ModelInfer", "", 0.5, "[::1]:80", model="m", error="cancelled")


def test_text_line_has_all_fields_of_a_request() -> None:
    assert render_default(access_line(REFUSED, AT_US, 597)) == (
        'I1121 07:50:51.767849 597 http:400] "POST /v2/models/m/infer: 400 after 1.234 ms, client 10.0.0.7:52144, '
        "model 'm' version 1, id 'abc': wrong shape\""
    )
    assert render_iso8601(access_line(CANCELLED, AT_US, 597)) == (
        '2026-11-21T07:50:51Z I 597 grpc:1] "ModelInfer: CANCELLED after 500.000 ms, client [::1]:80, '
        "model 'm': cancelled\""
    )


def test_unknown_fields_are_omitted() -> None:
    unread = Access(
        access_kind(Protocol.HTTP, 400), "", "", None, "unix", error="malformed HTTP request: no request line"
    )
    text = render_default(access_line(unread, AT_US, 1)).partition("] ")[2]
    assert text == '"request: 400, client unix: malformed HTTP request: no request line"'
    document = json.loads(render_json(access_line(unread, AT_US, 1)))
    assert not {"route", "duration_ms", "model", "version", "request_id"} & set(document)


def test_json_has_a_field_for_each_value() -> None:
    assert json.loads(render_json(access_line(REFUSED, AT_US, 597))) == {
        "time": "2026-11-21T07:50:51.767849Z",
        "level": "INFO",
        "pid": 597,
        "file": "http",
        "line": 400,
        "message": "POST /v2/models/m/infer: 400 after 1.234 ms, client 10.0.0.7:52144, model 'm' version 1, "
        "id 'abc': wrong shape",
        "model": "m",
        "version": "1",
        "request_id": "abc",
        "protocol": "http",
        "method": "POST",
        "route": "/v2/models/m/infer",
        "status": "400",
        "duration_ms": 1.234,
        "client": "10.0.0.7:52144",
        "error": "wrong shape",
    }
    # One type per field for all protocols: log stores accept no other.
    assert json.loads(render_json(access_line(CANCELLED, AT_US, 1)))["status"] == "CANCELLED"


@pytest.mark.parametrize(
    ("protocol", "status", "fails_late", "severity"),
    [
        (Protocol.HTTP, 200, False, Severity.INFO),
        (Protocol.HTTP, 404, False, Severity.INFO),
        (Protocol.HTTP, 499, False, Severity.INFO),
        (Protocol.HTTP, 500, False, Severity.WARNING),
        (Protocol.HTTP, 503, False, Severity.WARNING),
        (Protocol.HTTP, 200, True, Severity.WARNING),
        (Protocol.METRICS, 405, False, Severity.INFO),
        (Protocol.GRPC, 0, False, Severity.INFO),
        (Protocol.GRPC, 3, False, Severity.INFO),
        (Protocol.GRPC, 13, False, Severity.WARNING),
        (Protocol.GRPC, 14, False, Severity.WARNING),
    ],
)
def test_fault_of_the_server_is_a_warning(
    protocol: Protocol, status: int, fails_late: bool, severity: Severity
) -> None:
    assert access_kind(protocol, status, fails_late=fails_late).severity is severity


def test_protocol_status_and_model_share_a_limit() -> None:
    assert access_kind(Protocol.HTTP, 400, "m") == LineKind(Severity.INFO, "http", 400, "m")
    kinds = [
        access_kind(Protocol.HTTP, 400, "m"),
        access_kind(Protocol.HTTP, 400, "other"),
        access_kind(Protocol.HTTP, 400),
        access_kind(Protocol.HTTP, 404, "m"),
        access_kind(Protocol.GRPC, 3, "m"),
    ]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(
    "text", ['a"\nE1121 07:50:51.767849 1 x.py:1] "fire"\r\n', "\x1b[2J\u2028\ud800", "x" * 100_000]
)
def test_hostile_text_breaks_no_line_and_makes_none_too_long(text: str) -> None:
    hostile = replace(REFUSED, method=text, route=text, model=text, version=text, request_id=text, error=text)
    line = access_line(hostile, AT_US, 1)
    for render in (render_default, render_iso8601, render_json):
        rendered = render(line)
        assert rendered.isprintable()
        assert len(rendered.encode()) < MAX_LINE_BYTES
    assert json.loads(render_json(line))["status"] == "400"
