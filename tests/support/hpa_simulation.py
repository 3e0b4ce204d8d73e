"""Simulates a model whose replicas an HPA sets: `PYTHONPATH=tests python -m support.hpa_simulation` prints a table.

Requests arrive at random (Poisson) and go to a random ready pod, as kube-proxy distributes connections. A pod has
instances that each compute one request at a time, in a fixed time, and one queue. Prometheus scrapes each pod, and the
HPA's model reads the last samples at each sync. Time is a number here; nothing waits.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from halimede_operator.core.scaling.presets import BEHAVIOR, PRESETS
from halimede_operator.core.spec.types import Preset
from support.hpa import Autoscaler, Behavior, Controller, Metric, Phase, Pod, Samples, Target, milli

BUSY_WINDOW_S = 15.0
MAX_SAMPLE_AGE_S = 30.0

Load = Callable[[float], float]
"""Requests per second at a time in seconds."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model: seconds of one request on one instance, instances of a pod, seconds from a new pod to a running and then
    to a ready one, seconds after which an answer is late."""

    service_s: float = 0.1
    instances: int = 1
    pending_s: float = 2.0
    loading_s: float = 18.0
    deadline_s: float = 2.0

    def needed(self, rate: float) -> int:
        """The fewest pods that can keep up with a rate."""
        return max(1, math.floor(rate * self.service_s / self.instances) + 1)


@dataclass(frozen=True, slots=True)
class Pipeline:
    scrape_s: float = 15.0
    sync_s: float = 15.0


@dataclass(slots=True)
class Outcome:
    """changes: (time, replicas) whenever the HPA set another number; ready: the same for pods that are ready."""

    changes: list[tuple[float, int]] = field(default_factory=list)
    ready: list[tuple[float, int]] = field(default_factory=list)
    sent: int = 0
    late: int = 0
    pod_seconds: float = 0.0

    @property
    def late_share(self) -> float:
        return self.late / max(1, self.sent)

    @property
    def most(self) -> int:
        return max(count for _, count in self.changes)

    @property
    def reversals(self) -> int:
        """How often an increase follows a decrease."""
        counts = [count for _, count in self.changes]
        signs = [after > before for before, after in pairwise(counts)]
        return sum(up and not earlier for earlier, up in pairwise(signs))

    def wanted_by(self, count: int, since_s: float) -> float:
        """Seconds from a time to the HPA's first decision for at least this many; infinite without one."""
        return next((at - since_s for at, each in self.changes if at >= since_s and each >= count), math.inf)

    def ready_by(self, count: int, since_s: float) -> float:
        """Like `wanted_by`, to so many ready pods."""
        return next((at - since_s for at, each in self.ready if at >= since_s and each >= count), math.inf)

    def last(self, until_s: float = math.inf) -> int:
        return next(count for at, count in reversed(self.changes) if at <= until_s)


class _Server:
    """One pod with its queue."""

    def __init__(self, name: str, served: Served, created_s: float, ready_s: float, scrape_offset_s: float) -> None:
        self.name = name
        self.created_s = created_s
        self.ready_s = ready_s
        self.scrape_offset_s = scrape_offset_s
        self._served = served
        self._free_at = [ready_s] * served.instances
        self._starts: deque[float] = deque()

    def take(self, now_s: float) -> float:
        """Accept a request; return the seconds until its answer."""
        start = max(now_s, self._free_at[0])
        end = start + self._served.service_s
        heapq.heapreplace(self._free_at, end)
        self._starts.append(start)
        return end - now_s

    def scrape(self, now_s: float) -> dict[str, int]:
        """Its metrics, in thousandths."""
        service_s = self._served.service_s
        while self._starts and self._starts[0] + service_s < now_s - BUSY_WINDOW_S:
            self._starts.popleft()
        queued = sum(start > now_s for start in self._starts)
        executing = sum(free > now_s for free in self._free_at)
        busy_s = sum(
            max(0.0, min(start + service_s, now_s) - max(start, now_s - BUSY_WINDOW_S)) for start in self._starts
        )
        return {
            "halimede_queue_requests": queued * 1000,
            "halimede_inflight_requests": (queued + executing) * 1000,
            "halimede_instance_busy_ratio": round(1000 * busy_s / BUSY_WINDOW_S / self._served.instances),
        }


class _Cluster:
    """The pods of a Deployment and the last samples of each."""

    def __init__(self, served: Served, pipeline: Pipeline, chance: random.Random) -> None:
        self._served, self._pipeline, self._chance = served, pipeline, chance
        self._number = 0
        self._samples: dict[str, tuple[float, dict[str, int]]] = {}
        self._scrapes: list[tuple[float, str]] = []
        self.servers: list[_Server] = []
        self._ready: list[_Server] = []
        self._ready_until_s = 0.0

    def scale(self, count: int, now_s: float, is_warm: bool = False) -> None:
        while len(self.servers) < count:
            self._number += 1
            ready_s = now_s if is_warm else now_s + self._served.pending_s + self._served.loading_s
            offset_s = self._chance.uniform(0, self._pipeline.scrape_s)
            self.servers.append(_Server(f"p{self._number}", self._served, now_s, ready_s, offset_s))
            heapq.heappush(self._scrapes, (ready_s + offset_s, self.servers[-1].name))
        # As a ReplicaSet: those that are not ready first, then the newest.
        self.servers.sort(key=lambda server: (server.ready_s > now_s, server.created_s))
        del self.servers[count:]
        self._ready_until_s = now_s

    def ready(self, now_s: float) -> list[_Server]:
        if now_s >= self._ready_until_s:
            self._ready = [server for server in self.servers if server.ready_s <= now_s]
            self._ready_until_s = min((each.ready_s for each in self.servers if each.ready_s > now_s), default=math.inf)
        return self._ready

    def scrape_until(self, now_s: float) -> None:
        if not self._scrapes or self._scrapes[0][0] > now_s:
            return
        by_name = {server.name: server for server in self.servers}
        while self._scrapes and self._scrapes[0][0] <= now_s:
            at_s, name = heapq.heappop(self._scrapes)
            if name in by_name:
                self._samples[name] = (at_s, by_name[name].scrape(at_s))
                heapq.heappush(self._scrapes, (at_s + self._pipeline.scrape_s, name))
            else:
                self._samples.pop(name, None)

    def target(self, now_s: float) -> Target:
        pods = tuple(
            Pod(
                server.name,
                Phase.RUNNING if now_s >= server.created_s + self._served.pending_s else Phase.PENDING,
                is_ready=server.ready_s <= now_s,
            )
            for server in self.servers
        )
        return Target(len(pods), len(pods), pods)

    def samples(self, metrics: tuple[Metric, ...], now_s: float) -> Samples:
        """None for a metric without any sample that is new enough."""
        fresh = {name: values for name, (at_s, values) in self._samples.items() if at_s >= now_s - MAX_SAMPLE_AGE_S}
        return {
            metric.name: {name: values[metric.name] for name, values in fresh.items()} or None for metric in metrics
        }


def simulate(
    spec: Autoscaler,
    load: Load,
    *,
    seconds: float,
    served: Served = Served(),
    pipeline: Pipeline = Pipeline(),
    seed: int = 1,
    first: int = 1,
) -> Outcome:
    """first: the replicas at the beginning, which are ready."""
    chance = random.Random(seed)
    controller = Controller()
    cluster = _Cluster(served, pipeline, chance)
    cluster.scale(first, 0.0, is_warm=True)
    outcome = Outcome(changes=[(0.0, first)], ready=[(0.0, first)])
    sync_s = chance.uniform(0, pipeline.sync_s)
    highest = max(load(each) for each in range(int(seconds) + 1)) or 1.0
    now_s = 0.0
    ready = cluster.ready(0.0)
    while now_s < seconds:
        before_s, now_s = now_s, now_s + chance.expovariate(highest)
        while sync_s <= now_s:
            cluster.scrape_until(sync_s)
            target = cluster.target(sync_s)
            wanted = controller.decide(spec, target, cluster.samples(spec.metrics, sync_s), sync_s)
            if wanted != target.replicas:
                cluster.scale(wanted, sync_s)
                outcome.changes.append((sync_s, wanted))
            sync_s += pipeline.sync_s
        cluster.scrape_until(now_s)
        outcome.pod_seconds += len(cluster.servers) * (now_s - before_s)
        ready = cluster.ready(now_s)
        if len(ready) != outcome.ready[-1][1]:
            outcome.ready.append((now_s, len(ready)))
        # Thinning: the rate of candidates is the highest, and each is a request with the rate of its moment.
        if chance.random() * highest < load(now_s) and ready:
            outcome.sent += 1
            outcome.late += chance.choice(ready).take(now_s) > served.deadline_s
    return outcome


def steps(*parts: tuple[float, float]) -> Load:
    """Rates from times on, the first of which is 0."""
    backwards = parts[::-1]

    def load(now_s: float) -> float:
        for at_s, rate in backwards:
            if now_s >= at_s:
                return rate
        raise ValueError(now_s)

    return load


def ramp(low: float, high: float, from_s: float, to_s: float) -> Load:
    def load(now_s: float) -> float:
        share = min(1.0, max(0.0, (now_s - from_s) / (to_s - from_s)))
        return low + share * (high - low)

    return load


def day(low: float, high: float) -> Load:
    """Least at midnight, most at noon."""
    return lambda now_s: low + (high - low) * (1 - math.cos(2 * math.pi * now_s / 86_400)) / 2


def preset(name: Preset, max_replicas: int = 8, behavior: Mapping[str, Any] = BEHAVIOR) -> Autoscaler:
    """The HPA of a preset. behavior: as in its spec; an empty one has Kubernetes' defaults."""
    metrics = tuple(Metric(goal.metric, milli(goal.target)) for goal in PRESETS[name])
    return Autoscaler(metrics, max_replicas, behavior=Behavior.parse(behavior))


def main() -> None:
    loads: dict[str, tuple[Load, float]] = {
        "steady 0.6": (steps((0, 6.0)), 3600),
        "steady 2.4": (steps((0, 24.0)), 3600),
        "step 1-4-1": (steps((0, 6.0), (300, 24.0), (900, 6.0)), 2400),
        "spike 10 s": (steps((0, 6.0), (300, 60.0), (310, 6.0)), 1500),
        "ramp 10 min": (ramp(4.0, 40.0, 300, 900), 1800),
    }
    print(f"{'preset':12} {'behavior':9} {'load':12}   late most ups-after-downs wanted ready pod-s  changes")
    for name in Preset:
        for title, behavior in (("ours", BEHAVIOR), ("default", {})):
            for kind, (load, seconds) in loads.items():
                found = simulate(preset(name, behavior=behavior), load, seconds=seconds)
                changes = " ".join(f"{at:.0f}:{count}" for at, count in found.changes[1:14])
                print(
                    f"{name:12} {title:9} {kind:12} {found.late_share:6.2%} {found.most:4} {found.reversals:15} "
                    f"{found.wanted_by(3, 300):6.0f} {found.ready_by(3, 300):5.0f} {found.pod_seconds:6.0f}  {changes}"
                )


if __name__ == "__main__":
    main()
