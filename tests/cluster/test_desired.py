"""Children in a real API server: it accepts them, and the objects that it returns need no change."""

import asyncio
import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from kubernetes import client, config

from cluster.access import Cluster
from halimede_operator.api_server.connection import Connection
from halimede_operator.api_server.errors import ApiError
from halimede_operator.cluster.client import KubeClient
from halimede_operator.cluster.kinds import BY_KIND
from halimede_operator.core.children.diff import Apply, diff
from halimede_operator.core.spec.types import (
    Accelerator,
    AcceleratorType,
    CaBundle,
    Cache,
    CacheMedium,
    Key,
    ModelSpec,
    Scheduling,
    Spec,
    TopologySpread,
)
from support.operator_desired import children_of_spec
from support.operator_specs import PLATFORM, UID, cases, model_key, model_spec, workload

Object = dict[str, Any]
Case = tuple[Key, Spec, dict[str, ModelSpec]]

DRY_RUN = {"fieldManager": "halimede-operator", "force": "true", "dryRun": "All"}
APPLY = ("apply", "--server-side", "--force-conflicts", "--field-manager=halimede-operator", "--output=json", "-f", "-")
MADE = {"ConfigMap", "ServiceAccount", "Service", "NetworkPolicy", "Deployment", "PodDisruptionBudget"}
NOWHERE = Scheduling(node_selector={"nowhere": "yes"})
EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def apply(cluster: Cluster, children: tuple[Object, ...], *flags: str) -> list[Object]:
    """What the API server makes of them; an AssertionError where it refuses one."""
    given_all = {"apiVersion": "v1", "kind": "List", "items": list(children)}
    answer = json.loads(cluster.kubectl(*APPLY, *flags, given=json.dumps(given_all)))
    return [*answer["items"]] if answer["kind"] == "List" else [answer]


@pytest.fixture(scope="module")
def connection(cluster: Cluster) -> Iterator[client.ApiClient]:
    """Without kubectl, whose process takes longer than what it asks."""
    with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
        yield connection


def dry_run(connection: client.ApiClient, child: Object) -> Object:
    """What the API server would make of it; an AssertionError where it refuses it."""
    metadata = child["metadata"]
    request = connection.param_serialize(
        "PATCH",
        BY_KIND[child["kind"]].path(metadata["namespace"], metadata["name"]),
        query_params=[*DRY_RUN.items()],
        header_params={"Content-Type": "application/apply-patch+yaml", "Accept": "application/json"},
        body=child,
        auth_settings=["BearerToken"],
    )
    answer = connection.call_api(*request)
    text = answer.read()
    assert answer.status in (200, 201), text
    made: Object = json.loads(text)
    return made


def in_namespace(key: Key, namespace: str) -> Key:
    return replace(key, namespace=namespace)


@EXAMPLES
@given(case=cases())
def test_generated_children_are_accepted_and_need_no_change(
    connection: client.ApiClient, namespace: str, case: Case
) -> None:
    key, spec, members = case
    wanted = children_of_spec(in_namespace(key, namespace), UID, spec, members, PLATFORM)

    returned = [dry_run(connection, child) for child in wanted]

    assert diff(wanted, returned, UID) == ()


def test_fields_no_longer_wanted_are_removed(cluster: Cluster, namespace: str) -> None:
    key = in_namespace(model_key(), namespace)
    before = model_spec(
        workload=workload(
            suspend=True,
            env=({"name": "GONE", "value": "1"},),
            pod_template={"metadata": {"annotations": {"gone": "1"}}, "spec": {"hostAliases": [{"ip": "10.0.0.1"}]}},
        )
    )
    first = ownerless(children_of_spec(key, UID, before, {}, PLATFORM))
    apply(cluster, first)
    wanted = ownerless(children_of_spec(key, UID, model_spec(workload=workload(suspend=True)), {}, PLATFORM))

    deployment = next(child for child in apply(cluster, wanted) if child["kind"] == "Deployment")

    template = deployment["spec"]["template"]
    assert "gone" not in template["metadata"]["annotations"]
    assert "hostAliases" not in template["spec"]
    assert all(variable["name"] != "GONE" for variable in template["spec"]["containers"][0]["env"])


def test_a_new_child_is_created_only_if_its_name_is_free(cluster: Cluster, namespace: str) -> None:
    every = model_spec(workload=workload(replicas=2, network_policy=True, scheduling=NOWHERE))
    wanted = ownerless(children_of_spec(in_namespace(model_key(), namespace), UID, every, {}, PLATFORM))
    assert {child["kind"] for child in wanted} == MADE

    async def make() -> None:
        connection = Connection(str(cluster.kubeconfig))
        await connection.refresh()
        client = KubeClient(connection, may_write=lambda: True)
        for child in wanted:
            made = await client.apply(child, is_new=True)
            with pytest.raises(ApiError) as refusal:
                await client.apply({**child, "metadata": {**child["metadata"], "labels": {}}}, is_new=True)
            assert refusal.value.is_conflict
            found = await client.get(BY_KIND[child["kind"]], namespace, child["metadata"]["name"])
            assert found is not None
            assert (found["metadata"]["uid"], found["metadata"]["labels"]) == (made["metadata"]["uid"], made["metadata"]["labels"])  # fmt: skip
        await client.close()

    asyncio.run(make())


@pytest.mark.large
def test_hand_edits_are_undone_and_additions_of_others_stay(cluster: Cluster, namespace: str) -> None:
    key = in_namespace(model_key(), namespace)
    wanted = ownerless(children_of_spec(key, UID, model_spec(workload=workload(suspend=True)), {}, PLATFORM))
    apply(cluster, wanted)
    cluster.kubectl("annotate", "deployment/bert", "tool.example/note=theirs", f"--namespace={namespace}")
    cluster.kubectl("set", "env", "deployment/bert", "--containers=server", "THEIRS=1", f"--namespace={namespace}")
    (deployment,) = (child for child in wanted if child["kind"] == "Deployment")
    assert diff([deployment], [standing(cluster, namespace)], UID) == ()
    image = "--patch=" + json.dumps(
        {"spec": {"template": {"spec": {"containers": [{"name": "server", "image": "x"}]}}}}
    )
    cluster.kubectl("patch", "deployment/bert", image, f"--namespace={namespace}")
    assert diff([deployment], [standing(cluster, namespace)], UID) == (Apply(deployment),)

    apply(cluster, (deployment,))

    found = standing(cluster, namespace)
    assert diff([deployment], [found], UID) == ()
    assert found["metadata"]["annotations"]["tool.example/note"] == "theirs"
    (server,) = found["spec"]["template"]["spec"]["containers"]
    assert {"name": "THEIRS", "value": "1"} in server["env"]


FULL = workload(
    accelerator=Accelerator(AcceleratorType.MIG, mig_profile="1g.10gb"),
    resources={"limits": {"cpu": "1", "memory": "1Gi"}},
    cache=Cache(CacheMedium.PVC, "shared"),
    scheduling=Scheduling(topology_spread=TopologySpread.ZONE),
    service_account_name="default",
)


def test_pods_pass_the_restricted_profile(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("label", f"namespace/{namespace}", "pod-security.kubernetes.io/enforce=restricted")
    key = in_namespace(model_key(), namespace)
    bundle = CaBundle("corp", "ca.crt")
    full = model_spec(uri="pvc://models/bert", credentials_secret="keys", ca_bundle=bundle, workload=FULL)
    on_the_node = model_spec(workload=replace(FULL, cache=Cache(CacheMedium.HOST_PATH)))

    apply(cluster, (pod_of(children_of_spec(key, UID, full, {}, PLATFORM)),), "--dry-run=server")

    with pytest.raises(AssertionError, match="restricted volume types"):
        apply(cluster, (pod_of(children_of_spec(key, UID, on_the_node, {}, PLATFORM)),), "--dry-run=server")


def pod_of(children: tuple[Object, ...]) -> Object:
    (deployment,) = (child for child in children if child["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    metadata = {**template["metadata"], "name": "bert-0", "namespace": deployment["metadata"]["namespace"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def ownerless(children: tuple[Object, ...]) -> tuple[Object, ...]:
    """Kubernetes would delete what an object owns that does not exist."""
    made = deepcopy(children)
    for child in made:
        del child["metadata"]["ownerReferences"]
    return made


def standing(cluster: Cluster, namespace: str) -> Object:
    found: Object = json.loads(cluster.kubectl("get", "deployment/bert", "--output=json", f"--namespace={namespace}"))
    return found
