"""Which of two objects gets the child names that both need."""

import pytest

from halimede_operator.core.children.name_collisions import contending_keys, name_collision
from halimede_operator.core.snapshot import Contender, Object, Snapshot
from halimede_operator.core.spec.types import Key, Kind

MODEL, ENSEMBLE = Kind.INFERENCE_MODEL, Kind.MODEL_ENSEMBLE


def thing(kind: Kind, name: str, second: int, uid: str = "u") -> Object:
    created = f"2030-01-01T00:00:{second:02}Z"
    metadata = {"namespace": "prod", "name": name, "uid": uid, "creationTimestamp": created}
    return {"kind": str(kind), "metadata": metadata}


def seen(
    own: Object, other: Object, *, children: tuple[Object, ...] = (), other_has_deployment: bool = False
) -> Snapshot:
    key = Key(Kind(own["kind"]), "prod", own["metadata"]["name"])
    return Snapshot(key, own, {}, children, (), (), {}, contenders=(Contender(other, other_has_deployment),))


def test_contending_keys_lists_all_objects_with_common_child_names():
    found = {(key.kind, key.name) for key in contending_keys(Key(MODEL, "prod", "x-pods"))}
    assert found == {(ENSEMBLE, "x-pods"), *((kind, name) for kind in Kind for name in ("x", "x-pods-pods"))}
    for other in contending_keys(Key(MODEL, "prod", "x")):
        assert Key(MODEL, "prod", "x") in contending_keys(other)


PAIRS = {
    "a model and an ensemble": (thing(MODEL, "x", 1), thing(ENSEMBLE, "x", 2), "x"),
    "the headless Service of the older": (thing(MODEL, "x", 1), thing(MODEL, "x-pods", 2), "x-pods"),
    "the headless Service of the younger": (thing(ENSEMBLE, "x-pods", 1), thing(MODEL, "x", 2), "x-pods"),
    "made in one second": (thing(MODEL, "x", 1, "a"), thing(MODEL, "x-pods", 1, "b"), "x-pods"),
}


@pytest.mark.parametrize("case", PAIRS)
def test_the_older_object_gets_the_names(case: str):
    older, younger, name = PAIRS[case]
    assert name_collision(seen(older, younger)) is None
    taken = name_collision(seen(younger, older))
    assert taken is not None
    assert taken.object["metadata"] == {"namespace": "prod", "name": name}
    assert taken.owner == f"{older['kind']} {older['metadata']['name']}"


def test_the_object_with_a_deployment_keeps_the_names():
    older, younger, name = PAIRS["a model and an ensemble"]
    assert name_collision(seen(younger, older, children=({"kind": "Deployment"},))) is None
    taken = name_collision(seen(older, younger, other_has_deployment=True))
    assert taken is not None
    assert (taken.object["metadata"]["name"], taken.owner) == (name, "ModelEnsemble x")
