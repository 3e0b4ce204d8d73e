"""The operator's own metrics."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from halimede_operator.core.process.workqueue import Failure

RESULT_DONE = "done"
RESULTS = (RESULT_DONE, *(failure.name.lower() for failure in Failure))


class Metrics:
    def __init__(self) -> None:
        # Otherwise each counter gets a second series with its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "halimede_operator_reconcile_seconds", "Duration of reconciles.", registry=self._registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )  # fmt: skip
        self._decision_seconds = Histogram(
            "halimede_operator_placement_decision_seconds", "CPU time of decisions about devices.",
            registry=self._registry, buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
        )  # fmt: skip
        self._reconciles = Counter(
            "halimede_operator_reconciles_total", "Reconciles by result.", ["result"], registry=self._registry
        )
        # Prometheus does not see the increase of a series that begins with its first failure.
        for result in RESULTS:
            self._reconciles.labels(result)
        self._writes = Counter(
            "halimede_operator_api_writes_total",
            "Writes to the API server, except those of the Lease; code 0: no answer.",
            ["verb", "kind", "code"],
            registry=self._registry,
        )

    def watch(self, gauges: "ScrapeGauges") -> None:
        self._registry.register(gauges)

    def reconciled(self, result: str, seconds: float) -> None:
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def decided(self, cpu_seconds: float) -> None:
        """Count a decision about devices."""
        self._decision_seconds.observe(cpu_seconds)

    def wrote(self, verb: str, kind: str, status: int) -> None:
        """Count a write to the API server. status: HTTP's, 0 if there was no answer."""
        self._writes.labels(verb, kind, str(status)).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


@dataclass(frozen=True, eq=False)
class ScrapeGauges(Collector):
    """The gauges that are computed at each scrape.

    depth: keys that are due. oldest_wait_s: for how long one of them has been due. ages: by kind, seconds since its
    watch last received anything. left: objects that belong to other operators.
    """

    depth: Callable[[], int]
    oldest_wait_s: Callable[[], float]
    ages: Callable[[], Mapping[str, float]]
    is_leader: Callable[[], bool]
    left: Callable[[], int]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        yield GaugeMetricFamily(
            "halimede_operator_queue_depth", "Objects that wait for a reconcile.", value=self.depth()
        )
        yield GaugeMetricFamily(
            "halimede_operator_queue_oldest_seconds",
            "How long the object that waits longest has waited for a reconcile, 0 when none waits.",
            value=self.oldest_wait_s(),
        )
        yield GaugeMetricFamily(
            "halimede_operator_leader",
            "1 if this operator holds the lease and may write.",
            value=int(self.is_leader()),
        )
        yield GaugeMetricFamily(
            "halimede_operator_objects_of_others",
            "Objects that are not reconciled because they belong to an operator of another release.",
            value=self.left(),
        )
        ages = GaugeMetricFamily(
            "halimede_operator_watch_age_seconds",
            "Seconds since the API server last sent anything about a kind.",
            labels=["kind"],
        )
        for kind, age in self.ages().items():
            ages.add_metric([kind], age)
        yield ages
