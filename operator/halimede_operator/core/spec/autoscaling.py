"""Parses `spec.autoscaling`. Two ways of doing one thing at once are refused, with the reason."""

import math
import re

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.field import DNS_NAME, Field, Rule, shown
from halimede_operator.core.spec.types import Autoscaling, Json, Preset, Provider, ScaleToZero, ZeroBy

_URL = Rule(
    re.compile(r"https?://[^\s@/?#]+(/[^\s?#]*)?", re.ASCII),
    "must be a URL such as http://prometheus.monitoring:9090, without a user or a password",
    512,
)
_METRICS = {
    "Pods": "pods",
    "Object": "object",
    "External": "external",
    "Resource": "resource",
    "ContainerResource": "containerResource",
}
_WITHOUT_PODS = ("Object", "External")
_MAX_METRICS = 16
_A_TARGET = 'a quantity such as "4" or 700m'
_OF_A_SCALER = ("preset", "target", "metrics", "behavior", "scaleToZero")
_LEAST_IDLE_SECONDS = 10
LONGEST_WINDOW_SECONDS = 3600
"""The longest stabilizationWindowSeconds that the API server accepts."""


def read_autoscaling(field: Field, platform: Platform) -> Autoscaling | None:
    if not field.given:
        return None
    provider = field.get("provider").member(Provider.HPA)
    most = read_replicas(field.get("maxReplicas").required("the most replicas that there may be"), 1, platform)
    if provider is Provider.EXTERNAL:
        for name in _OF_A_SCALER:
            if field.get(name).given:
                field.get(name).refuse("must not be set with provider External, which leaves scaling to others")
    metrics = _metrics(field, provider)
    preset, target = _preset(field, provider)
    behavior = _behavior(field.free_section("behavior"))
    zero = _scale_to_zero(field.section("scaleToZero"), provider)
    if zero is not None and zero.by is ZeroBy.HPA:
        _check_zero_by_hpa(field, zero, metrics)
    address, authentication = _prometheus(field.section("prometheus"), provider, platform)
    return Autoscaling(
        max_replicas=most,
        min_replicas=_min_replicas(field.get("minReplicas"), most, zero),
        provider=provider,
        preset=preset,
        target=target,
        metrics=metrics,
        behavior=behavior,
        scale_to_zero=zero,
        prometheus_address=address,
        prometheus_authentication=authentication,
    )


def read_replicas(field: Field, minimum: int, platform: Platform) -> int:
    """A number of replicas, at most as many as the installation allows; 1 if absent."""
    replicas = field.integer(1, minimum)
    if replicas > platform.max_replicas:
        limit = f"must be at most {platform.max_replicas}, which is --max-replicas of the operator"
        field.refuse(f"{limit} (models.maxReplicas of the chart), got {replicas}")
        return platform.max_replicas
    return replicas


def _min_replicas(field: Field, most: int, zero: ScaleToZero | None) -> int:
    is_scalers = zero is not None and zero.by is not ZeroBy.OPERATOR
    least = field.integer(0 if is_scalers else 1, 0)
    if least == 0 and not is_scalers:
        field.refuse("must be at least 1 without scaleToZero.zeroBy HPA or KEDA, which takes the last replica away")
    if least > 0 and zero is not None and zero.by is ZeroBy.HPA:
        field.refuse(f"must be 0 or absent with scaleToZero.zeroBy HPA, got {least}")
    if least > most:
        field.refuse(f"must not be above maxReplicas, which is {most}, got {least}")
    return least


def _preset(field: Field, provider: Provider) -> tuple[Preset | None, str | None]:
    given, target, metrics = field.get("preset"), field.get("target"), field.get("metrics")
    amount = target.quantity(_A_TARGET)
    if amount is not None and amount <= 0:
        target.refuse(f"must be above 0, got {shown(target.value)}")
    if metrics.given or provider is Provider.EXTERNAL:
        if given.given and metrics.given:
            given.refuse("must not be set together with metrics: a preset stands for metrics of its own")
        elif target.given and metrics.given:
            target.refuse("must not be set together with metrics, which have targets of their own")
        return None, None
    return given.member(Preset.QUEUE), None if amount is None else str(target.value)


def _metrics(field: Field, provider: Provider) -> tuple[Json, ...]:
    metrics = field.get("metrics")
    if metrics.given and provider is Provider.KEDA:
        metrics.refuse("must not be set with provider KEDA, whose triggers are made from a preset")
    found = []
    for entry in metrics.objects(least=1, most=_MAX_METRICS):
        kind = entry.get("type").required(", ".join(_METRICS)).choice(None, *_METRICS)
        for name, section in _METRICS.items():
            if name == kind:
                _check_target(entry.free_section(section).required(f"the metric of type {kind}").section("target"))
            elif entry.get(section).given and kind is not None:
                entry.get(section).refuse(f"needs type {name}, got {kind}")
        if kind is not None:
            found.append({"type": kind, _METRICS[kind]: entry.free_section(_METRICS[kind]).json()})
    return tuple(found)


def _check_target(target: Field) -> None:
    """Refuse what is no quantity. The API server would not report where it is."""
    for name in ("value", "averageValue"):
        target.get(name).quantity(_A_TARGET)


def _behavior(field: Field) -> Json:
    for direction in ("scaleUp", "scaleDown"):
        field.section(direction).get("tolerance").quantity('a quantity such as "0.1" or 50m')
    return field.json()


def _scale_to_zero(field: Field, provider: Provider) -> ScaleToZero | None:
    if not field.given:
        return None
    idle = field.get("idleFor").required("how long it must be idle, for instance 10m")
    duration = idle.microseconds("24h")
    seconds = _LEAST_IDLE_SECONDS if duration is None else math.ceil(duration / 1_000_000)
    if seconds < _LEAST_IDLE_SECONDS:
        idle.refuse(f"must be at least {_LEAST_IDLE_SECONDS}s, got {shown(idle.value)}")
    by = field.get("zeroBy").member(ZeroBy.OPERATOR)
    if provider is Provider.KEDA and by is not ZeroBy.KEDA:
        field.get("zeroBy").refuse(f"must be KEDA with provider KEDA, which wakes the pods itself, got {by}")
    if provider is Provider.HPA and by is ZeroBy.KEDA:
        field.get("zeroBy").refuse("must be Operator or HPA with provider HPA, got KEDA; or use provider KEDA")
    return ScaleToZero(seconds, by)


def _check_zero_by_hpa(field: Field, zero: ScaleToZero, metrics: tuple[Json, ...]) -> None:
    if metrics and not any(metric["type"] in _WITHOUT_PODS for metric in metrics):
        field.get("metrics").refuse(
            "must have one of type Object or External with scaleToZero.zeroBy HPA: without pods there is no other"
        )
    if zero.idle_seconds > LONGEST_WINDOW_SECONDS:
        idle = field.get("scaleToZero").get("idleFor")
        idle.refuse(f"must be at most 1h with zeroBy HPA, got {shown(idle.value)}")
    window = field.section("behavior").section("scaleDown").get("stabilizationWindowSeconds")
    if window.given:
        window.refuse("must not be set with scaleToZero.zeroBy HPA: scaleToZero.idleFor is this window")


def _prometheus(field: Field, provider: Provider, platform: Platform) -> tuple[str | None, str | None]:
    address = field.get("serverAddress")
    if field.given and provider is not Provider.KEDA:
        field.refuse(f"needs provider KEDA, got {provider}: an HPA gets its metrics from the API server")
    if provider is Provider.KEDA and platform.prometheus_address is None and not address.given:
        address.refuse("is required: the URL of Prometheus, for instance http://prometheus.monitoring:9090")
    return address.text(platform.prometheus_address, _URL), field.get("authenticationRef").text(None, DNS_NAME)
