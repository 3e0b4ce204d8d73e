"""The operator's own metrics."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self) -> None:
        # Else each counter has a second series, of when it began.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "halimede_operator_reconcile_seconds", "Duration of reconciles.", registry=self._registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )  # fmt: skip
        self._reconciles = Counter(
            "halimede_operator_reconciles_total", "Reconciles by result.", ["result"], registry=self._registry
        )
        self._writes = Counter(
            "halimede_operator_api_writes_total",
            "Writes to the API server, the Lease's not among them; code 0: no answer.",
            ["verb", "kind", "code"],
            registry=self._registry,
        )

    def watch(
        self, depth: Callable[[], int], ages: Callable[[], Mapping[str, float]], is_leader: Callable[[], bool]
    ) -> None:
        """What is asked for when the metrics are read."""
        self._registry.register(_Live(depth, ages, is_leader))

    def reconciled(self, result: str, seconds: float) -> None:
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def wrote(self, verb: str, kind: str, status: int) -> None:
        self._writes.labels(verb, kind, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Live(Collector):
    def __init__(
        self, depth: Callable[[], int], ages: Callable[[], Mapping[str, float]], is_leader: Callable[[], bool]
    ) -> None:
        self._depth = depth
        self._ages = ages
        self._is_leader = is_leader

    def collect(self) -> Iterable[GaugeMetricFamily]:
        yield GaugeMetricFamily(
            "halimede_operator_queue_depth", "Objects that wait for a reconcile.", value=self._depth()
        )
        yield GaugeMetricFamily(
            "halimede_operator_leader",
            "1 where this operator holds the lease and may write.",
            value=int(self._is_leader()),
        )
        ages = GaugeMetricFamily(
            "halimede_operator_watch_age_seconds", "Since the API server last told anything of a kind.", labels=["kind"]
        )
        for kind, age in self._ages().items():
            ages.add_metric([kind], age)
        yield ages
