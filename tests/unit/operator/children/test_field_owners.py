"""Take-over of fields. Refusals and managedFields are those of a real API server; tests/cluster makes the same edits there."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest

from halimede_operator.core.api_errors import Cause
from halimede_operator.core.children.diff import Apply, diff
from halimede_operator.core.children.field_owners import DUPLICATE, taken_over
from support.operator_children import Object, children_of, named, server_of
from support.operator_specs import UID, model_spec, workload
from support.operator_store import stored

RESOURCES = {"requests": {"memory": "64Mi"}, "limits": {"cpu": "2"}}
WANTED = children_of(
    model_spec(workload=workload(replicas=3, resources=RESOURCES, env=({"name": "MINE", "value": "1"},)))
)
BESIDE: Object = {"f:metadata": {"f:annotations": {"f:tool.example/note": {}}}}
"""Other fields of the same manager."""
STATUS = {"manager": "kube-controller-manager", "operation": "Update", "subresource": "status", "fieldsV1": {"f:status": {}}}  # fmt: skip


def item(**key: Any) -> str:
    return "k:" + json.dumps(key, separators=(",", ":"))


def in_server(fields: Object) -> Object:
    return {"f:spec": {"f:template": {"f:spec": {"f:containers": {item(name="server"): fields}}}}}


def server(found: Object) -> Object:
    return server_of(found["spec"]["template"]["spec"])


@dataclass(frozen=True)
class Edit:
    child: str
    make: Callable[[Object], object]
    owned: Object
    """The manager that made the edit."""
    causes: tuple[Cause, ...]
    taken: Object
    """The fields of the edit that are in the way."""


def variable(found: Object, name: str, **value: Any) -> None:
    made = named(server(found)["env"], name)
    made.clear()
    made.update(name=name, **value)


def other_port(ports: list[Object], field: str) -> None:
    named(ports, "http")[field] = 9999


THEIR_VARIABLE = {".": {}, "f:name": {}, "f:value": {}}
IN_SERVER = "spec.template.spec.containers[0]"
EDITS = {
    "a value in the place of a source": Edit(
        "Deployment",
        lambda found: variable(found, "POD_IP", value="1.2.3.4"),
        in_server({"f:env": {item(name="POD_IP"): {"f:value": {}}, item(name="THEIRS"): THEIR_VARIABLE}}),
        (Cause("FieldValueInvalid", f"{IN_SERVER}.env[2].valueFrom"),),
        in_server({"f:env": {item(name="POD_IP"): {"f:value": {}}}}),
    ),
    "a source in the place of a value": Edit(
        "Deployment",
        lambda found: variable(found, "MINE", valueFrom={"fieldRef": {"fieldPath": "status.podIP"}}),
        in_server({"f:env": {item(name="MINE"): {"f:valueFrom": {".": {}, "f:fieldRef": {}}}}}),
        (Cause("FieldValueInvalid", f"{IN_SERVER}.env[4].valueFrom"),),
        in_server({"f:env": {item(name="MINE"): {"f:valueFrom": {".": {}, "f:fieldRef": {}}}}}),
    ),
    "a request above our limit": Edit(
        "Deployment",
        lambda found: server(found).update(resources={"limits": {"cpu": "8"}, "requests": {"cpu": "4", "memory": "64Mi"}}),
        in_server({"f:resources": {"f:limits": {"f:cpu": {}}, "f:requests": {"f:cpu": {}}}}),
        (Cause("FieldValueInvalid", f"{IN_SERVER}.resources.requests"),),
        in_server({"f:resources": {"f:requests": {"f:cpu": {}}}}),
    ),
    "a limit below our request": Edit(
        "Deployment",
        lambda found: server(found).update(resources={"limits": {"cpu": "2", "memory": "32Mi"}, "requests": {"memory": "16Mi"}}),
        in_server({"f:resources": {"f:limits": {"f:memory": {}}, "f:requests": {"f:memory": {}}}}),
        (Cause("FieldValueInvalid", f"{IN_SERVER}.resources.requests"),),
        in_server({"f:resources": {"f:limits": {"f:memory": {}}}}),
    ),
    "another handler of a probe": Edit(
        "Deployment",
        lambda found: server(found).update(livenessProbe={"exec": {"command": ["true"]}}),
        in_server({"f:livenessProbe": {"f:exec": {".": {}, "f:command": {}}}, "f:stdin": {}}),
        (Cause("FieldValueForbidden", f"{IN_SERVER}.livenessProbe.httpGet"),),
        in_server({"f:livenessProbe": {"f:exec": {".": {}, "f:command": {}}}}),
    ),
    "another source of a volume": Edit(
        "Deployment",
        lambda found: (
            named(found["spec"]["template"]["spec"]["volumes"], "tmp").update(hostPath={"path": "/tmp"}),
            named(found["spec"]["template"]["spec"]["volumes"], "tmp").pop("emptyDir"),
        ),
        {
            "f:spec": {
                "f:template": {
                    "f:spec": {
                        "f:volumes": {item(name="tmp"): {"f:hostPath": {".": {}, "f:path": {}}}},
                        "f:containers": {
                            item(name="server"): {
                                "f:volumeMounts": {item(mountPath="/more"): {".": {}, "f:mountPath": {}, "f:name": {}}}
                            }
                        },
                    }
                }
            }
        },
        (
            Cause("FieldValueForbidden", "spec.template.spec.volumes[2].hostPath"),
            Cause("FieldValueNotFound", f"{IN_SERVER}.volumeMounts[2].name"),
        ),
        {"f:spec": {"f:template": {"f:spec": {"f:volumes": {item(name="tmp"): {"f:hostPath": {".": {}, "f:path": {}}}}}}}},
    ),
    "another number of a container's port": Edit(
        "Deployment",
        lambda found: other_port(server(found)["ports"], "containerPort"),
        in_server({"f:ports": {item(containerPort=9999, protocol="TCP"): {".": {}, "f:name": {}}}}),
        (Cause(DUPLICATE, f"{IN_SERVER}.ports[2].name"),),
        in_server({"f:ports": {item(containerPort=9999, protocol="TCP"): {".": {}, "f:name": {}}}}),
    ),
    "a wait beyond our deadline": Edit(
        "Deployment",
        lambda found: found["spec"].update(minReadySeconds=700, progressDeadlineSeconds=800),
        {"f:spec": {"f:minReadySeconds": {}, "f:progressDeadlineSeconds": {}, "f:template": {"f:spec": {"f:hostAliases": {}}}}},
        (Cause("FieldValueInvalid", "spec.progressDeadlineSeconds"),),
        {"f:spec": {"f:minReadySeconds": {}}},
    ),
    "another number of a Service's port": Edit(
        "Service/bert",
        lambda found: other_port(found["spec"]["ports"], "port"),
        {
            "f:spec": {
                "f:ports": {
                    item(port=9999, protocol="TCP"): {".": {}, "f:name": {}, "f:port": {}},
                    item(port=7, protocol="UDP"): {".": {}, "f:name": {}, "f:port": {}},
                }
            }
        },
        (Cause(DUPLICATE, "spec.ports[1].name"),),
        {"f:spec": {"f:ports": {item(port=9999, protocol="TCP"): {".": {}, "f:name": {}, "f:port": {}}}}},
    ),
    "another bound of a budget": Edit(
        "PodDisruptionBudget",
        lambda found: (found["spec"].pop("maxUnavailable"), found["spec"].update(minAvailable=1)),
        {"f:spec": {"f:minAvailable": {}}},
        (Cause("FieldValueInvalid", "spec"),),
        {"f:spec": {"f:minAvailable": {}}},
    ),
}  # fmt: skip


def merged(one: Object, other: Object) -> Object:
    return {
        key: merged(one.get(key, {}), other.get(key, {})) if key in one or key in other else {}
        for key in sorted({*one, *other})
    }


def entry(manager: str, fields: Object, operation: str = "Update") -> Object:
    head = {"manager": manager, "operation": operation, "fieldsType": "FieldsV1", "time": "2030-01-01T00:00:00Z"}
    return {**head, "fieldsV1": fields}


OURS: Object = {"f:spec": {".": {}, "f:selector": {}}}


def edited(edit: Edit) -> tuple[Object, Object]:
    wanted, found = WANTED[edit.child], stored(WANTED[edit.child])
    edit.make(found)
    entries = [entry("halimede-operator", OURS, "Apply"), entry("kubectl", merged(edit.owned, BESIDE))]
    found["metadata"]["managedFields"] = [{**each, "apiVersion": wanted["apiVersion"]} for each in entries] + [STATUS]
    return wanted, found


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_only_the_conflicting_fields_of_an_edit_are_taken_over(edit: Edit) -> None:
    wanted, found = edited(edit)
    assert diff([wanted], [found], UID) == (Apply(wanted),)
    before = deepcopy(found)

    owners = taken_over(wanted, found, edit.causes)

    assert found == before
    assert owners is not None
    ours, *others = owners
    assert ours == {**before["metadata"]["managedFields"][0], "fieldsV1": merged(OURS, edit.taken)}
    (theirs,) = (each for each in others if each["manager"] == "kubectl")
    assert merged(theirs["fieldsV1"], edit.taken) == merged(edit.owned, BESIDE)
    assert STATUS in others
    # Once for what stands: were it refused all the same, there is nothing more to take.
    found["metadata"]["managedFields"] = owners
    assert taken_over(wanted, found, edit.causes) is None


@pytest.mark.parametrize("causes", [(), (Cause("FieldValueInvalid"),), (Cause("x", "spec.replicas"),), (Cause("x", "..[0][]["),)])  # fmt: skip
def test_a_refusal_about_our_own_fields_takes_over_nothing(causes: tuple[Cause, ...]) -> None:
    wanted, found = edited(EDITS["a value in the place of a source"])

    assert taken_over(wanted, found, causes) is None


def test_annotations_of_others_are_never_taken_over() -> None:
    wanted, found = edited(EDITS["another bound of a budget"])

    assert taken_over(wanted, found, (Cause("FieldValueTooLong", "metadata.annotations"),)) is None


def test_a_field_of_two_managers_is_taken_from_both() -> None:
    edit = EDITS["another bound of a budget"]
    wanted, found = edited(edit)
    second = {**entry("other", edit.owned, "Apply"), "apiVersion": wanted["apiVersion"]}
    found["metadata"]["managedFields"] = [second, *found["metadata"]["managedFields"][1:]]

    owners = taken_over(wanted, found, edit.causes)

    assert owners is not None
    assert [each["manager"] for each in owners] == ["halimede-operator", "kubectl", "kube-controller-manager"]
    assert owners[0]["fieldsV1"] == edit.taken
    assert owners[1]["fieldsV1"] == BESIDE


def test_without_managed_fields_nothing_is_taken_over() -> None:
    edit = EDITS["another bound of a budget"]
    wanted, found = edited(edit)
    del found["metadata"]["managedFields"]

    assert taken_over(wanted, found, edit.causes) is None
