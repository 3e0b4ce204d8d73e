"""The cache after events that come in order, out of order, twice, and not at all."""

import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.cluster.cache import Cache, entry_of
from halimede_operator.cluster.kinds import AUTOSCALERS, BY_KIND, DEPLOYMENTS, ENSEMBLES, MODELS, PODS, REPLICA_SETS
from halimede_operator.core.spec.types import Key, Kind

DIGITS = Key(Kind.INFERENCE_MODEL, "prod", "digits")
CHAIN = Key(Kind.MODEL_ENSEMBLE, "prod", "chain")


def thing(
    kind: str, name: str, uid: str, version: int, owner: tuple[str, str, str] | None = None, **rest: Any
) -> dict[str, Any]:
    """owner: kind, name and uid of its controller."""
    metadata: dict[str, Any] = {"namespace": "prod", "name": name, "uid": uid, "resourceVersion": str(version)}
    if owner is not None:
        api_version = "halimede.dev/v1alpha1" if owner[0] in list(Kind) else "apps/v1"
        metadata["ownerReferences"] = [
            {"apiVersion": api_version, "kind": owner[0], "name": owner[1], "uid": owner[2], "controller": True}
        ]
    metadata.update(rest.pop("metadata", {}))
    return {"metadata": metadata, **rest}


def put(cache: Cache, kind: str, name: str, uid: str, version: int, **rest: Any) -> frozenset[Key]:
    return cache.put(BY_KIND[kind], thing(kind, name, uid, version, **rest))


def family(cache: Cache) -> None:
    """A model with its Deployment, ReplicaSet and pod."""
    put(cache, "InferenceModel", "digits", "model", 1)
    put(cache, "Deployment", "digits", "deployment", 2, owner=("InferenceModel", "digits", "model"))
    put(cache, "ReplicaSet", "digits-1", "rs", 3, owner=("Deployment", "digits", "deployment"))
    put(cache, "Pod", "digits-1-x", "pod", 4, owner=("ReplicaSet", "digits-1", "rs"))


def test_objects_are_found_by_name_and_by_owner():
    cache = Cache()
    family(cache)
    assert cache.get(DIGITS) == {
        "apiVersion": "halimede.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"namespace": "prod", "name": "digits", "uid": "model", "resourceVersion": "1"},
    }
    assert [entry.kind for entry in cache.owned_by("model")] == ["Deployment"]
    assert [entry.name for entry in cache.owned_by("rs")] == ["digits-1-x"]
    assert list(cache.owned_by("nobody")) == []


def test_hpa_wakes_its_object_when_a_metric_gets_or_loses_its_value():
    """And not when a value changes: under load that is every 15 s."""
    cache = Cache()
    family(cache)
    owner = ("InferenceModel", "digits", "model")
    metric = {"type": "Pods", "pods": {"metric": {"name": "halimede_queue_requests"}}}

    def told(version: int, current: Any) -> frozenset[Key]:
        status = {"currentMetrics": [current]}
        return put(
            cache, AUTOSCALERS.kind, "digits", "hpa", version, owner=owner, spec={"metrics": [metric]}, status=status
        )

    def value(number: str) -> Any:
        return {"type": "Pods", "pods": {"current": {"averageValue": number}}}

    woken = [told(10, value("4")), told(11, value("5")), told(12, {"type": ""}), told(13, {"type": ""})]
    assert [*woken[1:], told(14, value("5"))] == [frozenset(), {DIGITS}, frozenset(), {DIGITS}]


def test_of_a_replica_set_only_what_its_pods_need_is_kept():
    """A thousand templates take 5 MB, and are in the ConfigMaps too."""
    cache = Cache()
    volumes = [{"name": "tmp", "emptyDir": {}}, {"name": "config", "configMap": {"name": "digits-config-1"}}]
    pod = {"serviceAccountName": "digits", "containers": [{"name": "server"}], "volumes": volumes}
    value = thing(
        "ReplicaSet", "digits-1", "rs", 1, spec={"replicas": 1, "template": {"spec": pod}}, status={"replicas": 1}
    )
    cache.put(REPLICA_SETS, value)

    entry = cache.find("ReplicaSet", "prod", "digits-1")
    assert entry is not None
    used = {"serviceAccountName": "digits", "volumes": [{"configMap": {"name": "digits-config-1"}}]}
    assert (entry.object["spec"], entry.object["status"]) == ({"template": {"spec": used}}, {"replicas": 1})


def test_an_entry_takes_no_more_memory_than_its_text():
    """orjson leaves much more than that allocated, most of all for long strings."""
    value = thing("ConfigMap", "plan", "plan", 1, data={"plan.json": "x" * 100_000})
    tracemalloc.start()
    try:
        entry = entry_of(BY_KIND["ConfigMap"], value)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert taken < 1.1 * len(entry.json)


def test_managed_fields_and_the_last_applied_configuration_are_not_kept():
    cache = Cache()
    value = thing("Service", "p", "service", 1, metadata={
        "managedFields": [{"manager": "x"}],
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "mine": "yes"},
    })  # fmt: skip
    cache.put(BY_KIND["Service"], value)
    entry = cache.find("Service", "prod", "p")
    assert entry is not None
    assert entry.object["metadata"] == {
        "namespace": "prod", "name": "p", "uid": "service", "resourceVersion": "1", "annotations": {"mine": "yes"}
    }  # fmt: skip
    assert "managedFields" in value["metadata"], "what was given is left as it is"


def test_of_a_pod_only_what_is_read_is_kept():
    limits = {"resources": {"limits": {"memory": "1Gi"}}}
    server = {"name": "server", "image": "server:1", **limits}
    claim = {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}}
    spec = {
        "nodeName": "node-1",
        "containers": [{**server, "env": [{"name": "LONG", "value": "x" * 10_000}], "args": ["--all"]}],
        "volumes": [claim, {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
        "tolerations": [{"operator": "Exists"}],
    }
    value = thing("Pod", "p", "pod", 1, spec=spec, status={"phase": "Failed"}, metadata={"annotations": {"a": "b"}})
    entry = entry_of(PODS, value)
    assert entry.object["spec"] == {"nodeName": "node-1", "containers": [server], "volumes": [claim, {"name": "tmp"}]}
    assert "annotations" not in entry.object["metadata"]
    assert entry.has_ended


def test_a_child_wakes_its_owner_and_pods_wake_by_their_labels():
    cache = Cache()
    assert put(cache, "Service", "s", "1", 1, owner=("InferenceModel", "digits", "model")) == {DIGITS}
    labels = {"labels": {"halimede.dev/model": "digits"}}
    assert put(cache, "Pod", "p", "2", 1, owner=("ReplicaSet", "r", "rs"), metadata=labels) == {DIGITS}
    labels = {"labels": {"halimede.dev/ensemble": "chain"}}
    assert put(cache, "ReplicaSet", "r", "3", 1, owner=("Deployment", "d", "d"), metadata=labels) == {CHAIN}
    assert put(cache, "Pod", "stray", "4", 1) == frozenset()


def test_children_without_a_controller_are_found_by_their_labels():
    cache = Cache()
    labelled = {"labels": {"halimede.dev/model": "digits"}}
    put(cache, "HorizontalPodAutoscaler", "digits", "hpa", 1, metadata=labelled)
    put(cache, "Pod", "digits-x", "pod", 2, metadata=labelled)
    assert [entry.uid for entry in cache.labelled_for(DIGITS)] == ["hpa"]
    owner = ("InferenceModel", "digits", "model")
    put(cache, "HorizontalPodAutoscaler", "digits", "hpa", 3, owner=owner, metadata=labelled)
    assert [*cache.labelled_for(DIGITS)] == []
    put(cache, "HorizontalPodAutoscaler", "digits", "hpa", 4, metadata=labelled)
    cache.delete("hpa", 5)
    assert [*cache.labelled_for(DIGITS)] == []


def test_a_model_wakes_the_ensembles_that_currently_use_it():
    cache = Cache()

    def uses(version: int, *names: str) -> frozenset[Key]:
        steps = [{"name": name, "modelRef": {"name": name}} for name in names]
        return put(cache, "ModelEnsemble", "chain", "e", version, spec={"steps": steps})

    assert uses(1, "digits", "other") == {CHAIN}
    assert put(cache, "InferenceModel", "digits", "model", 2) == {DIGITS, CHAIN}
    assert cache.delete("model", 3) == {DIGITS, CHAIN}
    uses(4, "other")
    assert put(cache, "InferenceModel", "digits", "model2", 5) == {DIGITS}


def test_old_and_repeated_states_wake_nothing():
    cache = Cache()
    assert put(cache, "InferenceModel", "digits", "model", 5, spec={"new": True}) == {DIGITS}
    assert put(cache, "InferenceModel", "digits", "model", 5) == frozenset()
    assert put(cache, "InferenceModel", "digits", "model", 4) == frozenset()
    assert (cache.get(DIGITS) or {})["spec"] == {"new": True}


def test_an_old_state_does_not_restore_a_deleted_object():
    cache = Cache()
    put(cache, "InferenceModel", "digits", "model", 5)
    cache.delete("model", 7)
    assert put(cache, "InferenceModel", "digits", "model", 6) == frozenset()
    assert cache.get(DIGITS) is None


def test_an_object_whose_label_is_set_again_is_known_again():
    cache = Cache()
    put(cache, "InferenceModel", "digits", "model", 5)
    cache.delete("model", 7)
    assert put(cache, "InferenceModel", "digits", "model", 8) == {DIGITS}


def test_of_two_objects_of_one_name_the_newer_counts():
    cache = Cache()
    put(cache, "InferenceModel", "digits", "old", 5)
    put(cache, "InferenceModel", "digits", "new", 8)
    assert put(cache, "InferenceModel", "digits", "old", 6) == frozenset()
    cache.delete("old", 7)
    assert (cache.get(DIGITS) or {})["metadata"]["uid"] == "new"


def test_a_list_forgets_missing_objects_that_are_not_newer():
    cache = Cache()
    put(cache, "InferenceModel", "gone", "1", 5)
    put(cache, "InferenceModel", "digits", "2", 6)
    put(cache, "InferenceModel", "newer", "3", 11)
    put(cache, "Pod", "p", "4", 2)
    assert cache.listed(MODELS, None, 10, frozenset({"2"})) == {Key(Kind.INFERENCE_MODEL, "prod", "gone")}
    there = [name for name in ("gone", "digits", "newer") if cache.find("InferenceModel", "prod", name)]
    assert there == ["digits", "newer"]
    assert cache.find("Pod", "prod", "p") is not None


def test_a_list_of_one_namespace_does_not_affect_others():
    cache = Cache()
    put(cache, "InferenceModel", "digits", "1", 5)
    assert cache.listed(MODELS, "other", 10, frozenset()) == frozenset()
    assert cache.get(DIGITS) is not None


def test_a_state_older_than_a_list_without_the_object_is_dropped():
    cache = Cache()
    cache.listed(MODELS, None, 10, frozenset())
    assert put(cache, "InferenceModel", "digits", "1", 9) == frozenset()
    assert put(cache, "InferenceModel", "digits", "1", 11) == {DIGITS}
    listed = thing("InferenceModel", "x", "2", 3)
    assert cache.learn(entry_of(MODELS, listed), listed=True) == {Key(Kind.INFERENCE_MODEL, "prod", "x")}


KINDS = (MODELS, ENSEMBLES, DEPLOYMENTS, REPLICA_SETS, PODS)
HISTORY = st.lists(
    st.tuples(st.sampled_from(["put", "delete"]), st.sampled_from(KINDS), st.sampled_from("ab")),
    min_size=1,
    max_size=30,
)


@given(HISTORY, st.data())
def test_the_cache_ends_with_the_true_state_in_any_order_of_events(
    history: list[tuple[str, Any, str]], data: st.DataObject
):
    """Objects come, change and go; their events arrive out of order, and some twice."""
    there: dict[tuple[str, str], tuple[str, int]] = {}
    events: list[tuple[str, Any, str, str, int]] = []
    for version, (what, resource, name) in enumerate(history, 1):
        uid = there.get((resource.kind, name), (f"{name}{version}", 0))[0]
        if what == "put":
            there[resource.kind, name] = (uid, version)
        elif there.pop((resource.kind, name), None) is None:
            continue
        events.append((what, resource, name, uid, version))
    shuffled = data.draw(st.permutations(events + events[::3]))
    cache = Cache()
    for what, resource, name, uid, version in shuffled:
        if what == "put":
            cache.put(resource, thing(resource.kind, name, uid, version))
        else:
            cache.delete(uid, version)
    known = {
        (resource.kind, name): (entry.uid, entry.version)
        for resource in KINDS
        for name in "ab"
        if (entry := cache.find(resource.kind, "prod", name)) is not None
    }
    assert known == there
    assert len(cache) == len(there)


def test_objects_of_an_unavailable_kind_are_forgotten_and_may_come_back():
    cache = Cache()
    family(cache)
    put(cache, "ModelEnsemble", "chain", "chain", 5)
    put(cache, "ResourceClaimTemplate", "t", "t", 6, owner=("InferenceModel", "digits", "model"))
    assert cache.set_unavailable({"ResourceClaimTemplate": "why"}) == {DIGITS, CHAIN}
    assert cache.set_unavailable({"ResourceClaimTemplate": "why"}) == frozenset()
    assert [entry.kind for entry in cache.owned_by("model")] == ["Deployment"]
    assert cache.set_unavailable({}) == {DIGITS, CHAIN}
    put(cache, "ResourceClaimTemplate", "t", "t", 6, owner=("InferenceModel", "digits", "model"))
    assert [entry.kind for entry in cache.owned_by("model")] == ["Deployment", "ResourceClaimTemplate"]
