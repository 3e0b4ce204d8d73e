"""The status reports the current cause: real pods whose containers crash, freeze, or lose a process."""

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from cluster.faults import Faults
from cluster.installed import Platform, Tenant
from cluster.models import OPERATOR, SECONDS_TO_REPORT, START_LIMIT_S, apply, model, restarts, running
from cluster.spaces import eventually
from support.served import ECHO, add_python

pytestmark = [pytest.mark.large, pytest.mark.usefixtures("second_node")]

Object = dict[str, Any]
EATS = f"if value(requests[0]) < 0: bytearray(1 << 30)\n{ECHO}"
ONE_PER_NODE = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "labelSelector": {"matchLabels": {"halimede.dev/model": "spread"}},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
    }
}


@pytest.fixture
def hungry(platform: Platform, tmp_path: Path) -> str:
    """The URI of a python model that answers with what it is given, and takes 1 GiB for what is negative."""
    add_python(tmp_path / "models", "hungry", EATS)
    return platform.store.put("hungry", tmp_path / "models" / "hungry")


def test_the_reported_cause_is_the_current_one(
    platform: Platform, tenant: Tenant, faults: Faults, scaled: str, hungry: str
) -> None:
    absent = {"reference": "localhost/nowhere:1", "pullSecrets": [{"name": "absent"}]}
    apply(
        tenant,
        model("frozen", scaled),
        model("hungry", hungry, resources={"limits": {"memory": "400Mi"}}),
        model("spread", scaled, scheduling={"affinity": ONE_PER_NODE}),
        model("nobody", scaled, scheduling={"schedulerName": "nobody"}),
        model("pulls", scaled, image=absent),
        model("crashes", scaled, podTemplate=running("import sys; print('last words'); sys.exit(3)")),
    )
    # Reported once, for any number of retries until this test ends.
    assert "last words" in tenant.wait_for_reason("im/crashes", "CrashLoop", START_LIMIT_S)
    writes_before, tried = status_writes(platform, tenant, "crashes"), restarts(tenant, "crashes")

    for name in ("frozen", "hungry", "spread"):
        tenant.wait_ready(f"im/{name}", START_LIMIT_S)

    # A crash that is over.
    faults.kill(tenant.namespace, pod_of(tenant, "frozen"), "server")
    eventually(lambda: restarts(tenant, "frozen") == 1 and is_ready(tenant, "frozen"), "the restart", START_LIMIT_S)
    assert tenant.get("im/frozen")["status"]["lastFailure"]["reason"] == "CrashLoop"
    # What stands still now does not do so because of it.
    faults.freeze(tenant.namespace, pod_of(tenant, "frozen"), "server")

    # A worker process takes too much memory; the server lives on.
    with pytest.raises(urllib.error.HTTPError) as refused:
        tenant.infer("hungry", {"IN": ("FP32", [1, 1], [-1])})
    assert "signal 9 (possibly out of memory)" in refused.value.read().decode()
    message = degraded(tenant, "hungry", "OutOfMemory")
    assert "the limit is 400Mi, raise spec.resources.limits.memory" in message
    assert (restarts(tenant, "hungry"), tenant.infer("hungry", {"IN": ("FP32", [1, 1], [3])})) == (0, {"OUT": [3]})

    assert "readiness probe fails" in tenant.wait_for_reason("im/frozen", "ProbeFailed")
    faults.resume()

    # More replicas than there is room for.
    since = tenant.condition("im/spread")["lastTransitionTime"]
    tenant.kubectl("scale", "im/spread", "--replicas=3")
    assert "2/3 replicas serving" in degraded(tenant, "spread", "Unschedulable", "2/3", START_LIMIT_S)
    ready = tenant.condition("im/spread")
    assert (ready["status"], ready["lastTransitionTime"]) == ("True", since)
    heads, values = (line.split() for line in tenant.kubectl("get", "im/spread").splitlines())
    assert dict(zip(heads, values, strict=False))["DESIRED"] == "3"

    # A rollout that somebody holds.
    tenant.kubectl("rollout", "pause", "deployment/spread")
    changed = {"spec": {"env": [{"name": "A", "value": "B"}]}}
    tenant.kubectl("patch", "im/spread", "--type=merge", f"--patch={json.dumps(changed)}")
    assert "kubectl rollout resume deployment/spread" in tenant.wait_for_reason("im/spread", "RolloutPaused")

    assert "its schedulerName is 'nobody'" in tenant.wait_for_reason("im/nobody", "Unschedulable")
    assert "pull secrets absent" in tenant.wait_for_reason("im/pulls", "ImagePullFailed")

    eventually(lambda: restarts(tenant, "crashes") > tried + 1, "other tries", START_LIMIT_S)
    assert status_writes(platform, tenant, "crashes") == writes_before


def degraded(tenant: Tenant, name: str, reason: str, words: str = "", limit_s: float = SECONDS_TO_REPORT) -> str:
    """What Degraded says, once it is True for this reason."""

    def look() -> str | None:
        condition = tenant.condition(f"im/{name}", "Degraded")
        is_it = (condition.get("status"), condition.get("reason")) == ("True", reason) and words in condition["message"]
        return str(condition["message"]) if is_it else None

    return eventually(look, f"{name} to be degraded by {reason}", limit_s)


def pod_of(tenant: Tenant, name: str) -> str:
    (pod,) = tenant.get("pods", f"--selector=halimede.dev/model={name}")["items"]
    return str(pod["metadata"]["name"])


def is_ready(tenant: Tenant, name: str) -> bool:
    return tenant.condition(f"im/{name}").get("status") == "True"


def status_writes(platform: Platform, tenant: Tenant, name: str) -> int:
    """How often the operator has written the status of a model."""
    wanted = {"namespace": tenant.namespace, "name": name, "subresource": "status"}
    return sum(
        event["verb"] == "patch"
        and event["user"]["username"] == OPERATOR
        and wanted.items() <= event.get("objectRef", {}).items()
        for event in platform.cluster.audit_events(containing=OPERATOR)
    )
