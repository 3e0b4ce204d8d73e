"""One request, from its headers to the document that answers it."""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence

from halimede_operator.api_server.errors import ApiError
from halimede_operator.metrics_api.cluster import Cluster
from halimede_operator.metrics_api.core import answers
from halimede_operator.metrics_api.core.authorization import access_review, is_allowed, is_always_allowed, refused
from halimede_operator.metrics_api.core.cache import ExpiringCache
from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.identity import (
    Caller,
    Certificate,
    FrontProxy,
    bearer_token,
    caller_of_front_proxy,
    caller_of_review,
    token_review,
)
from halimede_operator.metrics_api.core.requests import Discovery, MetricOf, Request, Unknown, find
from halimede_operator.metrics_api.core.results import has_samples, read_vector
from halimede_operator.metrics_api.core.rules import Rules
from halimede_operator.metrics_api.prometheus import Prometheus

# How many answers of the API server are kept, and how long they are used.
REVIEWS, REVIEW_AGE_S = 1000, 5.0
POD_LISTS, POD_LIST_AGE_S = 200, 2.0
LOOK_BACK = "10m"
"""How far back to look for samples when there is none that counts, to say why."""


class Service:
    """Answers requests. Its caches are bounded."""

    def __init__(self, rules: Rules, prometheus: Prometheus, cluster: Cluster) -> None:
        self._rules, self._prometheus, self._cluster = rules, prometheus, cluster
        self.front_proxy: FrontProxy | None = None
        """None until the ConfigMap was read."""
        self.why_not_serving: str | None = None
        """Set while another server has the API."""
        self._tokens: ExpiringCache[bytes, Caller] = ExpiringCache(REVIEWS, REVIEW_AGE_S)
        """By a hash, so that no token stays in memory."""
        self._decisions: ExpiringCache[tuple[Caller, Discovery | MetricOf], bool] = ExpiringCache(REVIEWS, REVIEW_AGE_S)
        self._pods: ExpiringCache[tuple[str, str], tuple[str, ...]] = ExpiringCache(POD_LISTS, POD_LIST_AGE_S)

    async def answer(
        self, parse: Callable[[], Request], headers: Sequence[tuple[str, str]], certificate: Certificate | None
    ) -> dict[str, object]:
        """The document of a GET request. parse: called when the caller is known. Raises MetricsError or ApiError."""
        if self.why_not_serving is not None:
            raise MetricsError(Reason.ServiceUnavailable, self.why_not_serving)
        caller = await self._authenticate(headers, certificate)
        request = parse()
        if isinstance(request, Unknown):
            raise MetricsError(Reason.NotFound, f"nothing is served at {request.path[:256]!r}")
        await self._authorize(caller, request)
        if isinstance(request, Discovery):
            return answers.resource_list(self._rules)
        return await self._values(request)

    async def _authenticate(self, headers: Sequence[tuple[str, str]], certificate: Certificate | None) -> Caller:
        if self.front_proxy is None:
            raise MetricsError(Reason.ServiceUnavailable, "the front proxy's CA was not read from the API server yet")
        caller = caller_of_front_proxy(self.front_proxy, certificate, headers, time.time())
        if caller is not None:
            return caller
        token = bearer_token(headers)
        if token is None:
            raise MetricsError(
                Reason.Unauthorized, "neither the API server's front proxy nor a bearer token names a user"
            )
        key = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        if (known := self._tokens.get(key, time.monotonic())) is not None:
            return known
        reviewed = caller_of_review(await self._cluster.review(token_review(token)))
        if reviewed is None:
            raise MetricsError(Reason.Unauthorized, "the API server does not accept the bearer token")
        self._tokens.put(key, reviewed, time.monotonic())
        return reviewed

    async def _authorize(self, caller: Caller, request: Discovery | MetricOf) -> None:
        if is_always_allowed(caller):
            return
        if isinstance(request, MetricOf):
            # Rights do not depend on selectors: the HPAs of a namespace share a decision.
            request = dataclasses.replace(request, label_selector="", metric_label_selector="")
        key = (caller, request)
        allowed = self._decisions.get(key, time.monotonic())
        if allowed is None:
            allowed = is_allowed(await self._cluster.review(access_review(caller, request)))
            self._decisions.put(key, allowed, time.monotonic())
        if not allowed:
            raise refused(caller, request)

    async def _values(self, request: MetricOf) -> dict[str, object]:
        wanted = find(request, self._rules)
        rule, resource = wanted.rule, wanted.resource
        names = await self._pods_of(request) if request.is_for_all else (request.name,)
        if not names:
            raise answers.no_pods(request)
        matchers = rule.matchers(resource, request.namespace, names, wanted.required)
        answer = await self._prometheus.query(rule.query(resource, matchers))
        samples = read_vector(*answer, rule.labels[resource], frozenset(names))
        if not samples:
            earlier = await self._prometheus.query(f"count(last_over_time({rule.series}{{{matchers}}}[{LOOK_BACK}]))")
            raise answers.no_samples(request, wanted, matchers, were_there=has_samples(*earlier))
        return answers.value_list(request, wanted, samples)

    async def _pods_of(self, request: MetricOf) -> tuple[str, ...]:
        key = (request.namespace, request.label_selector)
        names = self._pods.get(key, time.monotonic())
        if names is None:
            names = await self._cluster.pod_names(*key)
            self._pods.put(key, names, time.monotonic())
        return names


def as_metrics_error(error: ApiError) -> MetricsError:
    return MetricsError(Reason.ServiceUnavailable, f"the API server cannot be asked: {error}")
