"""Rules for Kubernetes objects of any kind: their canonical form, and which of their lists are maps,
and of which fields an object has one.

The canonical form of an object is what the API server would return for it, without the parts that it leaves out. These
are null, empty lists, empty maps of strings or quantities, empty strings, and `false` and 0 in fields that cannot
distinguish them from absence. An empty object such as `emptyDir: {}` has a meaning and stays. Whole floats become ints.
"""

from collections.abc import Mapping
from typing import Any

# Any, in this module: JSON.

STRING_MAPS = frozenset(
    {"annotations", "binaryData", "data", "labels", "matchLabels", "nodeSelector", "volumeAttributes"}
)
"""Fields whose keys are chosen by users. In them an empty string is a value like any other."""

QUANTITY_MAPS = frozenset({"capacity", "limits", "overhead", "requests", "target"})
"""`target`: of a metric that an HPA scales on."""
QUANTITIES = frozenset({"divisor", "sizeLimit", "tolerance"})

_EMPTY_IS_ABSENT = STRING_MAPS | QUANTITY_MAPS
_ZERO_IS_ABSENT = frozenset(
    {
        "failureThreshold",
        "hostIPC",
        "hostNetwork",
        "hostPID",
        "hostPort",
        "initialDelaySeconds",
        "minReadySeconds",
        "paused",
        "periodSeconds",
        "publishNotReadyAddresses",
        "readOnly",
        "stdin",
        "stdinOnce",
        "successThreshold",
        "timeoutSeconds",
        "tty",
    }
)
# These are pointers in the API: an empty text differs from no value.
_EMPTY_TEXT_COUNTS = frozenset({"storageClassName", "volumeAttributesClassName"})

_MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "env": ("name",),
    "ephemeralContainers": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ownerReferences": ("uid",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}

VOLUMES = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
"""The kinds of volumes that pods may have without access to the node."""
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
HOOKS = ("postStart", "preStop")
"""Of a container's `lifecycle`."""

_NONE: frozenset[str] = frozenset()
_ONE_OF: Mapping[str, frozenset[str]] = {
    "volumes": frozenset({*VOLUMES, "hostPath"}),
    **dict.fromkeys((*PROBES, *HOOKS), frozenset({"exec", "grpc", "httpGet", "sleep", "tcpSocket"})),
    "env": frozenset({"value", "valueFrom"}),
    "valueFrom": frozenset({"configMapKeyRef", "fieldRef", "fileKeyRef", "resourceFieldRef", "secretKeyRef"}),
}

MapKey = tuple[Any, ...]


def one_of(field: str) -> frozenset[str]:
    """The fields of which the API server accepts one, in the object `field` or in the items of the list `field`."""
    return _ONE_OF.get(field, _NONE)


def map_key(field: str, item: Any) -> MapKey | None:
    """The key that identifies an item within the list `field`; None if Kubernetes treats the list as one value."""
    if not isinstance(item, dict):
        return None
    if field == "ports":
        # Ports of a container or of a Service.
        return (item.get("containerPort", item.get("port")), item.get("protocol", "TCP"))
    names = _MERGE_KEYS.get(field)
    return tuple(item.get(name) for name in names) if names is not None else None


def canonical(value: Any, field: str = "") -> Any:
    """The canonical form of an object, or of its part that is the value of `field`."""
    if isinstance(value, str):
        # First, because most values are texts. A check for Mapping takes several times as long as one for dict.
        return value
    if isinstance(value, dict):
        if field in STRING_MAPS:
            return {str(key): value[key] for key in sorted(value) if value[key] is not None}
        made = {str(key): canonical(value[key], str(key)) for key in sorted(value)}
        return {key: each for key, each in made.items() if not _is_absent(key, each)}
    if isinstance(value, list | tuple):
        return [canonical(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _is_absent(field: str, value: Any) -> bool:
    if value is None or value == []:
        return True
    if value == "":
        return field not in _EMPTY_TEXT_COUNTS
    if value == {}:
        return field in _EMPTY_IS_ABSENT
    if value is False or (value == 0 and not isinstance(value, bool)):
        return field in _ZERO_IS_ABSENT
    return False
