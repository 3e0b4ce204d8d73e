"""Children as an API server returns them: with an identity, with defaults, and with quantities in canonical form."""

from copy import deepcopy
from typing import Any

from halimede_operator.core.objects import QUANTITIES, QUANTITY_MAPS
from halimede_operator.core.spec.quantities import quantity

Object = dict[str, Any]

POD_DEFAULTS: Object = {
    "restartPolicy": "Always",
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "securityContext": {},
    "terminationGracePeriodSeconds": 30,
}
CONTAINER_DEFAULTS: Object = {
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "imagePullPolicy": "IfNotPresent",
    "resources": {},
}
PROBE_DEFAULTS: Object = {"successThreshold": 1, "failureThreshold": 3, "periodSeconds": 10, "timeoutSeconds": 1}
SERVICE_DEFAULTS: Object = {
    "clusterIP": "10.96.0.7",
    "clusterIPs": ["10.96.0.7"],
    "internalTrafficPolicy": "Cluster",
    "ipFamilies": ["IPv4"],
    "ipFamilyPolicy": "SingleStack",
    "sessionAffinity": "None",
}


def stored(child: Object) -> Object:
    made: Object = _spelled(deepcopy(child))
    made["metadata"] |= {
        "uid": f"uid-of-{child['kind']}-{child['metadata']['name']}",
        "resourceVersion": "7",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    match made["kind"]:
        case "Deployment":
            template = made["spec"]["template"]
            template["metadata"]["creationTimestamp"] = None
            _pod(template["spec"])
            made["status"] = {"observedGeneration": 1}
        case "Service":
            made["spec"] = SERVICE_DEFAULTS | made["spec"]
            made["status"] = {"loadBalancer": {}}
        case _:
            pass
    return made


def _pod(spec: Object) -> None:
    spec.update(POD_DEFAULTS | spec)
    spec["serviceAccount"] = spec["serviceAccountName"]
    for container in (*spec["initContainers"], *spec["containers"]):
        container.update(CONTAINER_DEFAULTS | container)
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            if (probe := container.get(name)) is not None:
                probe.update(PROBE_DEFAULTS | probe)
                probe["httpGet"]["scheme"] = "HTTP"
        for port in container.get("ports", ()):
            port.setdefault("protocol", "TCP")
        for variable in container.get("env", ()):
            if (field := variable.get("valueFrom", {}).get("fieldRef")) is not None:
                field.setdefault("apiVersion", "v1")
    for volume in spec["volumes"]:
        for kind in ("configMap", "secret", "projected"):
            if kind in volume:
                volume[kind].setdefault("defaultMode", 420)
        for source in volume.get("projected", {}).get("sources", ()):
            if "serviceAccountToken" in source:
                source["serviceAccountToken"].setdefault("expirationSeconds", 3600)
            for item in source.get("downwardAPI", {}).get("items", ()):
                item["fieldRef"].setdefault("apiVersion", "v1")


def _spelled(value: Any, field: str = "", within: str = "") -> Any:
    """The value with every quantity in another notation."""
    if isinstance(value, dict):
        return {key: _spelled(each, key, field) for key, each in value.items()}
    if isinstance(value, list):
        return [_spelled(each) for each in value]
    if field in QUANTITIES or within in QUANTITY_MAPS:
        amount = quantity(value)
        # A metric's target has its type beside its quantity.
        return value if amount is None else f"{amount * 1000}m"
    return value
