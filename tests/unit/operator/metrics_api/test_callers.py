"""Who calls, and what it may have."""

from typing import Any

import pytest

from halimede_operator.metrics_api.core.authorization import access_review, is_allowed, is_always_allowed, refused
from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.identity import (
    AUTHENTICATED,
    Caller,
    Certificate,
    FrontProxy,
    bearer_token,
    caller_of_front_proxy,
    caller_of_review,
    read_front_proxy,
    token_review,
)
from halimede_operator.metrics_api.core.requests import ROOT, Discovery, MetricOf

PEM = "-----BEGIN CERTIFICATE-----\n"
CONFIG = {
    "requestheader-client-ca-file": PEM,
    "requestheader-allowed-names": '["front-proxy-client"]',
    "requestheader-username-headers": '["X-Remote-User"]',
    "requestheader-group-headers": '["X-Remote-Group"]',
    "requestheader-uid-headers": '["X-Remote-Uid"]',
    "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
}
GOOD = Certificate("front-proxy-client", expires_s=100.0)
USER = ("X-Remote-User", "ada")
METRIC = MetricOf("prod", "pods", "*", "waiting", "a=b")


def front_proxy(**changes: str) -> FrontProxy:
    data = {**CONFIG, **{f"requestheader-{name.replace('_', '-')}": value for name, value in changes.items()}}
    return read_front_proxy({"data": data})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "has no requestheader-client-ca-file"),
        ({**CONFIG, "requestheader-client-ca-file": "nonsense"}, "has no requestheader-client-ca-file"),
        ({**CONFIG, "requestheader-username-headers": "[]"}, "requestheader-username-headers is empty"),
        ({**CONFIG, "requestheader-allowed-names": "front-proxy"}, "requestheader-allowed-names is no list of texts"),
        ({**CONFIG, "requestheader-group-headers": "[1]"}, "requestheader-group-headers is no list of texts"),
    ],
)
def test_a_config_map_without_what_is_needed_is_refused(data: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_front_proxy({"data": data})


def test_headers_with_the_front_proxys_certificate_name_the_user() -> None:
    headers = [
        ("x-remote-user", "ada"),
        ("X-Remote-Group", "dev"),
        ("X-Remote-Group", "ops"),
        ("X-Remote-Uid", "7"),
        ("X-Remote-Extra-Example.com%2fScope", "a"),
        ("X-Remote-Extra-Example.com%2fScope", "b"),
    ]
    assert caller_of_front_proxy(front_proxy(), GOOD, headers, now_s=99) == Caller(
        "ada", ("dev", "ops", AUTHENTICATED), "7", (("example.com/scope", ("a", "b")),)
    )


def test_headers_without_a_certificate_count_for_nothing() -> None:
    assert caller_of_front_proxy(front_proxy(), None, [USER], now_s=0) is None
    assert caller_of_front_proxy(front_proxy(), GOOD, [("X-Remote-User", "")], now_s=0) is None


@pytest.mark.parametrize(
    ("certificate", "message"),
    [(Certificate("ada", 100.0), "is of 'ada'; the front proxy's is of front-proxy-client"), (GOOD, "has expired")],
)
def test_another_or_an_old_certificate_is_refused(certificate: Certificate, message: str) -> None:
    with pytest.raises(MetricsError, match=message) as error:
        caller_of_front_proxy(front_proxy(), certificate, [USER], now_s=100 if certificate == GOOD else 0)
    assert error.value.reason is Reason.Unauthorized


def test_without_allowed_names_any_certificate_of_the_ca_counts() -> None:
    caller = caller_of_front_proxy(front_proxy(allowed_names="[]"), Certificate("any", 100.0), [USER], now_s=0)
    assert caller == Caller("ada", (AUTHENTICATED,))


def test_the_unauthenticated_are_not_in_the_group_of_the_authenticated() -> None:
    anonymous = [("X-Remote-User", "system:anonymous"), ("X-Remote-Group", "system:unauthenticated")]
    caller = caller_of_front_proxy(front_proxy(), GOOD, anonymous, now_s=0)
    assert caller == Caller("system:anonymous", ("system:unauthenticated",))


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ([("Authorization", "Bearer abc")], "abc"),
        ([("authorization", "bearer  abc ")], "abc"),
        ([("Authorization", "Basic abc")], None),
        ([("Authorization", "Bearer ")], None),
        ([], None),
    ],
)
def test_tokens_of_headers(headers: list[tuple[str, str]], token: str | None) -> None:
    assert bearer_token(headers) == token


def test_the_user_of_a_token_is_that_of_the_review() -> None:
    assert token_review("abc")["spec"] == {"token": "abc"}
    user = {"username": "ada", "uid": "7", "groups": [AUTHENTICATED], "extra": {"scope": ["a"]}}
    assert caller_of_review({"status": {"authenticated": True, "user": user}}) == Caller(
        "ada", (AUTHENTICATED,), "7", (("scope", ("a",)),)
    )


@pytest.mark.parametrize(
    "status", [{}, {"user": {"username": "ada"}}, {"authenticated": False}, {"authenticated": True, "user": {}}]
)
def test_a_review_that_accepts_nobody(status: dict[str, Any]) -> None:
    assert caller_of_review({"status": status}) is None


def test_reviews_name_what_the_api_server_itself_would_check() -> None:
    caller = Caller("ada", ("dev",), "7", (("scope", ("a",)),))
    assert access_review(caller, METRIC)["spec"] == {
        "user": "ada",
        "groups": ["dev"],
        "uid": "7",
        "extra": {"scope": ["a"]},
        "resourceAttributes": {
            "namespace": "prod",
            "verb": "get",
            "group": "custom.metrics.k8s.io",
            "version": "v1beta2",
            "resource": "pods",
            "subresource": "waiting",
            "name": "*",
        },
    }
    assert access_review(Caller("ada"), Discovery())["spec"] == {
        "user": "ada",
        "groups": [],
        "nonResourceAttributes": {"path": ROOT, "verb": "get"},
    }


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"allowed": True}, True),
        ({"allowed": True, "denied": True}, False),
        ({"allowed": False}, False),
        ({"allowed": "yes"}, False),
        ({}, False),
    ],
)
def test_only_a_clear_yes_allows(status: dict[str, Any], expected: bool) -> None:
    assert is_allowed({"status": status}) is expected


def test_refusals_name_the_user_and_the_right() -> None:
    assert str(refused(Caller("ada"), METRIC)) == (
        "ada may not get pods/waiting of custom.metrics.k8s.io in the namespace prod"
    )
    assert str(refused(Caller("ada"), Discovery())) == f"ada may not get {ROOT}"


def test_the_group_of_masters_needs_no_review() -> None:
    assert is_always_allowed(Caller("system:kube-aggregator", ("system:masters",)))
    assert not is_always_allowed(Caller("system:masters", (AUTHENTICATED,)))
