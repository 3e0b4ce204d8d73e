"""Who sends a request: the front proxy of the API server names the user in headers, or a token does.

The headers count only with a client certificate that the front proxy's CA has signed. The ConfigMap
`extension-apiserver-authentication` has that CA, the certificate's allowed names, and the names of the headers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson

from halimede_operator.metrics_api.core.errors import MetricsError, Reason

# Any, in this module: JSON.

AUTHENTICATED = "system:authenticated"


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class FrontProxy:
    """What the API server's front proxy sends."""

    authority: str
    """Its CA, as PEM."""
    allowed_names: frozenset[str]
    """Common names of its certificate; empty: any."""
    name_headers: tuple[str, ...]
    group_headers: tuple[str, ...]
    uid_headers: tuple[str, ...]
    extra_prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """A client's certificate. The CA's signature was checked."""

    common_name: str
    expires_s: float
    """Seconds since 1970."""


def read_front_proxy(config_map: Mapping[str, Any]) -> FrontProxy:
    """Raises ValueError if the ConfigMap does not have what the front proxy needs."""
    data = config_map.get("data") or {}
    authority = data.get("requestheader-client-ca-file", "")
    if "BEGIN CERTIFICATE" not in authority:
        raise ValueError("it has no requestheader-client-ca-file: the API server's aggregation layer is off")
    headers = {kind: _names(data, f"requestheader-{kind}-headers") for kind in ("username", "group", "uid")}
    if not headers["username"]:
        raise ValueError("requestheader-username-headers is empty")
    return FrontProxy(
        authority=authority,
        allowed_names=frozenset(_names(data, "requestheader-allowed-names")),
        name_headers=headers["username"],
        group_headers=headers["group"],
        uid_headers=headers["uid"],
        extra_prefixes=tuple(name.lower() for name in _names(data, "requestheader-extra-headers-prefix")),
    )


def caller_of_front_proxy(
    front_proxy: FrontProxy, certificate: Certificate | None, headers: Sequence[tuple[str, str]], now_s: float
) -> Caller | None:
    """The user that the headers name; None without a certificate or a name.

    Raises MetricsError if the certificate is not the front proxy's.
    """
    if certificate is None:
        return None
    if now_s >= certificate.expires_s:
        raise MetricsError(Reason.Unauthorized, "the client certificate has expired")
    if front_proxy.allowed_names and certificate.common_name not in front_proxy.allowed_names:
        allowed = ", ".join(sorted(front_proxy.allowed_names))
        raise MetricsError(
            Reason.Unauthorized,
            f"the client certificate is of {certificate.common_name!r}; the front proxy's is of {allowed}",
        )
    by_name: dict[str, list[str]] = {}
    for name, value in headers:
        by_name.setdefault(name.lower(), []).append(value)
    names = _values(by_name, front_proxy.name_headers)
    if not names:
        return None
    extra: dict[str, tuple[str, ...]] = {}
    for prefix in front_proxy.extra_prefixes:
        for name, values in by_name.items():
            if name.startswith(prefix):
                key = unquote(name.removeprefix(prefix))
                extra[key] = extra.get(key, ()) + tuple(values)
    uids = _values(by_name, front_proxy.uid_headers)
    return authenticated(
        Caller(
            names[0],
            tuple(_values(by_name, front_proxy.group_headers)),
            uids[0] if uids else "",
            tuple(sorted(extra.items())),
        )
    )


def bearer_token(headers: Iterable[tuple[str, str]]) -> str | None:
    for name, value in headers:
        scheme, _, token = value.partition(" ")
        if name.lower() == "authorization" and scheme.lower() == "bearer" and token.strip():
            return token.strip()
    return None


def token_review(token: str) -> dict[str, Any]:
    return {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}


def caller_of_review(review: Mapping[str, Any]) -> Caller | None:
    """The user of the token; None if the API server does not accept it."""
    status = review.get("status") or {}
    user = status.get("user") or {}
    if status.get("authenticated") is not True or not user.get("username"):
        return None
    extra = {str(key): tuple(values) for key, values in (user.get("extra") or {}).items()}
    return authenticated(
        Caller(user["username"], tuple(user.get("groups") or ()), user.get("uid") or "", tuple(sorted(extra.items())))
    )


def authenticated(caller: Caller) -> Caller:
    """With the group of all known users. The API server itself calls as `system:kube-aggregator`, without any group."""
    if AUTHENTICATED in caller.groups or caller.name == "system:anonymous":
        return caller
    return Caller(caller.name, (*caller.groups, AUTHENTICATED), caller.uid, caller.extra)


def _names(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    try:
        names = orjson.loads(data.get(key) or "[]")
    except orjson.JSONDecodeError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} is no list of texts: {data.get(key)!r:.200}")
    return tuple(names)


def _values(by_name: Mapping[str, list[str]], names: Iterable[str]) -> list[str]:
    return [value for name in names for value in by_name.get(name.lower(), ()) if value]
