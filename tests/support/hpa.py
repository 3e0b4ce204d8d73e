"""The algorithm of Kubernetes' HorizontalPodAutoscaler: what its controller would decide, of values alone.

It follows `horizontal.go` and `replica_calculator.go` of k8s.io/kubernetes v1.36 (pkg/controller/podautoscaler), for
Pods metrics and for Object and External metrics with `AverageValue` or `Value`. Recordings of the real controller check it.

What surprises readers of the documentation, each checked in the sources and by a recording or a test:

- Pods metrics ignore readiness: a pod that runs counts with its sample, whether it is ready or not. A pod that runs
  and has no sample counts as 0 when replicas are added and as exactly the target when they are removed. A pending pod
  counts as 0 when replicas are added, and not at all when they are removed.
- The average of the pods is rounded down to a thousandth before it is compared.
- Without `behavior` each sync may double the replicas, or add up to 4; nothing limits the sum over several syncs. With a
  `behavior`, even an empty one, that is limited in each 15 seconds instead.
- A metric that fails forbids to remove replicas, and to keep them: only where the others would add some or keep the
  number does a decision stand.
- A `Value` target multiplies by the ready pods, those that are being deleted among them; `AverageValue` by none.
- At 0 replicas the controller does nothing, unless it was the one that went to 0 (feature gate HPAScaleToZero).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

DEFAULT_TOLERANCE = 0.1
DEFAULT_DOWN_WINDOW_S = 300.0
UP_FACTOR = 2
UP_MINIMUM = 4


class Phase(Enum):
    PENDING = "Pending"
    RUNNING = "Running"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    phase: Phase = Phase.RUNNING
    is_ready: bool = True
    is_deleting: bool = False


class Kind(Enum):
    """What a metric's target is about."""

    PODS = "Pods"
    AVERAGE = "Object or External, AverageValue"
    VALUE = "Object or External, Value"


@dataclass(frozen=True, slots=True)
class Metric:
    """The samples of a Pods metric are by pod, those of the others are one value."""

    name: str
    target_milli: int
    kind: Kind = Kind.PODS


Samples = Mapping[str, Mapping[str, int] | int | None]
"""By the metric's name, in thousandths: by pod for a Pods metric, else the value. None: it could not be read."""


class Select(Enum):
    MAX = "Max"
    MIN = "Min"
    DISABLED = "Disabled"


@dataclass(frozen=True, slots=True)
class Policy:
    value: int
    period_s: int
    is_percent: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """Of one direction. window_s: None for the flag of the controller."""

    window_s: float | None
    policies: tuple[Policy, ...]
    select: Select = Select.MAX
    tolerance: float = DEFAULT_TOLERANCE


DEFAULT_UP = Rules(0.0, (Policy(4, 15, is_percent=False), Policy(100, 15, is_percent=True)))
DEFAULT_DOWN = Rules(None, (Policy(100, 15, is_percent=True),))


@dataclass(frozen=True, slots=True)
class Behavior:
    up: Rules = DEFAULT_UP
    down: Rules = DEFAULT_DOWN

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "Behavior":
        """`spec.behavior` as a user writes it; the API server adds these defaults."""
        up, down = (document.get(name) or {} for name in ("scaleUp", "scaleDown"))
        return cls(_rules(up, DEFAULT_UP), _rules(down, DEFAULT_DOWN))


def _rules(document: Mapping[str, Any], default: Rules) -> Rules:
    policies = tuple(
        Policy(each["value"], each["periodSeconds"], each["type"] == "Percent")
        for each in document.get("policies") or ()
    )
    return Rules(
        window_s=document.get("stabilizationWindowSeconds", default.window_s),
        policies=policies or default.policies,
        select=Select(document.get("selectPolicy", default.select.value)),
        tolerance=float(document.get("tolerance", default.tolerance)),
    )


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """The spec of an HPA. behavior: None where it has none, which is not the same as the defaults."""

    metrics: tuple[Metric, ...]
    max_replicas: int
    min_replicas: int = 1
    behavior: Behavior | None = None

    @classmethod
    def parse(cls, spec: Mapping[str, Any]) -> "Autoscaler":
        """`spec` of a HorizontalPodAutoscaler."""
        return cls(
            metrics=tuple(_metric(each) for each in spec["metrics"]),
            max_replicas=spec["maxReplicas"],
            min_replicas=spec.get("minReplicas", 1),
            behavior=Behavior.parse(spec["behavior"]) if "behavior" in spec else None,
        )


def _metric(document: Mapping[str, Any]) -> Metric:
    source = document[document["type"].lower()]
    target, name = source["target"], source["metric"]["name"]
    if document["type"] == "Pods":
        return Metric(name, milli(target["averageValue"]))
    if target["type"] == "Value":
        return Metric(name, milli(target["value"]), Kind.VALUE)
    return Metric(name, milli(target["averageValue"]), Kind.AVERAGE)


def milli(quantity: str) -> int:
    """A quantity such as `4` or `800m`, in thousandths."""
    return int(quantity[:-1]) if quantity.endswith("m") else round(float(quantity) * 1000)


@dataclass(frozen=True, slots=True)
class Target:
    """The Deployment. replicas: its spec; seen: the pods that its status counts."""

    replicas: int
    seen: int
    pods: tuple[Pod, ...]


@dataclass(slots=True)
class _Event:
    change: int
    at_s: float
    is_outdated: bool = False


@dataclass(slots=True)
class Controller:
    """The controller's memory of one HPA; each call of `decide` is one sync.

    down_window_s: its flag --horizontal-pod-autoscaler-downscale-stabilization.
    can_scale_to_zero: the feature gate HPAScaleToZero.
    """

    down_window_s: float = DEFAULT_DOWN_WINDOW_S
    can_scale_to_zero: bool = False
    _recommended: list[tuple[int, float]] = field(default_factory=list)
    _ups: list[_Event] = field(default_factory=list)
    _downs: list[_Event] = field(default_factory=list)
    _has_gone_to_zero: bool = False

    def decide(self, spec: Autoscaler, target: Target, samples: Samples, now_s: float) -> int:
        """The replicas that it sets, or leaves as they are."""
        if not self._recommended:
            self._recommended.append((target.replicas, now_s))
        if target.replicas > spec.max_replicas:
            return self._rescaled(spec, target.replicas, spec.max_replicas, now_s)
        if target.replicas == 0:
            may_wake = self._has_gone_to_zero and (spec.min_replicas != 0 or _has_value(spec))
            if not may_wake:
                return 0
        elif target.replicas < spec.min_replicas:
            return self._rescaled(spec, target.replicas, spec.min_replicas, now_s)
        wanted = recommend(spec, target, samples)
        if wanted is None:
            return target.replicas
        if spec.behavior is None:
            wanted = self._stabilized(wanted, now_s)
            wanted = _limited(wanted, target.replicas, spec)
        else:
            rules = self._with_flag(spec.behavior)
            wanted = self._stabilized_by(rules, wanted, target.replicas, now_s)
            wanted = self._limited_by(rules, wanted, target.replicas, spec, now_s)
        if target.replicas == 0:
            wanted = max(wanted, spec.min_replicas)
        return self._rescaled(spec, target.replicas, wanted, now_s)

    def _rescaled(self, spec: Autoscaler, before: int, after: int, now_s: float) -> int:
        if before == after:
            return after
        if self.can_scale_to_zero:
            self._has_gone_to_zero = after == 0 and spec.min_replicas == 0 and _has_value(spec)
        if spec.behavior is not None:
            grows = after > before
            rules = spec.behavior.up if grows else spec.behavior.down
            longest_s = max((policy.period_s for policy in rules.policies), default=0)
            _remember(self._ups if grows else self._downs, abs(after - before), longest_s, now_s)
        return after

    def _with_flag(self, behavior: Behavior) -> Behavior:
        down = behavior.down
        if down.window_s is not None:
            return behavior
        return Behavior(behavior.up, Rules(self.down_window_s, down.policies, down.select, down.tolerance))

    def _stabilized(self, wanted: int, now_s: float) -> int:
        """The highest recommendation of the window, for an HPA without `behavior`."""
        self._recommended = [each for each in self._recommended if each[1] >= now_s - self.down_window_s]
        highest = max((count for count, _ in self._recommended), default=wanted)
        self._recommended.append((wanted, now_s))
        return max(highest, wanted)

    def _stabilized_by(self, behavior: Behavior, wanted: int, current: int, now_s: float) -> int:
        """Between the lowest recommendation of the one window and the highest of the other."""
        up_s, down_s = behavior.up.window_s or 0.0, behavior.down.window_s or 0.0
        self._recommended = [each for each in self._recommended if each[1] >= now_s - max(up_s, down_s)]
        low = min([wanted, *(count for count, at_s in self._recommended if at_s > now_s - up_s)])
        high = max([wanted, *(count for count, at_s in self._recommended if at_s > now_s - down_s)])
        self._recommended.append((wanted, now_s))
        return min(max(current, low), high)

    def _limited_by(self, behavior: Behavior, wanted: int, current: int, spec: Autoscaler, now_s: float) -> int:
        if wanted > current:
            limits = [self._limit(policy, current, now_s, +1) for policy in behavior.up.policies]
            limit = _selected(limits, behavior.up.select, current, is_up=True)
            return min(wanted, spec.max_replicas, max(limit, current))
        if wanted < current:
            limits = [self._limit(policy, current, now_s, -1) for policy in behavior.down.policies]
            limit = _selected(limits, behavior.down.select, current, is_up=False)
            return max(wanted, spec.min_replicas, min(limit, current))
        return wanted

    def _limit(self, policy: Policy, current: int, now_s: float, sign: int) -> int:
        """What the policy allows, from the replicas at the beginning of its period."""
        added, removed = (
            sum(event.change for event in events if event.at_s > now_s - policy.period_s)
            for events in (self._ups, self._downs)
        )
        start = current - added + removed
        if not policy.is_percent:
            return start + sign * policy.value
        if sign > 0:
            return math.ceil(start * (1 + policy.value / 100))
        return int(start * (1 - policy.value / 100))


def recommend(spec: Autoscaler, target: Target, samples: Samples) -> int | None:
    """The highest proposal of the metrics, None where the failed ones forbid a decision."""
    behavior = spec.behavior or Behavior()
    tolerances = (behavior.down.tolerance, behavior.up.tolerance)
    proposals = []
    for metric in spec.metrics:
        sample = samples.get(metric.name)
        match sample:
            case None:
                proposal = None
            case int():
                of_value = _of_average if metric.kind is Kind.AVERAGE else _of_value
                proposal = of_value(metric, sample, target, tolerances)
            case _:
                proposal = _of_pods(metric, dict(sample), target, tolerances)
        proposals.append(proposal)
    valid = [each for each in proposals if each is not None]
    if not valid or (len(valid) < len(proposals) and max(valid) < target.replicas):
        return None
    return max(valid)


def _of_average(metric: Metric, sample: int, target: Target, tolerances: tuple[float, float]) -> int:
    # Without a pod that is counted the ratio is infinite, or no number: never within the tolerance.
    if target.seen and _is_within(sample / (metric.target_milli * target.seen), tolerances):
        return target.seen
    return math.ceil(sample / metric.target_milli)


def _of_value(metric: Metric, sample: int, target: Target, tolerances: tuple[float, float]) -> int | None:
    ratio = sample / metric.target_milli
    if target.replicas == 0:
        return math.ceil(ratio)
    if _is_within(ratio, tolerances):
        return target.replicas
    if not target.pods:
        return None
    return math.ceil(ratio * sum(pod.phase is Phase.RUNNING and pod.is_ready for pod in target.pods))


def _of_pods(metric: Metric, values: dict[str, int], target: Target, tolerances: tuple[float, float]) -> int | None:
    if not target.pods or not values:
        return None
    pending, missing = set(), set()
    with_sample = 0
    for pod in target.pods:
        if pod.is_deleting or pod.phase is Phase.FAILED:
            values.pop(pod.name, None)
        elif pod.phase is Phase.PENDING:
            values.pop(pod.name, None)
            pending.add(pod.name)
        elif pod.name not in values:
            missing.add(pod.name)
        else:
            with_sample += 1
    if not values:
        return None
    ratio = _ratio(values, metric.target_milli)
    counts_pending = bool(pending) and ratio > 1
    if not counts_pending and not missing:
        return target.replicas if _is_within(ratio, tolerances) else math.ceil(ratio * with_sample)
    if ratio < 1:
        values |= dict.fromkeys(missing, metric.target_milli)
    elif ratio > 1:
        values |= dict.fromkeys(missing, 0)
    if counts_pending:
        values |= dict.fromkeys(pending, 0)
    new_ratio = _ratio(values, metric.target_milli)
    if _is_within(new_ratio, tolerances) or (ratio - 1) * (new_ratio - 1) < 0:
        return target.replicas
    wanted = math.ceil(new_ratio * len(values))
    if (new_ratio < 1 and wanted > target.replicas) or (new_ratio > 1 and wanted < target.replicas):
        return target.replicas
    return wanted


def _ratio(values: Mapping[str, int], target_milli: int) -> float:
    return (sum(values.values()) // len(values)) / target_milli


def _is_within(ratio: float, tolerances: tuple[float, float]) -> bool:
    down, up = tolerances
    return 1.0 - down <= ratio <= 1.0 + up


def _limited(wanted: int, current: int, spec: Autoscaler) -> int:
    """Without `behavior`: between the bounds, and at most twice as many, or 4."""
    highest = min(spec.max_replicas, max(UP_FACTOR * current, UP_MINIMUM))
    return spec.min_replicas if wanted < spec.min_replicas else min(wanted, highest)


def _selected(limits: Sequence[int], select: Select, current: int, is_up: bool) -> int:
    if select is Select.DISABLED:
        return current
    furthest = max if is_up == (select is Select.MAX) else min
    return furthest(limits)


def _remember(events: list[_Event], change: int, longest_s: int, now_s: float) -> None:
    """Replace the last event that no policy of its direction counts any more, as the controller does."""
    for event in events:
        event.is_outdated = event.is_outdated or event.at_s < now_s - longest_s
    outdated = [number for number, event in enumerate(events) if event.is_outdated]
    if outdated:
        events[outdated[-1]] = _Event(change, now_s)
    else:
        events.append(_Event(change, now_s))


def _has_value(spec: Autoscaler) -> bool:
    return any(metric.kind is not Kind.PODS for metric in spec.metrics)
