"""Runs the operator's process on this machine, as a ServiceAccount with the chart's rights in one namespace."""

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from cluster import resources
from cluster.own import OwnCluster, audit_events
from cluster.spaces import environment, eventually
from support.forked import OPERATOR, Process, start_python
from support.image import REPOSITORY_ROOT
from support.ports import free_port

Object = dict[str, Any]

CHILDREN = {
    "/api/v1": ("configmaps", "serviceaccounts", "services"),
    "/apis/apps/v1": ("deployments",),
    "/apis/networking.k8s.io/v1": ("networkpolicies",),
    "/apis/policy/v1": ("poddisruptionbudgets",),
}
OURS = "labelSelector=app.kubernetes.io%2Fmanaged-by%3Dhalimede-operator"
APPLY = "application/apply-patch+yaml"
LEASE = "halimede"
Start = Callable[[list[str], Path], "Process | subprocess.Popen[bytes]"]
PACKAGE = REPOSITORY_ROOT / "operator"
"""The folder in which the package is importable however the tests were started."""
RBAC = "rbac.authorization.k8s.io"


def start_fork(arguments: list[str], log: Path) -> Process:
    """An operator that finds its modules imported: the import is most of what a start costs."""
    with log.open("w") as output:
        return start_python(
            *("-m", "halimede_operator", *arguments), stdout=output, stderr=output, environment=environment(),
            directory=PACKAGE, imported=OPERATOR,
        )  # fmt: skip


def start_process(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """An operator that imports what it needs."""
    with log.open("w") as output:
        command = [sys.executable, "-m", "halimede_operator", *arguments]
        return subprocess.Popen(command, stdout=output, stderr=output, cwd=PACKAGE)


class Operator:
    """One process; `name` is the ServiceAccount that it is."""

    def __init__(
        self, start: Start, folder: Path, namespace: str, name: str, kubeconfig: Path, lease: str, everywhere: bool
    ) -> None:
        """everywhere: it watches all namespaces."""
        self._health, self._metrics = free_port(), free_port()
        self.log = folder / f"{name}-{self._health}.log"
        arguments = [
            "--server-image=debian:bookworm-slim", "--image-pull-policy=Never",
            *(() if everywhere else (f"--watch-namespace={namespace}",)), f"--lease-namespace={namespace}", f"--lease-name={lease}", "--log-format=text",
            f"--health-port={self._health}", f"--metrics-port={self._metrics}", f"--kubeconfig={kubeconfig}",
        ]  # fmt: skip
        self.process = start(arguments, self.log)

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


class Site:
    """A namespace with an operator's rights, and what a test does and looks at there."""

    def __init__(self, own: OwnCluster, start: Start, namespace: str, folder: Path) -> None:
        """start: how an operator is started."""
        self.own = own
        self._start = start
        self.namespace = namespace
        self.folder = folder
        self._operators: list[Operator] = []
        self._audit_log = own.audit_log()
        self._audited: list[Object] = []

    @property
    def models(self) -> str:
        """Where the API server has them."""
        return f"/apis/halimede.dev/v1alpha1/namespaces/{self.namespace}/inferencemodels"

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        return self.own.kubectl(f"--namespace={self.namespace}", *arguments, given=given)

    def allow(self, *accounts: str) -> None:
        """Make the accounts, each with the rights that the chart gives to an operator of this namespace."""
        api = self.own.api
        for account in accounts:
            api.create(f"/api/v1/namespaces/{self.namespace}/serviceaccounts", {"metadata": {"name": account}})
        rights = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}"
        subject = {"kind": "Group", "apiGroup": RBAC, "name": f"system:serviceaccounts:{self.namespace}"}
        for name, rules in _roles(self.own).items():
            api.create(f"{rights}/roles", {"metadata": {"name": name}, "rules": rules})
            role = {"apiGroup": RBAC, "kind": "Role", "name": name}
            api.create(f"{rights}/rolebindings", {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]})
        # The API server learns of them a little later, and refuses until then. Another role may have the first rule, too.
        for name, rules in _roles(self.own).items():
            for rule in rules:
                eventually(lambda rule=rule: self._may(subject["name"], rule), f"the rights of {name}")

    def _may(self, group: str, rule: Object) -> bool:
        """Whether members of the group may do the first thing that the rule allows."""
        resource, _, subresource = rule["resources"][0].partition("/")
        asked = {
            "namespace": self.namespace, "verb": rule["verbs"][0], "group": rule["apiGroups"][0],
            "resource": resource, "subresource": subresource, "name": rule.get("resourceNames", [""])[0],
        }  # fmt: skip
        review = {"spec": {"user": "somebody", "groups": [group], "resourceAttributes": asked}}
        answer = self.own.api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def allow_everywhere(self) -> None:
        """Give the accounts all rights in all namespaces."""
        subject = {"kind": "Group", "apiGroup": RBAC, "name": f"system:serviceaccounts:{self.namespace}"}
        role = {"apiGroup": RBAC, "kind": "ClusterRole", "name": "cluster-admin"}
        binding = {"metadata": {"name": self.namespace}, "roleRef": role, "subjects": [subject]}
        self.own.api.create("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", binding)

    def start(
        self, account: str = "operator", faulty: bool = False, lease: str = LEASE, everywhere: bool = False
    ) -> Operator:
        login = self.own.faulty_login if faulty else self.own.login
        kubeconfig = login(self.namespace, account)
        operator = Operator(self._start, self.folder, self.namespace, account, kubeconfig, lease, everywhere)
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
        self.own.api.send("PATCH", f"{self.models}/{name}?fieldManager=user&force=true", value, APPLY)

    def get(self, what: str, name: str) -> Object:
        return resources.get(self.own.api, self.namespace, what, name)

    def children(self) -> dict[str, Object]:
        """All of ours, without what differs from one making to the next."""
        found: dict[str, Object] = {}
        for group, plurals in CHILDREN.items():
            for plural in plurals:
                listed = self.own.api.get(f"{group}/namespaces/{self.namespace}/{plural}?{OURS}")
                kind = listed["kind"].removesuffix("List")
                found |= {f"{kind} {child['metadata']['name']}": _essence(kind, child) for child in listed["items"]}
        return found

    def settled(self, *models: str) -> bool:
        found = {value["metadata"]["name"]: value for value in self.own.api.get(self.models)["items"]}
        return all(
            name in found
            and (found[name].get("status") or {}).get("observedGeneration") == found[name]["metadata"]["generation"]
            for name in models
        )

    def audited(self) -> list[Object]:
        """What ServiceAccounts of this namespace asked of the API server, answered."""
        user = f"system:serviceaccount:{self.namespace}:"
        self._audited += [
            entry
            for entry in audit_events(self._audit_log.read(), containing=user)
            if entry["stage"] == "ResponseComplete" and entry["user"]["username"].startswith(user)
        ]
        return list(self._audited)

    def refused(self) -> list[tuple[str, str]]:
        """URI and message of what they had no right to do. The admission plugin that checks owners does not know a
        new CustomResourceDefinition for up to 30 s, and refuses with 403, too: that is left out."""
        return [
            (entry["requestURI"], message)
            for entry in self.audited()
            if entry["responseStatus"]["code"] in (401, 403)
            and "cannot find RESTMapping" not in (message := entry["responseStatus"].get("message", ""))
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


@contextmanager
def no_other_operator(own: OwnCluster) -> Iterator[None]:
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


def crds() -> list[Path]:
    return [path for path in sorted((REPOSITORY_ROOT / "crds").glob("*.yaml")) if path.name != "kustomization.yaml"]


@cache
def _roles(own: OwnCluster) -> Mapping[str, Any]:
    """Rules by the role's name."""
    rendered = own.helm(
        "template", "halimede", str(REPOSITORY_ROOT / "helm" / "halimede"), "--namespace=where",
        "--kube-version=1.36.0", "--set=watchNamespaces={where}", "--show-only=templates/rbac.yaml",
    )  # fmt: skip
    documents = [document for document in yaml.safe_load_all(rendered) if document and document["kind"] == "Role"]
    return {document["metadata"]["name"]: document["rules"] for document in documents}


def _essence(kind: str, child: Object) -> Object:
    metadata = child["metadata"]
    kept = {name: part for name, part in child.items() if name not in ("metadata", "status")}
    if kind == "Service":
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
