"""All that a reconcile looked at, at one time, as the API server and the pods told it: what decisions are made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halimede_operator.core.api.spec import Key

Object = dict[str, Any]
"""A Kubernetes object as JSON, without managedFields."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """One line of a pod's repository index."""

    model: str
    version: str
    state: str
    """READY, UNAVAILABLE, LOADING, UNLOADING or '' as the v2 index says it."""
    reason: str


@dataclass(frozen=True, slots=True)
class PodIndex:
    """What a pod that runs said it serves."""

    versions: tuple[ServedVersion, ...] = ()
    error: str | None = None
    """Why it could not be asked; the versions are empty then."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A node has fewer devices than pods of ours hold there."""

    resource: str
    has: int
    held: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    key: Key
    object: Object
    """The InferenceModel or the ModelEnsemble."""
    members: Mapping[str, Object]
    """An ensemble's InferenceModels that exist, by name."""
    children: tuple[Object, ...]
    """Objects with our labels and this object's uid as owner, of every kind that we make, pods and ReplicaSets not
    among them."""
    replica_sets: tuple[Object, ...]
    """Of the Deployment."""
    pods: tuple[Object, ...]
    indexes: Mapping[str, PodIndex]
    """By pod uid, of pods whose server container runs."""
    quota_messages: tuple[str, ...] = ()
    """What the ReplicaSet says of pods that it may not make (condition ReplicaFailure)."""
    mount_events: Mapping[str, tuple[Object, ...]] = field(default_factory=dict)
    """By pod uid, of pods that wait for their volumes: what their kubelets said that they could not mount."""
    shortages: Mapping[str, tuple[Shortage, ...]] = field(default_factory=dict)
    """By node, of devices that pods of this object hold too."""
    nodes: tuple[Object, ...] = ()
    """Of the cluster, labels and allocatable; empty where they may not be read."""
