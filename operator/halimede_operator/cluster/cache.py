"""What the API server last said of every object that we watch: found by name, by owner, by what wakes it.

Objects are kept as JSON bytes without managedFields: a thousand models with their children are about 25 MB so, and 100
MB as dicts. Of one loop, no I/O.

Old news is told by the resource version: news of an object that is older than what is known of it, or older than the
list that did not have it, is dropped. So reordered and repeated events do nothing, and neither does the echo of what
we wrote ourselves.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from halimede_operator.cluster.kinds import ENSEMBLES, MODELS, Resource
from halimede_operator.core.api.spec import API_VERSION, UNREAD, Key, Kind
from halimede_operator.core.labels import ENSEMBLE_LABEL, MODEL_LABEL
from halimede_operator.core.plan import member_names
from halimede_operator.core.snapshot import Object

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
OWN_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
)
MAX_SPEC_BYTES = 256 * 1024
"""The API server takes 1.5 MB, and the operator's memory is everybody's."""
REMEMBERED_DELETIONS = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str
    namespace: str
    name: str
    uid: str
    version: int
    owner: str | None
    """Uid of its controller."""
    key: Key | None
    """What is to be reconciled when it changes; None: it is a child of nobody."""
    uses: frozenset[str]
    """A ModelEnsemble's InferenceModels."""
    json: bytes

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
        self._users: dict[tuple[str, str], set[Key]] = {}
        """Namespace and name of an InferenceModel -> the ensembles that use it."""
        self._deleted: OrderedDict[str, int] = OrderedDict()
        """Uid -> version at which it was gone. It may come back: who takes our label off and puts it on again does
        that."""
        self._floors: dict[tuple[str, str | None], int] = {}
        """Version of the last complete list of a kind, of one namespace or of all."""

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, kind: str, namespace: str, name: str) -> Entry | None:
        uid = self._names.get((kind, namespace, name))
        return self._entries[uid] if uid is not None else None

    def get(self, key: Key) -> Object | None:
        entry = self.find(key.kind, key.namespace, key.name)
        return entry.object if entry is not None else None

    def owned_by(self, uid: str) -> Iterator[Entry]:
        for child in self._owned.get(uid, ()):
            yield self._entries[child]

    def put(self, resource: Resource, value: dict[str, Any]) -> frozenset[Key]:
        """An object as it was said to be, in an event or in the answer to a write; returns what that is news for.

        value: is left as it is.
        """
        return self.learn(entry_of(resource, value))

    def learn(self, entry: Entry, *, listed: bool = False) -> frozenset[Key]:
        """The same of what was read already. listed: in a list, which is newer than itself."""
        known = self._entries.get(entry.uid)
        last = known.version if known is not None else self._deleted.get(entry.uid, -1)
        if entry.version <= last:
            return frozenset()
        if known is None and not listed and entry.version < self._floor(entry):
            return frozenset()
        namesake = self.find(entry.kind, entry.namespace, entry.name)
        if namesake is not None and namesake.uid != entry.uid:
            if namesake.version > entry.version:
                return frozenset()
            self._drop(namesake)
        elif known is not None:
            self._unlink(known)
        self._entries[entry.uid] = entry
        self._names[entry.kind, entry.namespace, entry.name] = entry.uid
        if entry.owner is not None:
            self._owned.setdefault(entry.owner, {})[entry.uid] = None
        if entry.uses and entry.key is not None:
            for name in entry.uses:
                self._users.setdefault((entry.namespace, name), set()).add(entry.key)
        return self._woken(entry)

    def delete(self, uid: str, version: int) -> frozenset[Key]:
        """An object is gone since that version; returns what that is news for."""
        self._deleted[uid] = max(version, self._deleted.get(uid, 0))
        if len(self._deleted) > REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        entry = self._entries.get(uid)
        if entry is None:
            return frozenset()
        self._drop(entry)
        return self._woken(entry)

    def listed(self, resource: Resource, namespace: str | None, version: int, uids: frozenset[str]) -> frozenset[Key]:
        """These are all objects of a kind at that version: what else is known of it and is not newer is gone."""
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
        """Out of the ways by which it is found, other than its name."""
        if entry.owner is not None:
            siblings = self._owned[entry.owner]
            del siblings[entry.uid]
            if not siblings:
                del self._owned[entry.owner]
        for name in entry.uses:
            users = self._users[entry.namespace, name]
            if entry.key is not None:
                users.discard(entry.key)
            if not users:
                del self._users[entry.namespace, name]


def entry_of(resource: Resource, value: dict[str, Any]) -> Entry:
    """What is kept of an object."""
    metadata = value["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    # Items of lists have neither of the two.
    whole = {"apiVersion": resource.api_version, "kind": resource.kind, **value, "metadata": _kept(resource, metadata)}
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
        json=orjson.dumps(whole),
    )


def _kept(resource: Resource, metadata: dict[str, Any]) -> dict[str, Any]:
    """Of our own kinds what is used: all else in there is as long as who made the object wants."""
    if resource.ours:
        return {field: metadata[field] for field in OWN_METADATA if field in metadata}
    kept = {field: part for field, part in metadata.items() if field != "managedFields"}
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
    # Pods and ReplicaSets are owned by way of the Deployment, whose labels they have.
    if MODEL_LABEL in labels:
        return Key(Kind.INFERENCE_MODEL, namespace, labels[MODEL_LABEL])
    if ENSEMBLE_LABEL in labels:
        return Key(Kind.MODEL_ENSEMBLE, namespace, labels[ENSEMBLE_LABEL])
    return None
