"""Properties of the children of any valid object."""

from copy import deepcopy
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from halimede_operator.core.children.diff import Apply, Delete, diff
from halimede_operator.core.spec.types import Key, ModelSpec, Spec
from support.examples import examples
from support.operator_desired import children_of_spec
from support.operator_specs import PLATFORM, UID, cases
from support.operator_store import stored

Case = tuple[Key, Spec, dict[str, ModelSpec]]
Object = dict[str, Any]
Children = tuple[Object, ...]
Path = tuple[str | int, ...]

# Specs are large: to make one smaller takes longer than to read it.
PROFILE = settings(
    max_examples=examples(40),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


def children_of(case: Case) -> Children:
    key, spec, members = case
    return children_of_spec(key, UID, spec, members, PLATFORM)


def identity(child: Object) -> tuple[str, str]:
    return child["kind"], child["metadata"]["name"]


def leaves(value: Any, path: Path = ()) -> list[Path]:
    """The paths of all leaves."""
    if isinstance(value, dict) and value:
        return [leaf for key, each in value.items() for leaf in leaves(each, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for i, each in enumerate(value) for leaf in leaves(each, (*path, i))]
    return [path]


def at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


@PROFILE
@given(cases(), st.data())
def test_children_of_any_spec(case: Case, data: st.DataObject) -> None:
    """One example serves all that holds for one spec: a spec takes far longer to draw than to check."""
    wanted = children_of(case)
    assert wanted == children_of(deepcopy(case))
    no_name_exceeds_its_limit(wanted)
    existing_children_need_no_change(wanted)
    additions_of_others_are_left_alone(wanted)
    a_missing_child_is_created_again(wanted, data)
    any_edit_of_our_fields_is_detected(wanted, data)


@PROFILE
@given(cases(), cases())
def test_a_change_from_any_spec_to_any_other(one: Case, other: Case) -> None:
    key, _, _ = one
    before = children_of(one)
    after = children_of_spec(key, UID, other[1], other[2], PLATFORM)
    the_changes_lead_from_one_to_the_other(before, after)
    config_maps_with_different_content_have_different_names(before, after)


def no_name_exceeds_its_limit(children: Children) -> None:
    assert len({identity(child) for child in children}) == len(children)
    for child in children:
        assert len(child["metadata"]["name"]) <= 52
        assert all(len(label) <= 63 for label in child["metadata"]["labels"].values())
    (pod,) = (child["spec"]["template"]["spec"] for child in children if child["kind"] == "Deployment")
    volumes = [volume["name"] for volume in pod["volumes"]]
    assert len(set(volumes)) == len(volumes)
    assert all(len(name) <= 63 for name in volumes)
    for container in (*pod["initContainers"], *pod["containers"]):
        mounts = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
        assert len(set(mounts)) == len(mounts)
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= set(volumes)


def existing_children_need_no_change(wanted: Children) -> None:
    assert diff(wanted, [stored(child) for child in wanted], UID) == ()


def any_edit_of_our_fields_is_detected(wanted: Children, data: st.DataObject) -> None:
    standing = [stored(child) for child in wanted]
    edited = data.draw(st.integers(0, len(wanted) - 1))
    ours = {key: value for key, value in wanted[edited].items() if key not in ("apiVersion", "kind")}
    path = data.draw(
        st.sampled_from(
            [leaf for leaf in leaves(ours) if leaf[:2] not in (("metadata", "name"), ("metadata", "namespace"))]
        )
    )
    parent, last = at(standing[edited], path[:-1]), path[-1]
    value = parent[last]
    # No owner is without its uid.
    if isinstance(value, dict) or (last != "uid" and data.draw(st.booleans())):
        del parent[last]
    else:
        parent[last] = not value if isinstance(value, bool) else f"{value}0" if isinstance(value, str) else value + 1

    changes = diff(wanted, standing, UID)

    assert [identity(change.object) for change in changes if not isinstance(change, Delete)] == [
        identity(wanted[edited])
    ]


def additions_of_others_are_left_alone(wanted: Children) -> None:
    standing = [stored(child) for child in wanted]
    for child in standing:
        child["metadata"]["annotations"] |= {"tool.example/note": "theirs"}
        child["metadata"]["labels"] |= {"tool.example/team": "theirs"}
        child["metadata"]["finalizers"] = ["tool.example/keep"]
        match child["kind"]:
            case "Deployment":
                child["spec"]["paused"] = True
                template = child["spec"]["template"]
                template["metadata"]["annotations"] = {
                    **template["metadata"].get("annotations", {}),
                    "kubectl.kubernetes.io/restartedAt": "2026-01-01T00:00:00Z",
                }
                template["spec"]["containers"].insert(0, {"name": "injected", "image": "sidecar:1"})
                template["spec"]["volumes"].append({"name": "injected", "emptyDir": {}})
            case "Service":
                child["spec"]["ports"].append({"name": "extra", "port": 65535, "protocol": "UDP"})
            case _:
                pass

    assert diff(wanted, standing, UID) == ()


def a_missing_child_is_created_again(wanted: Children, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(wanted))

    assert diff(wanted, [stored(child) for child in wanted if child is not gone], UID) == (Apply(gone, is_new=True),)


def the_changes_lead_from_one_to_the_other(before: Children, after: Children) -> None:
    changes = diff(after, [stored(child) for child in before], UID)

    old = {identity(child): child for child in before}
    new = {identity(child): child for child in after}
    applied = {identity(change.object) for change in changes if isinstance(change, Apply)}
    assert applied == {each for each, child in new.items() if old.get(each) != child}
    # What the Deployment still names goes when its pods have gone.
    deleted = {(change.kind, change.name) for change in changes if isinstance(change, Delete)}
    kept = ("ConfigMap", "ResourceClaimTemplate", "ServiceAccount")
    assert deleted == {each for each in old.keys() - new.keys() if each[0] not in kept}


def config_maps_with_different_content_have_different_names(before: Children, after: Children) -> None:
    first, second = before[0], after[0]
    assert (first["metadata"]["name"] == second["metadata"]["name"]) == (first["data"] == second["data"])
