"""The metrics API's own metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from halimede_operator.metrics_api.core.errors import Reason

SUCCESS = "Success"
RESULTS = (SUCCESS, *(reason.name for reason in Reason))


class Metrics:
    def __init__(self, now_s: Callable[[], float]) -> None:
        """now_s: a clock in seconds that never goes back."""
        # Otherwise each counter gets a second series with its creation time.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._now_s = now_s
        self._answered_at_s = now_s()
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "halimede_metrics_api_requests_total",
            "Requests by result: Success, or the reason of the Status that refuses them.",
            ["result"],
            registry=self._registry,
        )
        # Prometheus does not see the increase of a series that begins with its first failure.
        for result in RESULTS:
            self._requests.labels(result)
        self._seconds = Histogram(
            "halimede_metrics_api_query_seconds", "Duration of Prometheus' queries for requests.",
            registry=self._registry, buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
        )  # fmt: skip
        age = Gauge(
            "halimede_metrics_api_prometheus_answer_age_seconds",
            "Seconds since Prometheus last answered; it is asked every 10 s. Since the start before its first answer.",
            registry=self._registry,
        )
        age.set_function(lambda: self._now_s() - self._answered_at_s)

    def requested(self, result: str) -> None:
        """Count a request. result: of RESULTS."""
        self._requests.labels(result).inc()

    def queried(self, seconds: float) -> None:
        """Count a query of Prometheus, also one without an answer."""
        self._seconds.observe(seconds)

    def answered(self) -> None:
        """Prometheus has answered now, and its answer is no error."""
        self._answered_at_s = self._now_s()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
