"""The chart in a cluster: its rights are needed and sufficient, upgrades restart nothing, and the examples work."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.gpus import Gpus, Layout
from cluster.installed import CHART, NAMESPACE, SERVER_IMAGE, Platform, Tenant
from cluster.own import OwnCluster
from cluster.spaces import eventually
from support.image import REPOSITORY_ROOT
from support.models import add_scaled

START_LIMIT_S = 120.0
EXAMPLES = sorted((REPOSITORY_ROOT / "manifests" / "examples").glob("*.yaml"))
KINDS = "inferencemodels,modelensembles"
CHILDREN = "deployments,services,configmaps,serviceaccounts,poddisruptionbudgets,networkpolicies"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:halimede"

Object = dict[str, Any]
Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


def model(name: str, uri: str, **fields: Any) -> str:
    return json.dumps({
        "apiVersion": "halimede.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name},
        "spec": {"model": {"uri": uri}, **fields},
    })  # fmt: skip


def pair(*names: str) -> str:
    """An ensemble of models that come one after the other, without pods."""
    steps = [
        {"name": f"s{n}", "modelRef": {"name": name}, "inputs": {"IN": f"s{n - 1}.y" if n else "request.IN"}, "outputs": {"OUT": "y"}}
        for n, name in enumerate(names)
    ]  # fmt: skip
    tensor = {"dataType": "FP32", "shape": [4]}
    spec = {
        "inputs": [{"name": "IN", **tensor}],
        "outputs": [{"name": "OUT", **tensor, "from": f"s{len(names) - 1}.y"}],
        "steps": steps,
        "replicas": 0,
    }
    head = {"apiVersion": "halimede.dev/v1alpha1", "kind": "ModelEnsemble", "metadata": {"name": "pair"}}
    return json.dumps({**head, "spec": spec})


@pytest.fixture
def scaled(platform: Platform, tmp_path: Path) -> str:
    """The URI of a model that doubles four numbers."""
    add_scaled(tmp_path, "twice", 2)
    return platform.store.put("twice", tmp_path / "twice")


def requests_of(cluster: OwnCluster, user: str, begin: int = 0) -> list[Object]:
    events = [event for event in cluster.audit_events(containing=user) if event["user"]["username"] == user]
    return events[begin:]


def rights_used(events: list[Object]) -> set[Right]:
    found = set()
    for event in events:
        if "objectRef" not in event or event["responseStatus"]["code"] in (401, 403):
            continue
        what = event["objectRef"]
        resource = f"{what['resource']}/{what['subresource']}" if "subresource" in what else what["resource"]
        found.add((what.get("apiGroup", ""), resource, event["verb"]))
        if event["verb"] == "patch" and event["responseStatus"]["code"] == 201:
            # What an apply makes needs both rights.
            found.add((what.get("apiGroup", ""), resource, "create"))
    return found


def rights_given(*roles: Object) -> set[Right]:
    return {
        (group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def refused(events: list[Object]) -> list[tuple[str, str, str]]:
    """Requests that the user had no right to.

    In a namespace that is being deleted, no user may create objects. For some seconds after CRDs were created again, as
    other tests do, the API server cannot check owner references to their objects. After an installation it takes some
    time until the API server knows the new roles: what it allows later was refused for this reason.
    """
    passing = ("because it is being terminated", "cannot find RESTMapping")
    found: list[tuple[str, str, str]] = []
    allowed: set[tuple[str, str]] = set()
    for event in reversed(events):
        asked = event["verb"], event["requestURI"].partition("?")[0]
        message = event["responseStatus"].get("message", "")
        if event["responseStatus"]["code"] != 403:
            allowed.add(asked)
        elif asked not in allowed and not any(text in message for text in passing):
            found.append((*asked, message))
    return found


def written(events: list[Object], namespace: str) -> list[tuple[str, str]]:
    """Verb and resource of what was written in a namespace, but statuses and events."""
    return sorted(
        (event["verb"], event["objectRef"]["resource"])
        for event in events
        if event["verb"] in ("create", "update", "patch", "delete")
        and event["objectRef"].get("namespace") == namespace
        and event["objectRef"].get("subresource") != "status"
        and event["objectRef"]["resource"] != "events"
    )


def wait_accepted(tenant: Tenant, what: str) -> None:
    """What stands is of the newest spec."""

    def look() -> bool:
        value = tenant.get(what)
        status = value.get("status", {})
        states = {each["type"]: each["status"] for each in status.get("conditions", [])}
        is_accepted = "True" in (states.get("Accepted"), states.get("Ready"))
        return is_accepted and status["observedGeneration"] == value["metadata"]["generation"]

    try:
        eventually(look, f"{what} to be accepted")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{yaml.safe_dump(tenant.get(what).get('status'))}") from None


def left_over(tenant: Tenant, owner: Object, **rest: Any) -> str:
    """A child of a name that the operator gives to none, as another version of it may have made it."""
    labels = tenant.get("deployment/twice")["metadata"]["labels"]
    reference = {name: owner[name] for name in ("apiVersion", "kind")} | {
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
    }
    metadata = {"name": "twice-of-before", "labels": labels, "ownerReferences": [reference]}
    return json.dumps({"metadata": metadata, **rest})


@pytest.mark.large
def test_the_operator_has_the_rights_that_it_needs_and_no_others(
    platform: Platform, tenant: Tenant, gpus: Gpus, scaled: str
) -> None:
    cluster = platform.cluster
    policy = {"networkPolicy": {"enabled": True}}
    cluster.kubectl("delete", "lease", "halimede", f"--namespace={NAMESPACE}")
    for name in ("twice", "other"):
        tenant.apply(model(name, scaled, replicas=0))
    tenant.apply(model("twice", scaled, replicas=2, **policy))
    tenant.apply(pair("twice", "other"))
    tenant.wait_ready("im/twice", START_LIMIT_S)
    wait_accepted(tenant, "mens/pair")
    assert "networkpolicy.networking.k8s.io/twice" in tenant.names(CHILDREN)

    # A pod without a node makes the operator look at the nodes.
    large = model("large", scaled, replicas=2, resources={"requests": {"cpu": "1000"}}, **policy)
    tenant.apply(large)
    tenant.wait_for_reason("im/large", "Unschedulable", START_LIMIT_S)

    # One that cannot have its volumes, at what the kubelet says of it; one that has a device, at its node.
    gpus.install("node-1", Layout([["1g.10gb"]]))
    without = {"uri": scaled, "credentials": {"secretRef": {"name": "absent"}}}
    accelerator = {"type": "MIG", "mig": {"profile": "1g.10gb"}}
    tenant.apply(model("without", scaled, model=without, accelerator=accelerator, **policy))
    tenant.wait_for_reason("im/without", "SecretMissing", START_LIMIT_S)
    tenant.kubectl("delete", "im/without")

    # And something else that has the name of its first child, at what has the names of all of them.
    of_large = "--selector=halimede.dev/model=large"
    (plan,) = tenant.names("configmaps", of_large)
    tenant.kubectl("delete", "im/large")
    eventually(lambda: not tenant.names(CHILDREN, of_large), "its children to go", START_LIMIT_S)
    tenant.kubectl("create", "configmap", plan.removeprefix("configmap/"))
    tenant.apply(large)
    tenant.wait_for_reason("im/large", "Conflict")

    # Rollouts until the first plan and the account are in no revision's pods; what is wanted no more goes.
    tenant.apply(model("twice", scaled, replicas=0, serviceAccountName="default"))
    for number in range(3):
        spec = {"replicas": 0, "serviceAccountName": "default", "model": {"uri": scaled, "name": f"name-{number}"}}
        tenant.apply(model("twice", scaled, **spec))
        eventually(lambda name=f"name-{number}": name in plan_of(tenant, "twice"), "the new plan to be the pods'")
    owner = tenant.get("im/twice")
    old = tenant.get("deployment/twice")["spec"]
    old["template"]["metadata"]["labels"]["halimede.dev/track"] = "before"
    old["selector"] = {"matchLabels": old["template"]["metadata"]["labels"]}
    tenant.apply(left_over(tenant, owner, apiVersion="apps/v1", kind="Deployment", spec=old))
    service = {"ports": [{"name": "http", "port": 80}]}
    tenant.apply(left_over(tenant, owner, apiVersion="v1", kind="Service", spec=service))

    def is_tidy() -> bool:
        names = tenant.names(CHILDREN, "--selector=halimede.dev/model=twice")
        kept = {name for name in names if not name.startswith("configmap/")}
        return kept == {"deployment.apps/twice", "service/twice", "service/twice-pods"} and len(names - kept) <= 3

    eventually(is_tidy, "what is wanted no more to go", START_LIMIT_S)
    tenant.kubectl("delete", KINDS, "--all", "--timeout=60s")
    eventually(lambda: not tenant.names("deployments"), "the children to go", START_LIMIT_S)

    given = [
        json.loads(cluster.kubectl("get", *which, "-o", "json"))
        for which in (("clusterrole", "halimede"), ("role", "halimede-lease", f"--namespace={NAMESPACE}"))
    ]
    events = requests_of(cluster, OPERATOR)
    assert refused(events) == []
    # Nothing is asked by this right: owner references that block their owner's end need it.
    blocking = {("halimede.dev", f"{plural}/finalizers", "update") for plural in ("inferencemodels", "modelensembles")}
    # Models with an HPA or a claim need device drivers and metrics, pods that were refused are retried after half a
    # minute, and pods are created in dry runs alone, before updates in place: other tests have them, with these rights.
    elsewhere = {right for right in rights_given(*given) if right[0] in ("autoscaling", "resource.k8s.io")}
    elsewhere |= {("apps", "replicasets", "patch"), ("", "pods", "create")}
    assert rights_given(*given) - rights_used(events) - elsewhere == blocking


def plan_of(tenant: Tenant, name: str) -> str:
    """What the pods of a Deployment are to fetch."""
    volumes = tenant.get(f"deployment/{name}")["spec"]["template"]["spec"]["volumes"]
    (config_map,) = (volume["configMap"]["name"] for volume in volumes if volume["name"] == "config")
    return str(tenant.get(f"configmap/{config_map}")["data"]["plan.json"])


def changed_chart(folder: Path) -> Path:
    """The next version of the chart, with another column in what `kubectl get` shows."""
    chart = Path(shutil.copytree(CHART, folder / "halimede"))
    described = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(re.sub(r"(?m)^version: .*$", "version: 99.0.0", described))
    path = chart / "files" / "crds" / "inferencemodels.yaml"
    crd = yaml.safe_load(path.read_text())
    crd["spec"]["versions"][0]["additionalPrinterColumns"].append(
        {"name": "Generation", "type": "integer", "jsonPath": ".metadata.generation"}
    )
    path.write_text(yaml.safe_dump(crd))
    return chart


def columns(cluster: OwnCluster) -> list[str]:
    crd = json.loads(cluster.kubectl("get", "crd", "inferencemodels.halimede.dev", "-o", "json"))
    return [column["name"] for column in crd["spec"]["versions"][0]["additionalPrinterColumns"]]


def helm(platform: Platform, verb: str, chart: Path, *values: str) -> None:
    arguments = (verb, "halimede", str(chart), *platform.values(), *values, "--wait", "--timeout=2m")
    platform.cluster.helm(*arguments, limit_s=150)


@pytest.mark.large
def test_models_serve_through_upgrade_uninstall_and_install(
    platform: Platform, tenant: Tenant, scaled: str, tmp_path: Path
) -> None:
    cluster = platform.cluster
    question = {"IN": ("FP32", [1, 4], [1, 2, 3, 4])}
    tenant.apply(model("twice", scaled))
    tenant.wait_ready("im/twice", START_LIMIT_S)
    before = standing(tenant)

    helm(platform, "upgrade", changed_chart(tmp_path), "--set=stores.s3.region=eu-central-1")
    assert columns(cluster)[-1] == "Generation"
    eventually(lambda: tenant.condition("im/twice", "UpgradeAvailable"), "the other region to be reported")
    assert standing(tenant) == before
    restarted = {"metadata": {"annotations": {"example.com/restarted": "now"}}}
    tenant.apply(model("twice", scaled, podTemplate=restarted))
    eventually(lambda: not tenant.condition("im/twice", "UpgradeAvailable"), "it to be in the pods' template")
    assert "eu-central-1" in plan_of(tenant, "twice")
    tenant.wait_ready("im/twice", START_LIMIT_S)
    eventually(lambda: len(tenant.names("pods")) == 1, "the pod of before to end")
    before = standing(tenant)
    begin = len(requests_of(cluster, OPERATOR))

    cluster.helm("uninstall", "halimede", f"--namespace={NAMESPACE}", "--wait", "--timeout=1m", limit_s=90)
    assert "deployment.apps/halimede" not in cluster.kubectl(
        "get", "deployments", f"--namespace={NAMESPACE}", "-o", "name"
    )
    assert standing(tenant) == before
    assert tenant.infer("twice", question) == {"OUT": [2, 4, 6, 8]}
    assert leases(cluster, NAMESPACE) == set()
    # Nobody acts on it now.
    tenant.kubectl("scale", "im/twice", "--replicas=2")

    # The CRDs stay the first release's, until another one takes them.
    other = ("install", "other", str(CHART), f"--namespace={tenant.namespace}", "--dry-run=server")
    with pytest.raises(AssertionError, match="invalid ownership metadata"):
        cluster.helm(*other)
    cluster.helm(*other, "--take-ownership")

    helm(platform, "install", CHART)
    assert columns(cluster)[-1] != "Generation"
    eventually(lambda: tenant.get("im/twice")["status"].get("readyReplicas") == 2, "the second replica", START_LIMIT_S)
    assert before["pods"].items() <= standing(tenant)["pods"].items()
    assert {*standing(tenant)["replicasets"]} == {*before["replicasets"]}
    # What was asked for meanwhile, and nothing else.
    assert written(requests_of(cluster, OPERATOR, begin), tenant.namespace) == [
        ("patch", "deployments"),
        ("patch", "poddisruptionbudgets"),
    ]


def standing(tenant: Tenant) -> dict[str, dict[str, str]]:
    """What there is, by kind: uids by name, and with the generation where there is one."""
    found = {}
    for kind in ("pods", "replicasets", *CHILDREN.split(",")):
        items = tenant.get(kind, "--selector=app.kubernetes.io/managed-by=halimede-operator")["items"]
        found[kind] = {
            each["metadata"][
                "name"
            ]: f"{each['metadata']['uid']} {each['metadata'].get('generation') if kind != 'pods' else ''}"
            for each in items
        }
    return found


@contextmanager
def at_rest(platform: Platform) -> Iterator[None]:
    """The operator of all namespaces does nothing meanwhile."""
    scale = ("scale", "deployment/halimede", f"--namespace={NAMESPACE}")
    selector = "--selector=app.kubernetes.io/name=halimede-operator"
    platform.cluster.kubectl(*scale, "--replicas=0")
    platform.cluster.kubectl("wait", "--for=delete", "pod", selector, f"--namespace={NAMESPACE}", "--timeout=60s")
    try:
        yield
    finally:
        platform.cluster.kubectl(*scale, "--replicas=1")
        platform.cluster.kubectl(
            "rollout", "status", "deployment/halimede", f"--namespace={NAMESPACE}", "--timeout=60s"
        )


def leases(cluster: OwnCluster, namespace: str) -> set[str]:
    return set(cluster.kubectl("get", "leases", f"--namespace={namespace}", "-o", "name").split())


@pytest.mark.large
def test_a_namespace_admin_can_install_an_operator_for_it(platform: Platform, tenant: Tenant, scaled: str) -> None:
    cluster = platform.cluster
    home = f"{tenant.namespace}-home"
    cluster.kubectl("create", "namespace", home)
    cluster.kubectl("label", "namespace", home, "pod-security.kubernetes.io/enforce=restricted")
    elsewhere = Tenant(cluster, home)
    _, *values = platform.values()
    try:
        cluster.kubectl("create", "serviceaccount", "admin", f"--namespace={home}")
        for space in (home, tenant.namespace):
            binding = ("create", "rolebinding", "admin", "--clusterrole=admin", f"--serviceaccount={home}:admin")
            cluster.kubectl(*binding, f"--namespace={space}")
        admin = cluster.by(cluster.login(home, "admin"))
        with at_rest(platform):
            admin.helm(
                "install", "local", str(CHART), f"--namespace={home}", *values,
                "--set", f"watchNamespaces={{{tenant.namespace}}}", "--set", "crds.install=false",
                "--wait", "--timeout=1m", limit_s=90,
            )  # fmt: skip
            elsewhere.apply(model("twice", scaled, replicas=0))
            tenant.apply(model("twice", scaled, replicas=2, networkPolicy={"enabled": True}))
            tenant.apply(model("large", scaled, resources={"requests": {"cpu": "1000"}}))
            tenant.wait_ready("im/twice", START_LIMIT_S)
            tenant.wait_for_reason("im/large", "Unschedulable")
            tenant.kubectl("scale", "im/twice", "--replicas=0")
            eventually(lambda: "poddisruptionbudget.policy/twice" not in tenant.names("pdb"), "the budget to go")
            assert elsewhere.names("deployments") == {"deployment.apps/local-halimede"}
            events = requests_of(cluster, f"system:serviceaccount:{home}:local-halimede")
            spaces = {
                event["objectRef"].get("namespace") for event in events if "namespace" in event.get("objectRef", {})
            }
            assert (refused(events), spaces) == ([], {home, tenant.namespace})
            assert leases(cluster, home) == {"lease.coordination.k8s.io/local-halimede"}
            admin.helm("uninstall", "local", f"--namespace={home}", "--wait", "--timeout=1m", limit_s=90)
            assert leases(cluster, home) == set()
            assert refused(requests_of(cluster, f"system:serviceaccount:{home}:admin")) == []
    finally:
        cluster.kubectl("delete", "namespace", home, "--wait=false")


@pytest.mark.large
def test_helm_test_finds_the_operator_that_acts(platform: Platform) -> None:
    release = ("halimede", f"--namespace={NAMESPACE}")
    told = platform.cluster.helm("test", *release, "--timeout=2m", limit_s=150)
    assert "Phase:          Succeeded" in told
    with at_rest(platform), pytest.raises(AssertionError, match="pod halimede-test failed"):
        platform.cluster.helm("test", *release, "--timeout=2m", limit_s=150)
    logs = platform.cluster.kubectl("logs", "halimede-test", f"--namespace={NAMESPACE}")
    assert "No operator renews its Lease" in logs


@pytest.mark.large
def test_the_demo_serves_without_a_store(platform: Platform, tenant: Tenant) -> None:
    text = (REPOSITORY_ROOT / "manifests" / "demo.yaml").read_text()
    image = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert text.count(f"image: halimede:{image}") == 1
    tenant.apply(text.replace(f"image: halimede:{image}", f"image: {SERVER_IMAGE}"))
    tenant.wait_ready("im/relu", START_LIMIT_S)
    answer = tenant.infer("relu", {"IN": ("FP32", [1, 4], [-1.0, 2.0, -3.0, 4.0])})
    assert answer == {"OUT": [0.0, 2.0, 0.0, 4.0]}


def test_the_examples_work_as_documented(tenant: Tenant) -> None:
    """Accepted, and made into children; without pods, since what they fetch is nowhere."""
    documents = [yaml.safe_load(path.read_text()) for path in EXAMPLES]
    steps = {
        step["modelRef"]["name"]
        for document in documents
        if document["kind"] == "ModelEnsemble"
        for step in document["spec"]["steps"]
    }
    described = {document["metadata"]["name"] for document in documents}
    documents += [json.loads(model(name, f"s3://models/{name}")) for name in steps - described]
    for document in documents:
        # No replicas are applied where a scaler sets them. Suspended, KEDA's object needs no KEDA.
        document["spec"] |= {"suspend": True} if "autoscaling" in document["spec"] else {"replicas": 0}
    tenant.apply("---\n".join(yaml.safe_dump(document) for document in documents))
    for document in documents:
        wait_accepted(tenant, f"{document['kind']}/{document['metadata']['name']}")
    wanted = {f"deployment.apps/{each['metadata']['name']}" for each in documents}
    # The status may say Accepted before the Deployment of an ensemble is there.
    eventually(lambda: tenant.names("deployments") == wanted, "the Deployments of all examples")


@pytest.mark.large
def test_one_tenants_deep_objects_delay_no_other_tenant(platform: Platform, tenant: Tenant, scaled: str) -> None:
    """Neither when a watch reports it, nor when it is in the list of an operator that starts."""
    path = f"/apis/halimede.dev/v1alpha1/namespaces/{tenant.namespace}/inferencemodels"
    for levels in (500, 2_000, 9_000):
        deep = model(f"deep-{levels}", scaled, podTemplate={"spec": {"x": "HERE"}})
        nested = '{"a":' * levels + "1" + "}" * levels
        tenant.kubectl("create", f"--raw={path}", "-f", "-", given=deep.replace('"HERE"', nested))
    for name in ("before", "after"):
        tenant.apply(model(name, scaled, replicas=0))
        wait_accepted(tenant, f"im/{name}")
        for levels in (500, 2_000, 9_000):
            condition = '-o=jsonpath={.status.conditions[?(@.type=="Accepted")].message}'
            eventually(
                lambda what=f"im/deep-{levels}", how=condition: (
                    "within one another" in tenant.kubectl("get", what, how)
                ),
                "the problem to be reported",
            )
        restart = ("deployment/halimede", f"--namespace={NAMESPACE}")
        platform.cluster.kubectl("rollout", "restart", *restart)
        platform.cluster.kubectl("rollout", "status", *restart, "--timeout=90s", limit_s=100)
