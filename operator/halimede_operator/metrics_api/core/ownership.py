"""Whose the API is: a cluster has one server of each API, which the APIService names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halimede_operator.metrics_api.core.requests import GROUP, VERSION

# Any, in this module: JSON.

OURS = f"{VERSION}.{GROUP}"
EARLIER = f"v1beta1.{GROUP}"
"""prometheus-adapter registers this one too, or alone."""


@dataclass(frozen=True, slots=True)
class Service:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def service_of(api_service: Mapping[str, Any] | None) -> Service | None:
    """The Service that serves the API; None if there is no such APIService, or the API server serves it itself."""
    service = ((api_service or {}).get("spec") or {}).get("service")
    return Service(service.get("namespace", ""), service.get("name", "")) if service else None


def why_not_serving(own: Service, current: Service | None) -> str | None:
    """None if we serve. An API without a server does not hinder us: the APIService may come later."""
    if current in (own, None):
        return None
    return (
        f"the APIService {OURS} belongs to the Service {current}, not to {own}, so nothing is served here; "
        "give the rules file of the chart to that server"
    )


def warning(own: Service, current: Service | None, earlier: Service | None) -> str | None:
    """What an administrator should know although we serve."""
    if current != own or earlier in (own, None):
        return None
    return (
        f"the APIService {EARLIER} belongs to the Service {earlier}: HorizontalPodAutoscalers use {VERSION}, which is "
        f"served here, and so find no metrics of that Service any more"
    )
