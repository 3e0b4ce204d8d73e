"""What Prometheus answers."""

from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal

import orjson

from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.values import sample


@dataclass(frozen=True, slots=True)
class Sample:
    value: Decimal
    at_s: float
    """When Prometheus evaluated the query, by its clock, in seconds since 1970."""


def read_vector(status: int, body: bytes, label: str, names: Collection[str]) -> dict[str, Sample]:
    """The samples of the objects `names`, by the name that is in `label`. Raises MetricsError if Prometheus failed."""
    samples: dict[str, Sample] = {}
    for metric, at_s, value in _vector(status, body):
        name, number = metric.get(label, ""), sample(value)
        if name in names and number is not None:
            samples[name] = Sample(number, float(at_s))
    return samples


def has_samples(status: int, body: bytes) -> bool:
    """Whether a query found anything."""
    return bool(_vector(status, body))


def _vector(status: int, body: bytes) -> list[tuple[dict[str, str], float, str]]:
    try:
        answer = orjson.loads(body)
        if answer["status"] != "success":
            raise _failed(f"{answer.get('errorType')}: {answer.get('error')}")
        if answer["data"]["resultType"] != "vector":
            raise MetricsError(Reason.InternalError, "the rule's query is no vector of Prometheus")
        return [(dict(each["metric"]), *each["value"]) for each in answer["data"]["result"]]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
        # A proxy in between, or another service.
        text = body[:200].decode(errors="replace")
        raise _failed(f"status {status}, not an answer of its API: {text!r}") from None


def _failed(why: str) -> MetricsError:
    return MetricsError(Reason.ServiceUnavailable, f"Prometheus failed: {why[:500]}")
