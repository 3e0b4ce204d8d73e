"""Failures outside the containers: of scheduling, of the node and of its devices."""

import re
from collections.abc import Iterator, Sequence

from halimede_operator.core.placement.devices import devices_in, held_devices
from halimede_operator.core.pods.failure import Failure, Reason, Stage
from halimede_operator.core.pods.fields import container_statuses
from halimede_operator.core.pods.kubelet_events import waits_for_device_claim
from halimede_operator.core.reading import (
    at,
    at_rest,
    clean,
    condition,
    moment_at,
    name_at,
    objects_at,
    seconds_before,
    text_at,
)
from halimede_operator.core.snapshot import Object, Shortage


def ended_pod_failure(pod: Object, name: str) -> Failure:
    """Why a pod of phase Failed or Succeeded has ended."""
    reason = name_at(pod, "status", "reason") or name_at(pod, "status", "phase")
    text = at_rest(text_at(pod, "status", "message"))
    if reason == "UnexpectedAdmissionError" and "devices unavailable" in text:
        kind = Reason.INSUFFICIENT_DEVICES
    elif reason == "NodeLost":
        kind = Reason.NODE_LOST
    else:
        kind = Reason.EVICTED if reason == "Evicted" else Reason.POD_FAILED
    on = f" on node {node}" if (node := name_at(pod, "spec", "nodeName")) else ""
    times = (moment_at(status, "state", "terminated", "finishedAt") for status in container_statuses(pod))
    time = max((t for t in times if t), default=moment_at(pod, "status", "startTime"))
    return Failure(kind, clean(f"pod {name}{on}: {reason}: {text}"), Stage.PLACED, pod=name, time=time)


_LACKS_DEVICE = re.compile(r"Insufficient nvidia\.com/|cannot allocate all claims")
_NO_SUCH_NODE = re.compile(r"node\(s\) didn't match Pod's node affinity/selector")


_NOISE = re.compile(
    r" +(?:(?:(?:no new claims to deallocate|still not schedulable), *)?preemption: .*|(?<=\. )not found)$"
)
"""What the scheduler appends: whether other pods could be evicted, or that no plugin helps. It is never the cause."""


def scheduling_failures(pod: Object, name: str) -> Iterator[Failure]:
    """Why no node fits, as the scheduler reports it."""
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return
    text = at_rest(text_at(scheduled, "message"))
    # The operator's own node affinity leaves out nodes without devices that fit.
    is_affinity = requests_resource(pod) and _NO_SUCH_NODE.search(text) is not None
    lacks = is_affinity or _LACKS_DEVICE.search(text) is not None
    reason = Reason.INSUFFICIENT_DEVICES if lacks else Reason.UNSCHEDULABLE
    why = "" if text_at(scheduled, "reason") == "Unschedulable" else f"{name_at(scheduled, 'reason')}: "
    time = moment_at(scheduled, "lastTransitionTime")
    cause = _NOISE.sub("", text)
    noise = text[len(cause) :]
    yield Failure(reason, clean(f"pod {name}: {why}{cause}"), Stage.PLACED, pod=name, time=time, detail=clean(noise))


def waits_for_devices(pod: Object) -> bool:
    """Whether the pod requests devices, and the scheduler found no node for it.

    It may not say that devices are missing: nodes without such devices do not match the pod's affinity either.
    """
    is_waiting = condition(pod, "PodScheduled").get("status") == "False"
    return is_waiting and at(pod, "metadata", "deletionTimestamp") is None and requests_devices(pod)


def requests_devices(pod: Object) -> bool:
    """Of a resource, or with a claim."""
    return requests_resource(pod) or bool(objects_at(pod, "spec", "resourceClaims"))


def requests_resource(pod: Object) -> bool:
    return any(any(devices_in(at(each, "resources", "limits"))) for each in objects_at(pod, "spec", "containers"))


SCHEDULER_LIMIT_S = 10.0
"""By then a running scheduler has set the pod's condition PodScheduled, if only to report that no node fits."""


def waits_for_scheduler(pod: Object) -> bool:
    """Whether no scheduler has looked at the pod yet."""
    return (
        text_at(pod, "status", "phase") == "Pending"
        and not text_at(pod, "spec", "nodeName")
        and at(pod, "metadata", "deletionTimestamp") is None
        and not condition(pod, "PodScheduled")
    )


def scheduler_failures(pod: Object, name: str, now: str) -> Iterator[Failure]:
    """The failure of a pod that its scheduler ignores, probably because that scheduler does not run."""
    created = moment_at(pod, "metadata", "creationTimestamp")
    if (
        not waits_for_scheduler(pod)
        or waits_for_device_claim(pod)
        or created is None
        or created > seconds_before(now, SCHEDULER_LIMIT_S)
    ):
        return
    scheduler = name_at(pod, "spec", "schedulerName")
    text = f"no scheduler has looked at it: its schedulerName is '{scheduler}'; does that scheduler run?"
    yield Failure(Reason.UNSCHEDULABLE, clean(f"pod {name}: {text}"), Stage.PLACED, pod=name, time=created)


def node_failures(pod: Object, name: str) -> Iterator[Failure]:
    """The failure of a pod on a lost node.

    A lost node cannot report it. Controllers set its pods to not ready, while their containers still appear ready.
    """
    ready = condition(pod, "Ready")
    by_controller = (
        text_at(ready, "status") in {"False", "Unknown"}
        and condition(pod, "ContainersReady").get("status") == "True"
        and not objects_at(pod, "spec", "readinessGates")
    )
    is_reported_lost = "NodeLost" in {text_at(pod, "status", "reason"), text_at(ready, "reason")}
    if not (by_controller or is_reported_lost or text_at(pod, "status", "phase") == "Unknown"):
        return
    node = name_at(pod, "spec", "nodeName") or "unknown"
    message = clean(f"pod {name}: its node {node} does not answer. {at_rest(text_at(pod, 'status', 'message'))}")
    yield Failure(Reason.NODE_LOST, message, Stage.SERVING, pod=name, time=moment_at(ready, "lastTransitionTime"))


def unhealthy_device_failures(pod: Object, name: str) -> Iterator[Failure]:
    """Failures for devices that the kubelet reports as unhealthy."""
    for status in container_statuses(pod):
        for resource in objects_at(status, "allocatedResourcesStatus"):
            for device in objects_at(resource, "resources"):
                if text_at(device, "health") != "Unhealthy":
                    continue
                which = f"device {name_at(device, 'resourceID')} ({name_at(resource, 'name')})"
                text = f"{which} is unhealthy: {at_rest(text_at(device, 'message'))}".removesuffix(": ")
                container = name_at(status, "name")
                message = clean(f"pod {name}: container {container}: {text}")
                yield Failure(Reason.DEVICE_UNHEALTHY, message, Stage.SERVING, pod=name, container=container)


def lost_device_failures(pod: Object, name: str, shortages: Sequence[Shortage]) -> Iterator[Failure]:
    """Failures for devices that the node no longer has: a kubelet reports them as healthy."""
    for node, held in held_devices([pod]).items():
        for short in shortages:
            if short.resource in held:
                whose = "one that a pod of ours has is gone" if short.has else "the pod's is gone"
                text = f"node {node} has {short.has} {short.resource}, and pods hold {short.held}: {whose}"
                yield Failure(Reason.DEVICE_LOST, clean(f"pod {name}: {text}"), Stage.SERVING, pod=name)
