"""`MetricFamily` and `Metric`: a model's own metrics on the server's metrics page.

Metrics live as long as the object of their family. It may be collected at any moment, in any thread, even during a call
to the server. Its id is only recorded then, and is sent to the server with the next call that is made anyway, or at the
end of the batch.
"""

import itertools
import math
from typing import Any

from halimede.backends.python.utils.arguments import ProtocolNumber, instance_of, number_of, text_of
from halimede.backends.python.utils.errors import TritonModelException
from halimede.backends.python.utils.session import Session, current
from halimede.backends.service_calls import DeleteMetricFamily, MetricValue, NewMetric, NewMetricFamily


class MetricKind(ProtocolNumber):
    """The protocol's kinds of metrics."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


_OPERATIONS = {
    MetricKind.COUNTER: ("increment", "value"),
    MetricKind.GAUGE: ("increment", "set", "value"),
    MetricKind.HISTOGRAM: ("observe",),
}


class Metric:
    """One labelled time series of a family; made by `MetricFamily.Metric`."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_id", "_kind", "_life", "_session")

    def __init__(self, session: Session, kind: MetricKind, number: int, life: "_Life") -> None:
        self._session = session
        self._kind = kind
        self._id = number
        self._life = life

    def increment(self, value: float, /) -> None:
        """Add a value; counters take no negative one."""
        number = number_of(value, "increment", "value")
        if self._kind is MetricKind.COUNTER and not number >= 0:
            raise TritonModelException(
                "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented"
                f" monotonically by non-negative values, not {number}."
            )
        self._update("increment", number)

    def set(self, value: float, /) -> None:
        self._update("set", number_of(value, "set", "value"))

    def observe(self, value: float, /) -> None:
        self._update("observe", number_of(value, "observe", "value"))

    def value(self) -> float:
        call = MetricValue(self._allowed("value"))
        return float(self._session.call(call, "Failed to get metric value: "))

    def _update(self, operation: str, value: float) -> None:
        self._session.host.update_metric(self._allowed(operation), operation, value)

    def _allowed(self, operation: str) -> int:
        did = "get" if operation == "value" else operation
        if operation not in _OPERATIONS[self._kind]:
            raise TritonModelException(
                f"Failed to {did} metric value: TRITONSERVER_METRIC_KIND_{self._kind.name} does not support"
                f" {operation.capitalize()}"
            )
        if self._life.is_over:
            raise TritonModelException(
                f"Failed to {did} metric value: Invalid metric operation as the corresponding 'MetricFamily' has been"
                " deleted. The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have"
                " been deleted."
            )
        return self._id


class _Life:
    """Whether a family's object was deleted, for metrics that outlive it."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False


class MetricFamily:
    """A metric family on the metrics page: its name, description and kind."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_id", "_kind", "_life", "_session")

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        where = "MetricFamily"
        call = NewMetricFamily(
            text_of(name, where, "name"),
            text_of(description, where, "description"),
            instance_of(kind, MetricKind, where, "kind").name,
        )
        session = current()
        report_released(session)
        number = session.call(call, "Error when creating MetricFamily: ")
        self._session = session
        self._kind = kind
        self._life = _Life()
        self._id = number

    def Metric(  # noqa: N802  the field's own name
        self, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> Metric:
        """A metric with these labels; histograms need the upper bounds of their buckets, other kinds have none."""
        report_released(self._session)
        call = NewMetric(self._id, _labels(labels), _buckets(self._kind, buckets))
        number = self._session.call(call, "Error when creating Metric: ")
        return Metric(self._session, self._kind, number, self._life)

    def __del__(self) -> None:
        # Not set if the server refused the family.
        if hasattr(self, "_id"):
            self._life.is_over = True
            self._session.released.append(self._id)


def report_released(session: Session) -> None:
    """Report to the server the families whose objects were deleted."""
    while session.released:
        session.call(DeleteMetricFamily(session.released.popleft()))


def _labels(labels: Any) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, dict):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TritonModelException(
                f"Failed to create metric. Labels must be strings: {type(key).__name__} {str(key)[:64]!r} is"
                f" {type(value).__name__}."
            )
    return dict(labels)


def _buckets(kind: MetricKind, buckets: Any) -> list[float]:
    if buckets is None:
        if kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        return []
    if not isinstance(buckets, list):
        raise TritonModelException("Failed to create metric. Buckets must be a list.")
    if kind is not MetricKind.HISTOGRAM:
        raise TritonModelException("Failed to create metric. Unexpected buckets found.")
    bounds = [number_of(bound, "Metric", "buckets") for bound in buckets]
    # Written so that it also fails for a NaN.
    if not all(low < high for low, high in itertools.pairwise([-math.inf, *bounds])):
        raise TritonModelException(f"Failed to create metric. Buckets must ascend, not {bounds}.")
    # Every histogram has the +Inf bucket.
    return bounds[:-1] if bounds and bounds[-1] == math.inf else bounds
