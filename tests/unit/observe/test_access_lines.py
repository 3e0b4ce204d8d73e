"""Lines of the access log: what they say, which of them share a limit, and what hostile text makes of them."""

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
    Protocol.HTTP,
    "POST",
    "/v2/models/m/infer",
    400,
    0.0012345,
    "10.0.0.7:52144",
    model="m",
    version="1",
    request_id="abc",
    error="wrong shape",
    found=True,
)
CANCELLED = Access(Protocol.GRPC, "ModelInfer", "", 1, 0.5, "[::1]:80", model="m", error="cancelled", found=True)


def test_text_line_says_all_of_a_request() -> None:
    assert render_default(access_line(REFUSED, AT_US, 597)) == (
        'I1121 07:50:51.767849 597 http:400] "POST /v2/models/m/infer: 400 after 1.234 ms, client 10.0.0.7:52144, '
        "model 'm' version 1, id 'abc': wrong shape\""
    )
    assert render_iso8601(access_line(CANCELLED, AT_US, 597)) == (
        '2026-11-21T07:50:51Z I 597 grpc:1] "ModelInfer: CANCELLED after 500.000 ms, client [::1]:80, '
        "model 'm': cancelled\""
    )


def test_what_is_not_known_is_left_out() -> None:
    unread = Access(Protocol.HTTP, "", "", 400, None, "unix", error="malformed HTTP request: no request line")
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
    # One type per field, whatever the protocol: stores of logs take no other.
    assert json.loads(render_json(access_line(CANCELLED, AT_US, 1)))["status"] == "CANCELLED"


@pytest.mark.parametrize(
    ("access", "severity"),
    [
        (replace(REFUSED, status=200, error=""), Severity.INFO),
        (replace(REFUSED, status=404), Severity.INFO),
        (replace(REFUSED, status=499), Severity.INFO),
        (replace(REFUSED, status=500), Severity.WARNING),
        (replace(REFUSED, status=503), Severity.WARNING),
        # An answer in parts that ended as an error.
        (replace(REFUSED, status=200), Severity.WARNING),
        (replace(CANCELLED, status=0, error=""), Severity.INFO),
        (replace(CANCELLED, status=3), Severity.INFO),
        (replace(CANCELLED, status=13), Severity.WARNING),
        (replace(CANCELLED, status=14), Severity.WARNING),
    ],
)
def test_fault_of_the_server_is_a_warning(access: Access, severity: Severity) -> None:
    assert access_line(access, AT_US, 1).severity is severity
    assert access_kind(access).severity is severity


def test_a_model_that_exists_has_a_share_of_lines_and_made_up_names_have_none() -> None:
    assert access_kind(REFUSED) == LineKind(Severity.INFO, "http", 400, "m")
    assert access_kind(replace(REFUSED, model="other")) != access_kind(REFUSED)
    unknown = [access_kind(replace(REFUSED, status=404, model=f"m{number}", found=False)) for number in range(3)]
    assert set(unknown) == {LineKind(Severity.INFO, "http", 404, "")}
    assert access_kind(replace(REFUSED, status=500)) != access_kind(REFUSED)


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
