"""The operator's process against a real API server: what it does when that goes wrong, and when it itself does.

It runs on this machine, as a ServiceAccount with the rights that the chart gives to an operator of one namespace.
"""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.faults import Faults
from cluster.faulty_api import Rule
from cluster.own import OwnCluster
from cluster.spaces import eventually
from support.image import REPOSITORY_ROOT

# Minutes of outages and of deaths at every write.
pytestmark = pytest.mark.load

Object = dict[str, Any]

CHILDREN = ("configmaps", "serviceaccounts", "services", "deployments", "poddisruptionbudgets", "networkpolicies")
WRITES = "POST|PUT|PATCH|DELETE"
LEASE = "halimede"


class Operator:
    """One process; `name` is the ServiceAccount that it is."""

    def __init__(self, folder: Path, namespace: str, name: str, kubeconfig: Path) -> None:
        self._health, self._metrics = _free_port(), _free_port()
        self.log = folder / f"{name}-{self._health}.log"
        command = [
            sys.executable, "-m", "halimede_operator", "--server-image=debian:bookworm-slim", "--image-pull-policy=Never",
            f"--watch-namespace={namespace}", f"--lease-namespace={namespace}", f"--lease-name={LEASE}", "--log-format=text",
            f"--health-port={self._health}", f"--metrics-port={self._metrics}", f"--kubeconfig={kubeconfig}",
        ]  # fmt: skip
        # Of its own folder, in which the package is importable however the tests were started.
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=REPOSITORY_ROOT / "operator")

    def check(self) -> None:
        assert self.process.poll() is None, self.log.read_text()[-4000:]

    def probe(self, which: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._health}/{which}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def leads(self) -> bool:
        self.check()
        return self.probe("healthz") == 200 and self.metric("halimede_operator_leader") == 1

    def ready(self) -> "Operator":
        """It holds the lease and knows everything."""
        eventually(lambda: self.leads() and self.probe("readyz") == 200, "the operator", check=self.check)
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.wait(30)


class Place:
    """A namespace with an operator's rights, and what a test does and looks at there."""

    def __init__(self, own: OwnCluster, namespace: str, folder: Path) -> None:
        self.own = own
        self.namespace = namespace
        self._folder = folder
        self._operators: list[Operator] = []

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        return self.own.kubectl(f"--namespace={self.namespace}", *arguments, given=given)

    def allow(self, *accounts: str) -> None:
        rendered = self.own.helm(
            "template", "halimede", str(REPOSITORY_ROOT / "helm" / "halimede"), f"--namespace={self.namespace}",
            "--kube-version=1.36.0", f"--set=watchNamespaces={{{self.namespace}}}", "--show-only=templates/rbac.yaml",
        )  # fmt: skip
        roles = [document for document in yaml.safe_load_all(rendered) if document and document["kind"] == "Role"]
        for account in accounts:
            self.kubectl("create", "serviceaccount", account)
        for role in roles:
            self.kubectl("apply", "-f", "-", given=json.dumps(role))
            name = role["metadata"]["name"]
            self.kubectl(
                "create", "rolebinding", name, f"--role={name}", f"--group=system:serviceaccounts:{self.namespace}"
            )

    def start(self, account: str = "operator", faulty: bool = False) -> Operator:
        login = self.own.faulty_login if faulty else self.own.login
        operator = Operator(self._folder, self.namespace, account, login(self.namespace, account))
        self._operators.append(operator)
        return operator

    def stop_all(self) -> None:
        for operator in self._operators:
            if operator.process.poll() is None:
                operator.process.send_signal(signal.SIGCONT)
                operator.kill()

    def model(self, name: str, **spec: Any) -> None:
        # Without pods, which no test here is about.
        spec = {"model": {"uri": "s3://models/digits"}, "suspend": True, **spec}
        value = {
            "apiVersion": "halimede.dev/v1alpha1",
            "kind": "InferenceModel",
            "metadata": {"name": name},
            "spec": spec,
        }
        self.kubectl("apply", "-f", "-", given=json.dumps(value))

    def get(self, what: str, name: str) -> Object:
        value: Object = json.loads(self.kubectl("get", what, name, "--output=json"))
        return value

    def children(self) -> dict[str, Object]:
        """All of ours, without what differs from one making to the next."""
        found = json.loads(
            self.kubectl(
                "get", ",".join(CHILDREN), "--output=json", "--selector=app.kubernetes.io/managed-by=halimede-operator"
            )
        )["items"]
        return {f"{child['kind']} {child['metadata']['name']}": _essence(child) for child in found}

    def settled(self, *models: str) -> bool:
        for name in models:
            value = self.get("inferencemodels", name)
            if (value.get("status") or {}).get("observedGeneration") != value["metadata"]["generation"]:
                return False
        return True

    def audited(self) -> list[Object]:
        """What ServiceAccounts of this namespace asked of the API server, answered."""
        lines = (self.own.state / "audit.log").read_text().splitlines()
        user = f"system:serviceaccount:{self.namespace}:"
        return [
            entry
            for line in lines
            if user in line
            and (entry := json.loads(line))["stage"] == "ResponseComplete"
            and entry["user"]["username"].startswith(user)
        ]

    def writes(self, account: str = "operator") -> Counter[str]:
        """But of the lease."""
        return Counter(
            f"{entry['verb']} {entry['objectRef']['resource']} {entry['responseStatus']['code']}"
            for entry in self.audited()
            if entry["verb"] not in ("get", "list", "watch")
            and entry["objectRef"]["resource"] != "leases"
            and entry["user"]["username"].endswith(f":{account}")
        )


@pytest.fixture
def place(own: OwnCluster, namespace: str, tmp_path: Path) -> Iterator[Place]:
    own.kubectl("apply", "--server-side", *(f"--filename={path}" for path in _crds()))
    with _no_other_operator(own):
        place = Place(own, namespace, tmp_path)
        place.allow("operator", "second")
        yield place
        place.stop_all()


def test_children_come_with_the_rights_of_the_chart_and_then_nothing_is_written(place: Place) -> None:
    operator = place.start()
    for name in ("a", "b"):
        place.model(name, networkPolicy={"enabled": True}, replicas=2)
    eventually(lambda: place.settled("a", "b"), "the models' status", check=operator.check)
    children = place.children()
    assert Counter(name.partition(" ")[0] for name in children) == {
        "ConfigMap": 2, "ServiceAccount": 2, "Service": 4, "Deployment": 2, "PodDisruptionBudget": 2, "NetworkPolicy": 2
    }  # fmt: skip
    _at_rest(place)
    operator.end()

    place.start().ready()
    _at_rest(place)
    refused = [entry for entry in place.audited() if entry["responseStatus"]["code"] in (401, 403)]
    assert refused == []


def test_what_is_edited_or_deleted_by_hand_is_restored_and_what_others_add_is_left(place: Place) -> None:
    operator = place.start().ready()
    place.model("digits")
    eventually(lambda: place.settled("digits"), "the status", check=operator.check)
    whole = place.children()
    place.kubectl("annotate", "service", "digits", "theirs=kept")
    place.kubectl("patch", "deployment", "digits", "--type=merge", "--patch", '{"spec":{"replicas":5}}')
    place.kubectl("delete", "configmap,serviceaccount", "--selector=halimede.dev/model=digits")
    place.kubectl("label", "service", "digits-pods", "app.kubernetes.io/managed-by-")

    def restored() -> bool:
        now = place.children()
        theirs = now.get("Service digits", {}).get("annotations", {}).pop("theirs", None)
        return now == whole and theirs == "kept"

    eventually(restored, "the children as they were", 60, operator.check)


@pytest.mark.timeout(900, func_only=True)
def test_an_operator_that_is_killed_at_any_write_is_made_good_by_the_next(place: Place, faults: Faults) -> None:
    """Killed when the k-th write was done and before its answer came, then started again."""
    paths = rf"/namespaces/{place.namespace}/(?!leases)"

    def live(k: int | None) -> bool:
        """A model is made, changed and settles, while the operator is killed at write `k`; whether it came to that."""
        operator = place.start(faulty=True).ready()
        before = place.writes().total()
        if k is not None:
            lost, stuck = Rule(WRITES, paths, times=1, lose=True), Rule(WRITES, paths, delay_s=1000)
            faults.set_api("pass", Rule(WRITES, paths, times=k), lost, stuck)
        was_killed = False

        def is_time() -> bool:
            return k is not None and not was_killed and place.writes().total() > before + k

        for replicas in (1, 2):
            place.model("digits", networkPolicy={"enabled": True}, replicas=replicas)
            eventually(lambda: is_time() or place.settled("digits"), f"write {k}, or the status", check=operator.check)
            if is_time():
                operator.kill()
                was_killed = True
                faults.set_api()
                # Else the next one would wait until it ends.
                place.kubectl("delete", "lease", LEASE)
                operator = place.start(faulty=True)
                eventually(lambda: place.settled("digits"), f"the status after write {k}", check=operator.check)
        operator.end()
        return was_killed

    live(None)
    whole = place.children()
    k, more = 0, True
    while more:
        place.kubectl("delete", "inferencemodel", "digits")
        eventually(lambda: not place.children(), "the children to go")
        more = live(k)
        assert place.children() == whole, f"killed at write {k}"
        k += 1
    assert k > len(whole), "at each of the children's writes, and at some of the status"


def test_of_two_operators_the_one_that_stood_still_writes_nothing_and_ends(place: Place) -> None:
    first = place.start("operator").ready()
    second = place.start("second")
    place.model("digits")
    eventually(lambda: place.settled("digits"), "the status", check=first.check)
    eventually(lambda: second.probe("readyz") == 200, "the second to stand by", check=second.check)
    assert (second.leads(), place.writes("second")) == (False, {})

    first.process.send_signal(signal.SIGSTOP)
    place.model("digits", replicas=3)
    begun = time.monotonic()
    eventually(second.leads, "the second to take over", 40)
    assert time.monotonic() - begun > 5, "not before the first one's lease ended"
    eventually(lambda: place.settled("digits"), "the status", check=second.check)
    by_first = place.writes("operator")
    place.model("digits", replicas=4)
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(30) == 3
    eventually(lambda: place.settled("digits"), "the status", check=second.check)
    assert place.writes("operator") == by_first
    assert second.end() == 0
    assert place.get("lease", LEASE)["spec"]["holderIdentity"] in (None, "")


OUTAGES = {
    "refused": ("refuse", ()),
    "hanging": ("hang", ()),
    "unavailable": ("pass", (Rule(status=503),)),
    "forbidden": ("pass", (Rule(status=403),)),
    "too many": ("pass", (Rule(status=429),)),
}


@pytest.mark.parametrize(("mode", "rules"), OUTAGES.values(), ids=OUTAGES.keys())
def test_an_outage_of_the_api_server_is_survived_and_made_up_for(
    place: Place, faults: Faults, mode: str, rules: tuple[Rule, ...]
) -> None:
    """25 s, longer than a lease; `load` has one of five minutes."""
    _outage(place, faults, mode, rules, 25)


@pytest.mark.timeout(600, func_only=True)
def test_an_outage_of_five_minutes_is_survived_and_made_up_for(place: Place, faults: Faults) -> None:
    _outage(place, faults, "pass", (Rule(status=503),), 300)


def _outage(place: Place, faults: Faults, mode: str, rules: tuple[Rule, ...], seconds: float) -> None:
    operator = place.start(faulty=True).ready()
    place.model("before")
    eventually(lambda: place.settled("before"), "the status", check=operator.check)
    faults.set_api(mode, *rules)
    place.model("meanwhile")
    place.kubectl("delete", "inferencemodel", "before")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        operator.check()
        assert operator.probe("healthz") == 200
        time.sleep(1)
    assert not operator.leads()
    faults.set_api()
    back = time.monotonic()
    eventually(lambda: place.settled("meanwhile"), "the new model", check=operator.check)
    print(f"settled {time.monotonic() - back:.1f} s after the API server was back")
    place.model("after")
    eventually(lambda: place.settled("after"), "the watches", check=operator.check)
    eventually(lambda: all(" before" not in name for name in place.children()), "what was deleted to go")


def test_slow_answers_make_nothing_twice(place: Place, faults: Faults) -> None:
    operator = place.start(faulty=True).ready()
    faults.set_api("pass", Rule("PATCH", delay_s=3.0))
    place.model("digits")
    eventually(lambda: place.settled("digits"), "the status", check=operator.check)
    assert place.writes() == {
        "patch configmaps 201": 1, "patch serviceaccounts 201": 1, "patch services 201": 2, "patch deployments 201": 1,
        "patch inferencemodels 200": place.writes()["patch inferencemodels 200"],
    }  # fmt: skip


@pytest.mark.parametrize("times", [1, 5])
def test_conflicts_are_tried_again_at_once(place: Place, faults: Faults, times: int) -> None:
    operator = place.start(faulty=True).ready()
    faults.set_api("pass", Rule("PATCH", "/status", times=times, status=409))
    place.model("digits")
    eventually(lambda: place.settled("digits"), "the status", check=operator.check)


def test_a_hundred_edits_make_a_few_rollouts_and_the_last_one_wins(place: Place) -> None:
    operator = place.start().ready()
    place.model("digits")
    eventually(lambda: place.settled("digits"), "the status", check=operator.check)
    begun = time.monotonic()
    for n in range(100):
        place.own.api.patch(
            f"/apis/halimede.dev/v1alpha1/namespaces/{place.namespace}/inferencemodels/digits",
            {"spec": {"env": [{"name": "N", "value": str(n)}]}},
        )
        time.sleep(max(0.0, begun + 0.1 * n - time.monotonic()))
    eventually(lambda: place.settled("digits"), "the status", check=operator.check)

    def last_wins() -> bool:
        container = place.get("deployment", "digits")["spec"]["template"]["spec"]["containers"][0]
        return {"name": "N", "value": "99"} in container["env"]

    eventually(last_wins, "the last spec")
    took = time.monotonic() - begun
    replica_sets = json.loads(place.kubectl("get", "replicasets", "--output=json"))["items"]
    assert len(replica_sets) <= 2 + took / 3


def test_deletion_leaves_nothing_and_makes_nothing_again(place: Place) -> None:
    operator = place.start().ready()
    place.model("digits")
    eventually(lambda: place.settled("digits"), "the status", check=operator.check)
    place.kubectl("delete", "inferencemodel", "digits", "--cascade=foreground")
    eventually(lambda: not place.children(), "nothing to be left", 60)
    written = place.writes()
    time.sleep(3)  # nothing comes again
    assert (place.children(), place.writes()) == ({}, written)


@pytest.mark.timeout(900, func_only=True)
def test_two_hundred_models_at_rest_cost_no_write(place: Place) -> None:
    operator = place.start().ready()
    values = [
        {
            "apiVersion": "halimede.dev/v1alpha1",
            "kind": "InferenceModel",
            "metadata": {"name": f"m{n}", "namespace": place.namespace},
            "spec": {"model": {"uri": "s3://models/digits"}, "scheduling": {"nodeSelector": {"nowhere": "yes"}}},
        }
        for n in range(200)
    ]
    place.kubectl(
        "apply", "--server-side", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": values})
    )
    names = [value["metadata"]["name"] for value in values]
    eventually(lambda: place.settled(*names), "200 models", 300, operator.check)
    _at_rest(place, 60)


def _at_rest(place: Place, seconds: float = 15) -> None:
    """Nothing but the lease is written for so long, from when nothing was for a while."""

    def quiet() -> bool:
        before = place.writes()
        time.sleep(3)
        return place.writes() == before

    eventually(quiet, "the operator to come to rest", 120)
    written = place.writes()
    time.sleep(seconds)
    assert place.writes() == written


@contextmanager
def _no_other_operator(own: OwnCluster) -> Iterator[None]:
    """The one that helm installed for other tests serves all namespaces; it stands aside."""
    installed = own.kubectl(
        "get", "deployments", "--all-namespaces", "--selector=app.kubernetes.io/component=operator", "--output=name"
    )
    where = "--namespace=halimede"
    for name in installed.split():
        own.kubectl("scale", name, "--replicas=0", where)
        own.kubectl(
            "wait", "--for=delete", "pods", "--selector=app.kubernetes.io/component=operator", where, "--timeout=60s"
        )
    yield
    for name in installed.split():
        own.kubectl("scale", name, "--replicas=1", where)
        own.kubectl("rollout", "status", name, where, "--timeout=120s")


def _crds() -> list[Path]:
    return [path for path in sorted((REPOSITORY_ROOT / "crds").glob("*.yaml")) if path.name != "kustomization.yaml"]


def _essence(child: Object) -> Object:
    metadata = child["metadata"]
    kept = {name: part for name, part in child.items() if name not in ("metadata", "status")}
    if child["kind"] == "Service":
        kept["spec"] = {
            name: part for name, part in child["spec"].items() if not name.startswith("clusterIP") or part == "None"
        }
    # Kubernetes' own, and the hash that has the owner's uid in it.
    annotations = {
        name: text
        for name, text in (metadata.get("annotations") or {}).items()
        if "kubernetes.io" not in name and name != "halimede.dev/applied-hash"
    }
    return {**kept, "labels": metadata.get("labels"), "annotations": annotations}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
