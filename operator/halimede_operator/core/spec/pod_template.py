"""Parses `spec.podTemplate` and refuses what it must not change, so that authors of models gain no rights on nodes.

Refused is what the `restricted` Pod Security standard forbids, and what the operator needs to find the pods. Users may
set anything else, and the API server checks it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from halimede_operator.core.objects import HOOKS, PROBES, VOLUMES
from halimede_operator.core.spec.field import INT64_MAX, LABEL_NAME, LABEL_VALUE, Field, Rule, shown
from halimede_operator.core.spec.types import GROUP, Json

PORT_NAMES = ("http", "grpc", "metrics")
FETCH = "fetch"
"""The init container that fetches models."""
SERVER = "server"
NVIDIA_DEVICES = "NVIDIA_VISIBLE_DEVICES"
NO_DEVICE_VARIABLE = f"must not be {NVIDIA_DEVICES}, which would open devices of other pods; use spec.accelerator"

_DEVICES_ELSEWHERE = "must not be set here: use spec.accelerator"
_FLAGS_ELSEWHERE = "must not be set here, because it would replace the operator's flags: use spec.serving.args"
_NO_AUTOMOUNT = (
    "must not be true, which would give every container a token of the API server; mount a projected volume with a"
    " serviceAccountToken in the container that needs one"
)

_ELSEWHERE = {
    "serviceAccountName": "must not be set here: use spec.serviceAccountName",
    "serviceAccount": "must not be set here: use spec.serviceAccountName",
    "nodeName": "must not be set, because it bypasses the scheduler: use spec.scheduling",
    "ephemeralContainers": "must not be in a template",
    "resourceClaims": _DEVICES_ELSEWHERE,
}
_QUANTITY_MAPS = (".resources.limits", ".resources.requests")
_QUANTITIES = (".emptyDir.sizeLimit", ".resourceFieldRef.divisor")
_RESERVED_DOMAINS = ("app.kubernetes.io", GROUP)
_ANNOTATION_NAME = Rule(LABEL_NAME.pattern, "must be the name of an annotation, for instance example.com/owner", 317)


def read_overlay(template: Field, ports: Iterable[int]) -> Json:
    """The overlay: `metadata.labels`, `metadata.annotations` and `spec`, each if given.

    ports: those of the server's container.
    """
    metadata = template.section("metadata")
    labels = {
        key: field.text("", LABEL_VALUE, empty=True)
        for key, field in metadata.section("labels").entries().items()
        if _key_is_free(key, field, LABEL_NAME)
    }
    annotations = {
        key: field.text("", max_length=65536, empty=True)
        for key, field in metadata.section("annotations").entries().items()
        if _key_is_free(key, field, _ANNOTATION_NAME)
    }
    spec = template.free_section("spec")
    _check_values(spec)
    _check_pod(spec, frozenset(ports))
    meta = {name: values for name, values in (("labels", labels), ("annotations", annotations)) if values}
    return {name: part for name, part in (("metadata", meta), ("spec", spec.json())) if part}


def _key_is_free(key: str, field: Field, rule: Rule) -> bool:
    domain = key.partition("/")[0] if "/" in key else ""
    if not rule.pattern.fullmatch(key):
        field.refuse(rule.message)
    elif key == "pod-template-hash" or any(domain == d or domain.endswith(f".{d}") for d in _RESERVED_DOMAINS):
        field.refuse("must not be changed: the operator sets it")
    elif domain.endswith(("apparmor.security.beta.kubernetes.io", "seccomp.security.alpha.kubernetes.io")):
        field.refuse("must not be set: the pods keep the runtime's default profile")
    else:
        return True
    return False


def _check_values(spec: Field) -> None:
    """Refuse null and patch directives, because they would remove what the operator set.

    Also refuse invalid numbers and quantities, because the API server would not report where they are.
    """
    waiting = [spec] if spec.given else []
    while waiting:
        field = waiting.pop()
        match field.value:
            case None:
                field.refuse("must not be null: leave out fields that are not changed")
            case Mapping():
                for key, value in field.value.items():
                    inner = Field(f"{field.path}.{key}", value, field.problems)
                    if str(key).startswith("$"):
                        inner.refuse("must not be a directive: an overlay adds and changes fields, and removes none")
                    else:
                        waiting.append(inner)
                if field.path.endswith(_QUANTITY_MAPS):
                    for entry in field.entries().values():
                        entry.quantity("a quantity such as 500m or 8Gi")
            case list() | tuple():
                waiting += [Field(f"{field.path}[{i}]", value, field.problems) for i, value in enumerate(field.value)]
            case float() if not field.value.is_integer():
                field.refuse(f"must be a whole number, got {field.value}")
            case int() | float() if abs(field.value) > INT64_MAX:
                field.refuse("must be a smaller number")
            case str() if field.path.endswith(_QUANTITIES):
                field.quantity("a quantity such as 500m or 8Gi")


def _check_pod(spec: Field, ports: frozenset[int]) -> None:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        _refuse_unless(spec.get(name), False, "must not be set: pods have no access to the node")
    for name, message in _ELSEWHERE.items():
        if spec.get(name).given:
            spec.get(name).refuse(message)
    _refuse_unless(spec.get("restartPolicy"), "Always", "must be Always")
    _refuse_unless(spec.get("automountServiceAccountToken"), False, _NO_AUTOMOUNT)
    _check_security(spec.section("securityContext"))
    if spec.section("securityContext").get("sysctls").given:
        spec.section("securityContext").get("sysctls").refuse("must not be set: pods have no access to the node")
    for volume in spec.get("volumes").objects("name"):
        for kind in volume.value:
            if kind not in ("name", *VOLUMES):
                volume.get(str(kind)).refuse(f"must not be a volume of this kind; allowed are {', '.join(VOLUMES)}")
    for name in ("initContainers", "containers"):
        for container in spec.get(name).objects("name"):
            _check_container(container, ports)
            if name == "initContainers" and container.get("name").value == FETCH:
                for part in ("command", "args", "restartPolicy"):
                    if container.get(part).given:
                        container.get(part).refuse(f"must not be changed: '{FETCH}' needs it to fetch models")
            if name == "containers" and container.get("name").value == SERVER:
                for part in ("command", "args"):
                    if container.get(part).given:
                        container.get(part).refuse(_FLAGS_ELSEWHERE)


def _check_container(container: Field, ports: frozenset[int]) -> None:
    container.get("name").required("overlays of containers merge by name").text(None)
    security = container.section("securityContext")
    _check_security(security)
    _refuse_unless(security.get("privileged"), False, "must not be true: containers run without privileges")
    _refuse_unless(
        security.get("allowPrivilegeEscalation"), False, "must not be true: containers run without privileges"
    )
    _refuse_unless(security.get("procMount"), "Default", "must be Default")
    capabilities = security.section("capabilities")
    if capabilities.get("add").items():
        capabilities.get("add").refuse("must not be set: containers run without capabilities")
    if capabilities.get("drop").given and "ALL" not in [entry.value for entry in capabilities.get("drop").items()]:
        capabilities.get("drop").refuse("must have ALL: containers run without capabilities")
    _check_devices(container)
    _check_handlers(container)
    for variable in container.get("env").objects("name"):
        if variable.get("name").value == NVIDIA_DEVICES:
            variable.get("name").refuse(NO_DEVICE_VARIABLE)
    for port in container.get("ports").objects():
        if port.get("name").value in PORT_NAMES:
            port.get("name").refuse(f"must not be one of {', '.join(PORT_NAMES)}: clients find the server by them")
        number = port.get("containerPort").value
        if isinstance(number, int) and number in ports:
            port.get("containerPort").refuse(f"must not be {shown(number)}: spec.serving.ports has it")
        for name in ("hostPort", "hostIP"):
            if port.get(name).given:
                port.get(name).refuse("must not be set: pods have no access to the node")


def _check_devices(container: Field) -> None:
    """Refuse devices: the status and the operator's checks of nodes count only those of spec.accelerator."""
    resources = container.section("resources")
    if resources.get("claims").given:
        resources.get("claims").refuse(_DEVICES_ELSEWHERE)
    for part in ("limits", "requests"):
        for name, amount in resources.section(part).entries().items():
            if name.startswith("nvidia.com/"):
                amount.refuse(_DEVICES_ELSEWHERE)
            elif "/" in name and container.get("name").value == SERVER:
                amount.refuse("must not be set here: use spec.resources for the server's extended resources")


def _check_handlers(container: Field) -> None:
    """Refuse `host`, because the kubelet makes these calls: they would reach what only the node can reach."""
    lifecycle = container.section("lifecycle")
    for handlers in (*(container.section(name) for name in PROBES), *(lifecycle.section(name) for name in HOOKS)):
        for name in ("httpGet", "tcpSocket"):
            _refuse_unless(
                handlers.section(name).get("host"), "", "must not be set: the node calls the pod's own address only"
            )


def _check_security(context: Field) -> None:
    """Check the fields that security contexts of pods and of containers have in common."""
    user = context.get("runAsUser")
    if user.given and user.value == 0:
        user.refuse("must not be 0: containers do not run as root")
    _refuse_unless(context.get("runAsNonRoot"), True, "must not be false: containers do not run as root")
    for profile in ("seccompProfile", "appArmorProfile"):
        kind = context.section(profile).get("type")
        if kind.given and kind.value not in ("RuntimeDefault", "Localhost"):
            kind.refuse(f"must be RuntimeDefault or Localhost, got {shown(kind.value)}")
    for name in ("seLinuxOptions", "windowsOptions"):
        if context.get(name).given:
            context.get(name).refuse("must not be set: pods keep the node's own settings")


def _refuse_unless(field: Field, allowed: Any, message: str) -> None:
    if field.given and (field.value != allowed or type(field.value) is not type(allowed)):
        field.refuse(message)
