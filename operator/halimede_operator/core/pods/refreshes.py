"""Pods whose Secrets and ConfigMaps their kubelet should read again now.

A kubelet brings a changed Secret or ConfigMap into a pod when it looks at the pod, every 60 to 90 s. It looks at once
when the pod changes, even if only an annotation does. The operator may not read Secrets. So while a pod fails for a
cause that a Secret or ConfigMap may repair, it is changed every few seconds, until its failure is old.
"""

from collections.abc import Sequence

from halimede_operator.core.pods.containers import Container
from halimede_operator.core.pods.fields import FETCH, container_statuses
from halimede_operator.core.pods.read import placed_at
from halimede_operator.core.reading import at, integer_at, moment_at, seconds_before, text_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import GROUP
from halimede_spec.fetch_exit import OF_CA_BUNDLE, FetchExit

REFRESH_S = 8.0
"""So that a pod is ready 15 s after the repair: a fetch that waits for it tries again within 5 s."""
REFRESHED_FOR_S = 600.0
"""After that the kubelet's own period is enough."""
MOST_REFRESHED = 32
"""Pods of one object that are refreshed together, because each is a write. The others have the kubelets' own period."""
REFRESHED = f"{GROUP}/volumes-refreshed"
"""Annotation of a pod: when its kubelet was last made to look at it."""


def failing_for_its_volumes(pods: Sequence[Object], now: str) -> list[Object]:
    """The pods to refresh every REFRESH_S. now: as `moment_at` writes it."""
    since = seconds_before(now, REFRESHED_FOR_S)
    return [pod for pod in pods if _failed_at(pod) > since and "deletionTimestamp" not in pod["metadata"]]


def to_refresh(pods: Sequence[Object], now: str) -> list[Object]:
    """Those of them that were not refreshed for REFRESH_S, those that wait longest first; at most MOST_REFRESHED."""
    since = seconds_before(now, REFRESH_S)
    due = sorted((pod for pod in pods if _last_refresh(pod) <= since), key=_last_refresh)
    return due[:MOST_REFRESHED]


def _last_refresh(pod: Object) -> str:
    return moment_at(at(pod, "metadata", "annotations"), REFRESHED) or _failed_at(pod)


def _failed_at(pod: Object) -> str:
    """Since when the pod fails for what a Secret or ConfigMap may repair; "" if it does not."""
    for container in (Container(pod, "", status) for status in container_statuses(pod)):
        if container.waits_for == "CreateContainerConfigError":
            return placed_at(pod)
        ended = container.last_end
        # At a restart the kubelet looks at the pod anyway, and each run that fails begins another REFRESHED_FOR_S.
        is_restarted = container.waits_for == "CrashLoopBackOff"
        if container.name != FETCH or ended is None or container.is_end_past or is_restarted:
            continue
        code = integer_at(ended, "exitCode")
        if code == FetchExit.AUTH or (code == FetchExit.UNREACHABLE and OF_CA_BUNDLE in text_at(ended, "message")):
            return moment_at(ended, "finishedAt") or ""
    return ""
