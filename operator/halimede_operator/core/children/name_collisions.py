"""Finds objects whose children would have the same names.

These are an InferenceModel and a ModelEnsemble of the same name, and `x` beside `x-pods`, because the headless Service
of `x` has the name of the Service of `x-pods`.

An object that has its Deployment keeps the names, even if it is younger: nothing that serves is taken down because of a
name. A Deployment that was left by `kubectl delete --cascade=orphan` belongs to the object whose labels it has. If no
object has a Deployment, the oldest one gets the names. The others get a Conflict and no children.
"""

from halimede_operator.core.children.diff import Conflict
from halimede_operator.core.reading import name_at, text_at
from halimede_operator.core.snapshot import Contender, Snapshot
from halimede_operator.core.spec.types import Key, Kind

_SUFFIX = "-pods"


def contending_keys(key: Key) -> tuple[Key, ...]:
    """Keys of all other objects whose children would have a name of this object's children."""
    names = dict.fromkeys((key.name, f"{key.name}{_SUFFIX}", key.name.removesuffix(_SUFFIX)))
    keys = (Key(kind, key.namespace, name) for name in names for kind in Kind)
    return tuple(other for other in keys if other != key)


def name_collision(snapshot: Snapshot) -> Conflict | None:
    """A Conflict about the Service if another object has precedence for its name; None otherwise."""
    if any(child["kind"] == "Deployment" for child in snapshot.children):
        return None
    first = min(snapshot.contenders, key=_precedence, default=None)
    if first is None or _precedence(Contender(snapshot.object, has_deployment=False)) < _precedence(first):
        return None
    own, other = snapshot.key.name, name_at(first.object, "metadata", "name")
    metadata = {"namespace": snapshot.key.namespace, "name": max(own, other, key=len)}
    owner = f"{name_at(first.object, 'kind')} {other}"
    return Conflict({"apiVersion": "v1", "kind": "Service", "metadata": metadata}, owner)


def _precedence(contender: Contender) -> tuple[bool, str, str]:
    """Sort key: the first one gets the names. Creation times are whole seconds, so the uid decides between equals."""
    created, uid = (text_at(contender.object, "metadata", field) for field in ("creationTimestamp", "uid"))
    return not contender.has_deployment, created, uid
