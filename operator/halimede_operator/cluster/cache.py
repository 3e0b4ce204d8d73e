"""The last known state of every watched object, found by name or by owner, with the keys that a change wakes.

Objects are kept as compressed JSON without managedFields: a thousand models with their children take about 12 MB this
way, and 100 MB as dicts. Used by one event loop; does no I/O.

Resource versions tell old states from new ones. A state is dropped if it is older than the known state of the object,
or older than a list that did not contain the object. So reordered and repeated events change nothing, and neither do
the events that our own writes cause.
"""

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from halimede_operator.cluster.kinds import AUTOSCALERS, DEPLOYMENTS, ENSEMBLES, MODELS, PODS, REPLICA_SETS, Resource
from halimede_operator.core.labels import ENSEMBLE_LABEL, MODEL_LABEL
from halimede_operator.core.pods.refreshes import REFRESHED
from halimede_operator.core.reading import text_at
from halimede_operator.core.scaling.hpa import decision_of
from halimede_operator.core.scaling.idle import MAX_WAKE, WAKE
from halimede_operator.core.scaling.replicas import IS_OURS, are_ours
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.ensemble import member_names
from halimede_operator.core.spec.types import API_VERSION, UNREAD, Key, Kind

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
OWN_METADATA = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
MAX_SPEC_BYTES = 64 * 1024
"""The API server accepts 1.5 MB, but all users share the operator's memory."""
MAX_MOMENT = 32
"""Characters of a time, which any user may write."""
PACKED_BYTES = 512
"""Longer objects are compressed: to a third, for some 0.05 ms of CPU each time that one changes."""
REMEMBERED_DELETIONS = 10_000
_NO_CHILDREN = frozenset({MODELS.kind, ENSEMBLES.kind, REPLICA_SETS.kind, PODS.kind})


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored object with its metadata."""

    kind: str
    namespace: str
    name: str
    uid: str
    version: int
    owner: str | None
    """Uid of its controller; None if it has none."""
    key: Key | None
    """What to reconcile when it changes; None if it belongs to none of our objects."""
    uses: frozenset[str]
    """Names of the InferenceModels of a ModelEnsemble."""
    packed: bytes
    """JSON, compressed if that saves something."""
    size_bytes: int = 0
    """Of an object of our own kinds, with what is not kept."""
    has_ended: bool = False
    """It is a pod in which nothing runs any more. Kubernetes keeps up to 12,500 of these."""
    is_being_deleted: bool = False
    """Of an object of our own kinds: it exists until its finalizers are removed."""

    @property
    def json(self) -> bytes:
        return self.packed if self.packed.startswith(b"{") else zlib.decompress(self.packed)

    @property
    def object(self) -> Object:
        value: Object = orjson.loads(self.json)
        return value


class Cache:
    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._names: dict[tuple[str, str, str], str] = {}
        self._owned: dict[str, dict[str, None]] = {}
        """Owner's uid -> uids, in the order in which they came."""
        self._orphans: dict[Key, dict[str, None]] = {}
        """Uids of objects of the kinds of children without a controller, by the key that their labels name."""
        self._users: dict[tuple[str, str], set[Key]] = {}
        """Namespace and name of an InferenceModel -> the ensembles that use it."""
        self._deleted: OrderedDict[str, int] = OrderedDict()
        """Uid -> version at which it was gone. The same uid may come back: when a user removes our label and sets it
        again."""
        self._gone = set[Key]()
        self._floors: dict[tuple[str, str | None], int] = {}
        """Version of the last complete list of a kind, in one namespace or (None) in all."""
        self.unavailable: Mapping[str, str] = {}
        """Optional kinds that cannot be watched, and why. The cache has no objects of them."""

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, kind: str, namespace: str, name: str) -> Entry | None:
        uid = self._names.get((kind, namespace, name))
        return self._entries[uid] if uid is not None else None

    def get(self, key: Key) -> Object | None:
        entry = self.find(key.kind, key.namespace, key.name)
        return entry.object if entry is not None else None

    def has(self, uid: str, version: int) -> bool:
        """Whether this state of an object, or a newer one, was learnt before. May be called in any thread."""
        known = self._entries.get(uid)
        return known is not None and version <= known.version

    def owned_by(self, uid: str) -> Iterator[Entry]:
        for child in self._owned.get(uid, ()):
            yield self._entries[child]

    def labelled_for(self, key: Key) -> Iterator[Entry]:
        """Objects of the kinds of children that have no controller, and whose labels name this key."""
        for child in self._orphans.get(key, ()):
            yield self._entries[child]

    def put(self, resource: Resource, value: dict[str, Any]) -> frozenset[Key]:
        """Store the state of an object from an event or from the answer to a write. Return the keys to wake.

        value: is not changed.
        """
        return self.learn(entry_of(resource, value))

    def learn(self, entry: Entry, *, listed: bool = False) -> frozenset[Key]:
        """Store an entry and return the keys to wake. listed: it was in a list, which is newer than the entry."""
        known = self._entries.get(entry.uid)
        last = known.version if known is not None else self._deleted.get(entry.uid, -1)
        if entry.version <= last:
            return frozenset()
        if known is None and not listed and entry.version < self._floor(entry):
            return frozenset()
        # An HPA's status has the values of its metrics, which change all the time.
        is_same = known is not None and _is_same_decision(known, entry)
        namesake = self.find(entry.kind, entry.namespace, entry.name)
        if namesake is not None and namesake.uid != entry.uid:
            if namesake.version > entry.version:
                return frozenset()
            self._drop(namesake)
        elif known is not None:
            self._unlink(known)
        if entry.key is not None and entry.is_being_deleted:
            self._gone.add(entry.key)
        self._entries[entry.uid] = entry
        self._names[entry.kind, entry.namespace, entry.name] = entry.uid
        if entry.owner is not None:
            self._owned.setdefault(entry.owner, {})[entry.uid] = None
        elif entry.key is not None and entry.kind not in _NO_CHILDREN:
            self._orphans.setdefault(entry.key, {})[entry.uid] = None
        if entry.uses and entry.key is not None:
            for name in entry.uses:
                self._users.setdefault((entry.namespace, name), set()).add(entry.key)
        return frozenset() if is_same else self._woken(entry)

    def delete(self, uid: str, version: int) -> frozenset[Key]:
        """Forget an object that was deleted at this version. Return the keys to wake."""
        self._deleted[uid] = max(version, self._deleted.get(uid, 0))
        if len(self._deleted) > REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        entry = self._entries.get(uid)
        if entry is None:
            return frozenset()
        self._drop(entry)
        if entry.key is not None and entry.kind in (MODELS.kind, ENSEMBLES.kind):
            self._gone.add(entry.key)
        return self._woken(entry)

    def take_gone(self) -> list[Key]:
        """Our objects whose deletion began or ended since the last call, without those that exist again."""
        gone, self._gone = self._gone, set()
        found = {key: self.find(key.kind, key.namespace, key.name) for key in gone}
        return [key for key, entry in found.items() if entry is None or entry.is_being_deleted]

    def listed(self, resource: Resource, namespace: str | None, version: int, uids: frozenset[str]) -> frozenset[Key]:
        """A list was complete: forget the known objects of this kind that are neither in it nor newer. Return the keys
        to wake.

        version: the list's. uids: of all objects in it. namespace: the list's, None for all.
        """
        self._floors[resource.kind, namespace] = max(version, self._floors.get((resource.kind, namespace), 0))
        gone = [
            entry
            for entry in self._entries.values()
            if entry.kind == resource.kind
            and namespace in (None, entry.namespace)
            and entry.uid not in uids
            and entry.version <= version
        ]
        return frozenset().union(*[self.delete(entry.uid, version) for entry in gone])

    def set_unavailable(self, kinds: Mapping[str, str]) -> frozenset[Key]:
        """Only these kinds cannot be watched: forget their objects. kinds: with the reasons. Return the keys to wake.

        Any of our objects may want a child of a kind that comes or goes, so all are woken.
        """
        if kinds == self.unavailable:
            return frozenset()
        self.unavailable = kinds
        for entry in [entry for entry in self._entries.values() if entry.kind in kinds]:
            # Not as deleted: the same objects come back if only the operator's rights were missing.
            self._drop(entry)
        return frozenset(
            entry.key for entry in self._entries.values() if entry.kind in tuple(Kind) and entry.key is not None
        )

    def _floor(self, entry: Entry) -> int:
        return max(self._floors.get((entry.kind, None), 0), self._floors.get((entry.kind, entry.namespace), 0))

    def _woken(self, entry: Entry) -> frozenset[Key]:
        own = frozenset([entry.key]) if entry.key is not None else frozenset()
        if entry.kind == Kind.INFERENCE_MODEL:
            return own | self._users.get((entry.namespace, entry.name), set())
        return own

    def _drop(self, entry: Entry) -> None:
        self._unlink(entry)
        del self._entries[entry.uid]
        del self._names[entry.kind, entry.namespace, entry.name]

    def _unlink(self, entry: Entry) -> None:
        """Remove the entry from all indexes but that of names."""
        if entry.owner is not None:
            siblings = self._owned[entry.owner]
            del siblings[entry.uid]
            if not siblings:
                del self._owned[entry.owner]
        elif entry.key is not None and entry.kind not in _NO_CHILDREN:
            orphans = self._orphans[entry.key]
            del orphans[entry.uid]
            if not orphans:
                del self._orphans[entry.key]
        for name in entry.uses:
            users = self._users[entry.namespace, name]
            if entry.key is not None:
                users.discard(entry.key)
            if not users:
                del self._users[entry.namespace, name]


def _is_same_decision(known: Entry, entry: Entry) -> bool:
    return entry.kind == AUTOSCALERS.kind and decision_of(known.object) == decision_of(entry.object)


def entry_of(resource: Resource, value: dict[str, Any]) -> Entry:
    """The entry for an object.

    Raises KeyError, TypeError, AttributeError or ValueError if it is malformed.
    """
    metadata = value["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    # Items of lists have neither apiVersion nor kind.
    whole = {"apiVersion": resource.api_version, "kind": resource.kind, **value, "metadata": _kept(resource, metadata)}
    if resource is REPLICA_SETS and "spec" in value:
        whole["spec"] = {"template": {"spec": _used_by_pods(value["spec"]["template"]["spec"])}}
    if resource is PODS and "spec" in value:
        whole["spec"] = _used_of_pod(value["spec"])
    if resource is DEPLOYMENTS:
        whole[IS_OURS] = are_ours(metadata.get("managedFields") or ())
    if resource.ours and (size := len(orjson.dumps(value.get("spec")))) > MAX_SPEC_BYTES:
        whole |= {"spec": {}, UNREAD: f"has {size} bytes as JSON; at most {MAX_SPEC_BYTES} are read"}
    owner = next((ref for ref in metadata.get("ownerReferences") or () if ref.get("controller")), None)
    return Entry(
        kind=resource.kind,
        namespace=namespace,
        name=name,
        uid=metadata["uid"],
        version=int(metadata["resourceVersion"]),
        owner=owner["uid"] if owner is not None else None,
        key=_key(resource, namespace, name, owner, metadata.get("labels") or {}),
        uses=member_names(whole) if resource is ENSEMBLES else frozenset(),
        packed=_packed(orjson.dumps(whole)),
        size_bytes=len(orjson.dumps(value)) if resource.ours else 0,
        has_ended=resource is PODS and text_at(value, "status", "phase") in {"Failed", "Succeeded"},
        is_being_deleted=resource.ours and "deletionTimestamp" in metadata,
    )


def _packed(data: bytes) -> bytes:
    if len(data) > PACKED_BYTES:
        return zlib.compress(data, 1)
    # A copy of the size that is needed: orjson leaves up to eight times the size of a long string allocated.
    return bytes(memoryview(data))


def _used_by_pods(pod: dict[str, Any]) -> dict[str, Any]:
    """Of a ReplicaSet's pods, the names of the children that they use. The rest is in the revision's ConfigMap."""
    volumes = [{"configMap": volume["configMap"]} for volume in pod.get("volumes") or () if volume.get("configMap")]
    claims = {"resourceClaims": pod["resourceClaims"]} if pod.get("resourceClaims") else {}
    return {"serviceAccountName": pod.get("serviceAccountName", ""), "volumes": volumes, **claims}


USED_OF_POD = (
    "nodeName", "schedulerName", "readinessGates", "imagePullSecrets", "resourceClaims", "resources", "overhead",
)  # fmt: skip
USED_OF_CONTAINER = ("name", "image", "ports", "resources", "restartPolicy")
USED_OF_VOLUME = ("name", "secret", "configMap", "persistentVolumeClaim")


def _used_of_pod(spec: dict[str, Any]) -> dict[str, Any]:
    """The parts of a pod's spec that are read. An object may have hundreds of pods, all with the same spec."""
    lists = (("initContainers", USED_OF_CONTAINER), ("containers", USED_OF_CONTAINER), ("volumes", USED_OF_VOLUME))
    kept = {field: [_part(item, used) for item in spec[field]] for field, used in lists if spec.get(field)}
    return {**_part(spec, USED_OF_POD), **kept}


def _part(value: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {field: value[field] for field in fields if field in value}


def _kept(resource: Resource, metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata to keep. Of our own kinds only the fields that are used, because users may make the others large."""
    if resource.ours:
        kept = {field: metadata[field] for field in OWN_METADATA if field in metadata}
        wake = (metadata.get("annotations") or {}).get(WAKE)
        return {**kept, "annotations": {WAKE: str(wake)[:MAX_WAKE]}} if wake is not None else kept
    kept = {field: part for field, part in metadata.items() if field != "managedFields"}
    if resource is PODS:
        refreshed = (kept.pop("annotations", None) or {}).get(REFRESHED)
        return {**kept, "annotations": {REFRESHED: str(refreshed)[:MAX_MOMENT]}} if refreshed is not None else kept
    annotations = metadata.get("annotations")
    if annotations and LAST_APPLIED in annotations:
        kept["annotations"] = {field: text for field, text in annotations.items() if field != LAST_APPLIED}
    return kept


def _key(
    resource: Resource, namespace: str, name: str, owner: dict[str, Any] | None, labels: dict[str, str]
) -> Key | None:
    if resource is MODELS or resource is ENSEMBLES:
        return Key(Kind(resource.kind), namespace, name)
    if (
        owner is not None
        and owner.get("apiVersion") == API_VERSION
        and owner.get("kind") in (MODELS.kind, ENSEMBLES.kind)
    ):
        return Key(Kind(owner["kind"]), namespace, owner["name"])
    # The Deployment owns ReplicaSets, and these own pods. Both have the Deployment's labels.
    if MODEL_LABEL in labels:
        return Key(Kind.INFERENCE_MODEL, namespace, labels[MODEL_LABEL])
    if ENSEMBLE_LABEL in labels:
        return Key(Kind.MODEL_ENSEMBLE, namespace, labels[ENSEMBLE_LABEL])
    return None
