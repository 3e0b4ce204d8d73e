"""The part of a pod's state that the status needs."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halimede_operator.core.pods.failure import Failure, Stage
from halimede_operator.core.reading import decimal
from halimede_operator.core.snapshot import PodIndex, ServedVersion

DIGEST = re.compile(r"[a-z0-9]{1,16}:[0-9a-f]{32,128}")


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """One fetched model, as the fetch container reported it."""

    name: str
    digest: str | None
    size_bytes: int | None
    fetched_at: str | None


@dataclass(frozen=True, slots=True)
class PodView:
    """The part of a pod's state that the status needs."""

    name: str
    uid: str
    created: str
    placed: str
    """When it got its node, as the cluster reports it; "" before that."""
    node: str
    template_hash: str
    image: str
    """Of the server container, from the pod's spec."""
    is_terminating: bool
    """It is being deleted."""
    has_ended: bool
    """Phase Failed or Succeeded: nothing runs in it, and its ReplicaSet creates another pod."""
    has_started: bool
    """One of its containers has been started."""
    stage: Stage
    failure: Failure | None
    failure_while_serving: Failure | None
    """What is wrong with it although it serves. The server may not have noticed yet."""
    past_failure: Failure | None
    """The last end of a container, if the pod has recovered from it."""
    waits_for: str
    """What the pod waits for, while nothing has failed. A text for people."""
    is_fetching: bool
    """The fetch container runs. It ends by itself if the store does not answer."""
    fetch_ended: str
    """When the model's files were complete, as the cluster reports it; "" before that."""
    fetched: tuple[FetchedModel, ...]
    index: PodIndex | None
    """None: the pod was not asked yet."""
    is_newly_ready: bool
    """It became ready so recently that its index may be older."""

    @property
    def is_active(self) -> bool:
        return not self.is_terminating and not self.has_ended

    @property
    def is_unknown(self) -> bool:
        """Its index could not be read, so what it serves is not known."""
        return self.index is None or self.index.error is not None

    @property
    def age(self) -> tuple[str, str]:
        """Sorts the oldest first."""
        return self.created, self.name

    def versions(self, model: str) -> frozenset[int]:
        """The versions of the model that are READY in this pod."""
        return frozenset(ready_versions(self.index.versions if self.index else (), model))


def ready_versions(index: Sequence[ServedVersion], model: str) -> Iterator[int]:
    """The versions of a model that are READY in an index."""
    for entry in index:
        if entry.model == model and entry.state == "READY" and (number := decimal(entry.version)) is not None:
            yield number
