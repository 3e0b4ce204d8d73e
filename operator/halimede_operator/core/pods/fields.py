"""The fields of a pod that several readers need."""

from collections.abc import Mapping
from typing import Any

from halimede_operator.core.reading import at, clean, objects_at, text_at
from halimede_operator.core.snapshot import Object

FETCH, SERVER = "fetch", "server"
"""Names of the containers."""


def container_statuses(pod: Object) -> list[Mapping[str, Any]]:
    """The statuses of all containers, init containers first."""
    return objects_at(pod, "status", "initContainerStatuses") + objects_at(pod, "status", "containerStatuses")


def container_status(pod: Object, container: str) -> Mapping[str, Any]:
    """The status of the container of this name; empty if there is none."""
    return next((status for status in container_statuses(pod) if status.get("name") == container), {})


def has_started(status: Mapping[str, Any]) -> bool:
    """Whether the container of this status was started at least once."""
    return any(
        at(status, *path) is not None
        for path in (("state", "running"), ("state", "terminated"), ("lastState", "terminated"))
    )


def image_of(pod: Object, container: str) -> str:
    """A container's image as in the pod's spec; "" if there is none."""
    both = objects_at(pod, "spec", "initContainers") + objects_at(pod, "spec", "containers")
    return next((clean(text_at(c, "image"), 512) for c in both if text_at(c, "name") == container), "")


def memory_limit(pod: Object, container: str) -> str:
    """A container's memory limit as the pod has it, `512Mi`; "" if there is none."""
    both = objects_at(pod, "spec", "initContainers") + objects_at(pod, "spec", "containers")
    limits = (at(each, "resources", "limits", "memory") for each in both if text_at(each, "name") == container)
    return clean(str(next((limit for limit in limits if isinstance(limit, str | int)), "")), 64)
