"""The numbers of the page on autoscaling are those of the code."""

import math
import re
from pathlib import Path

from halimede.core.observe.busy import STEPS
from halimede_operator.cluster.works import PERIOD_S
from halimede_operator.core.children.autoscaler import FALLBACK_AFTER
from halimede_operator.core.scaling.presets import BEHAVIOR, BUSY, FRESH, INFLIGHT, PRESETS, QUEUE
from halimede_operator.core.spec.autoscaling import LONGEST_WINDOW_SECONDS
from halimede_operator.core.spec.durations import microseconds
from halimede_operator.core.spec.quantities import quantity
from halimede_operator.core.spec.types import Preset
from support.hpa import DEFAULT_TOLERANCE, UP_FACTOR, UP_MINIMUM

PAGE = (Path(__file__).parents[2] / "docs" / "pages" / "autoscaling.md").read_text()
MEANINGS = {
    QUEUE: "the requests that wait",
    INFLIGHT: "the requests that wait or are executed",
    BUSY: f"the busy share of the busiest model's instances, as a mean of {STEPS} s",
}
WORDS = {2: "twice as many pods"}
OF_OTHERS = r"k8s|KEDA 2\.17|v1alpha1|v2\b|s3://|maxReplicas: 8|idleFor: 10m|\"desiredReplicas\":3|1 -> 3"
"""Names, versions, and values of examples."""


def number(text: str) -> str:
    found = quantity(text)
    assert found is not None
    return f"{float(found):g}"


def row(preset: Preset) -> str:
    first, *others = PRESETS[preset]
    metrics = f"`{first.metric}`, {MEANINGS[first.metric]}"
    metrics += "".join(f"; and `{other.metric}` with the target {number(other.target)}" for other in others)
    name = f"`{preset}`" + (" (default)" if preset is Preset.QUEUE else "")
    return f"| {name} | {metrics} | {number(first.target)} |"


def target(preset: Preset, position: int = 0) -> float:
    return float(number(PRESETS[preset][position].target))


def claims() -> list[str]:
    up, down = BEHAVIOR["scaleUp"], BEHAVIOR["scaleDown"]
    (policy,) = down["policies"]
    waiting, busy, pods = 40, 60, 5
    of_queue, of_busy = target(Preset.QUEUE), target(Preset.QUEUE, 1)
    return [
        *map(row, Preset),
        f"within {1 - DEFAULT_TOLERANCE:g} and {1 + DEFAULT_TOLERANCE:g}",
        f"With {waiting} waiting requests, `queue` asks for {math.ceil(waiting / of_queue)} pods.",
        f"{pods} pods that are busy for {busy} % ask for "
        f"ceil({pods} × {busy / 100:g} / {of_busy:g}) = {math.ceil(pods * busy / 100 / of_busy)}",
        f"one decision asks for at most 1 / {target(Preset.GPU):g} times the pods",
        f"when its metrics have asked for it for {up['stabilizationWindowSeconds']} s",
        f"at most to {WORDS[UP_FACTOR]}, or by {UP_MINIMUM} pods, within 15 s",
        f"At most {policy['value']} % of the pods go within {policy['periodSeconds']} s, "
        f"after {down['stabilizationWindowSeconds']} s of less load",
        f"older than {FRESH.removesuffix('s')} s is no sample",
        f"after {FALLBACK_AFTER} in a row the fallback counts",
        f"reads the pods' metrics every {PERIOD_S:g} s",
        f"halimede_queue_requests 11 of {of_queue:g}, halimede_instance_busy_ratio 0.97 of {of_busy:g}",
    ]


def test_every_number_of_the_page_is_one_of_the_code() -> None:
    text = " ".join(PAGE.split())
    for claim in claims():
        assert text.count(claim) == 1, claim
        text = text.replace(claim, "")
    text = re.sub(OF_OTHERS, "", text)
    assert set(re.findall(r"\d+(?:\.\d+)?", text)) <= {"0", "1"}


def test_the_longest_idleness_of_an_hpa_is_the_one_of_the_page() -> None:
    assert "| the HPA wants 0 for `idleFor`, at most `1h` |" in PAGE
    assert microseconds("1h") == LONGEST_WINDOW_SECONDS * 1_000_000
