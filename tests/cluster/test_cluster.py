"""The test cluster itself, which the operator's tests rely on."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # the package has no types
import pytest

from cluster.access import Cluster
from cluster.fake_nodes import MARK
from cluster.faults import Faults
from cluster.faulty_api import MESSAGE, Rule
from cluster.given import GivenCluster
from cluster.gpus import Gpus, Layout
from cluster.own import OwnCluster, is_alive, sweep
from cluster.spaces import LIMIT_S, Program, environment, eventually
from support.image import BASE

pytestmark = [pytest.mark.large, pytest.mark.usefixtures("second_node")]

SLICE = "nvidia.com/mig-1g.10gb"
# Perl is in every Debian: a server that says who it is.
SERVER = """
use IO::Socket::INET;
my $listener = IO::Socket::INET->new(LocalPort => 8000, Listen => 50, ReuseAddr => 1) or die;
while (my $client = $listener->accept()) {
  while (<$client>) { last if /^\\r?$/ }
  print $client "HTTP/1.0 200 OK\\r\\n\\r\\n$ENV{HOSTNAME}";
  close $client;
}
"""
# What the base image has no program for: the body that an address answers.
FETCH = """
use IO::Socket::INET;
my $server = IO::Socket::INET->new(PeerAddr => $ARGV[0], PeerPort => 8000, Timeout => 5) or die "$@";
print $server "GET / HTTP/1.0\\r\\n\\r\\n";
local $/; my $answer = <$server>; $answer =~ s/.*\\r\\n\\r\\n//s; print $answer;
"""


def pod(name: str, *command: str, limits: dict[str, int] | None = None, **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": BASE, "command": command, "resources": {"limits": limits or {}}}
    if SERVER in command:
        container["readinessProbe"] = {"tcpSocket": {"port": 8000}, "periodSeconds": 1}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name.partition("-")[0]}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 1, **spec},
    }


def sleeper(name: str, **more: Any) -> dict[str, Any]:
    return pod(name, "sleep", "100000", **more)


def apply(cluster: Cluster, namespace: str, *documents: dict[str, Any]) -> None:
    cluster.load_image(BASE)
    listed = {"apiVersion": "v1", "kind": "List", "items": documents}
    cluster.kubectl("apply", f"--namespace={namespace}", "-f", "-", given=json.dumps(listed))


def wait_for(cluster: Cluster, namespace: str, condition: str, *targets: str) -> None:
    cluster.kubectl("wait", f"--namespace={namespace}", f"--for={condition}", "--timeout=80s", *targets)


def inside(cluster: Cluster, namespace: str, name: str, *command: str) -> str:
    return cluster.kubectl("exec", f"--namespace={namespace}", name, "--", *command)


def look(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cluster.kubectl("get", "pod", name, f"--namespace={namespace}", "-o", "json"))
    return found


def fetch(address: str) -> str:
    """What is answered, "" when nobody does."""
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    except OSError:
        return ""
    finally:
        connection.close()


def test_a_pod_runs_and_kubectl_logs_and_exec_work(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, pod("one", "sh", "-c", "echo said; exec sleep 100000"))
    wait_for(cluster, namespace, "condition=Ready", "pod/one")
    assert cluster.kubectl("logs", f"--namespace={namespace}", "one") == "said\n"
    assert inside(cluster, namespace, "one", "cat", "/etc/debian_version").startswith("12.")


def test_a_service_reaches_pods_on_both_nodes(cluster: Cluster, namespace: str) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "names"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 8000}]},
    }
    nodes = cluster.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()
    servers = [pod(f"server-{n}", "perl", "-e", SERVER, nodeName=nodes[n % len(nodes)]) for n in (1, 2)]
    apply(cluster, namespace, service, *servers, sleeper("client"))
    wait_for(cluster, namespace, "condition=Ready", "pod", "--all")

    def both_answer(ask: Callable[[], str]) -> None:
        answers: set[str] = set()

        def both_seen() -> bool:
            answers.add(ask())
            return answers >= {"server-1", "server-2"}

        eventually(both_seen, "both to be chosen")
        assert answers - {""} == {"server-1", "server-2"}

    def ask_from(caller: str, name: str) -> None:
        both_answer(lambda: inside(cluster, namespace, caller, "perl", "-e", FETCH, name))

    door = cluster.forward("service/names", 8000, namespace)
    both_answer(lambda: fetch(door))
    assert fetch(cluster.forward("pod/server-2", 8000, namespace)) == "server-2"
    ask_from("client", "names")
    ask_from("client", f"names.{namespace}.svc")
    # Behind the Service itself.
    ask_from("server-1", f"names.{namespace}.svc.cluster.local")


def test_helm_installs_a_chart(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: small, version: 0.1.0}")
    (tmp_path / "templates" / "map.yaml").write_text(
        "{apiVersion: v1, kind: ConfigMap, metadata: {name: made}, data: {release: {{ .Release.Name }}}}"
    )
    cluster.helm("install", "first", str(tmp_path), f"--namespace={namespace}")
    released = cluster.kubectl("get", "configmap/made", f"--namespace={namespace}", "-o", "jsonpath={.data.release}")
    assert released == "first"


def test_a_login_is_authenticated_as_its_service_account(cluster: Cluster, namespace: str) -> None:
    kubeconfig = cluster.login(namespace, "default")
    user = cluster.kubectl(f"--kubeconfig={kubeconfig}", "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
    assert user == f"system:serviceaccount:{namespace}:default"


def test_each_pod_gets_its_own_gpu_slice_and_the_third_waits(cluster: Cluster, namespace: str, gpus: Gpus) -> None:
    gpus.install("node-1", Layout([["1g.10gb", "1g.10gb"]]))
    offered = gpus.devices("node-1", SLICE)
    assert len(offered) == 2
    names = ["first", "second", "third"]
    apply(cluster, namespace, *(sleeper(name, limits={SLICE: 1}) for name in names[:2]))
    wait_for(cluster, namespace, "condition=Ready", "pod/first", "pod/second")
    given = {name: inside(cluster, namespace, name, "printenv", "NVIDIA_VISIBLE_DEVICES").strip() for name in names[:2]}
    assert sorted(given.values()) == sorted(offered)
    listed = inside(cluster, namespace, "first", "sh", "-c", "cat $PLAYED_DEVICES").splitlines()
    assert listed[1] == f"mig {given['first']} 1 1 9984 0 NVIDIA-H100-80GB-HBM3 MIG 1g.10gb"

    apply(cluster, namespace, sleeper("third", limits={SLICE: 1}))
    wait_for(cluster, namespace, "condition=PodScheduled=False", "pod/third")
    assert (
        "Insufficient nvidia.com/mig-1g.10gb" in look(cluster, namespace, "third")["status"]["conditions"][0]["message"]
    )
    cluster.kubectl("delete", "pod", "first", f"--namespace={namespace}")
    wait_for(cluster, namespace, "condition=Ready", "pod/third")
    third = inside(cluster, namespace, "third", "printenv", "NVIDIA_VISIBLE_DEVICES").strip()
    assert third == given["first"]


def offers(own: OwnCluster, node: str) -> dict[str, str]:
    """What of NVIDIA's a node can still give, and the labels that say so."""
    found = own.api.get(f"/api/v1/nodes/{node}")
    allocatable = {
        name: count for name, count in found["status"]["allocatable"].items() if name.startswith("nvidia.com")
    }
    labels = found["metadata"]["labels"]
    asked = ("product", "count", "memory")
    return {
        **{name: count for name, count in allocatable.items() if count != "0"},
        **{name: labels[f"nvidia.com/gpu.{name}"] for name in asked if f"nvidia.com/gpu.{name}" in labels},
        **{name: value for name, value in labels.items() if name.endswith(".count") and "mig-" in name},
        **({"state": labels["nvidia.com/mig.config.state"]} if "nvidia.com/mig.config.state" in labels else {}),
    }


def test_a_gpu_can_be_repartitioned_and_can_fail(own: OwnCluster, gpus: Gpus) -> None:
    gpu = {"product": "NVIDIA-H100-80GB-HBM3", "memory": "81559"}
    gpus.install("node-2", Layout([[], []]))
    assert offers(own, "node-2") == {"nvidia.com/gpu": "2", "count": "2", "state": "success", **gpu}

    mixed = Layout([["3g.40gb", "3g.40gb"], []], config="some")
    gpus.repartition("node-2", mixed)
    split = {
        "nvidia.com/gpu": "1",
        "nvidia.com/mig-3g.40gb": "2",
        "nvidia.com/mig-3g.40gb.count": "2",
        "count": "2",
        **gpu,
    }
    assert offers(own, "node-2") == {**split, "state": "success"}
    gpus.repartition("node-2", Layout([[], []]), succeeds=False)
    assert offers(own, "node-2") == {**split, "state": "failed"}

    gpus.mark("node-2", gpus.devices("node-2", "nvidia.com/mig-3g.40gb")[0], healthy=False)
    assert offers(own, "node-2") == {**split, "nvidia.com/mig-3g.40gb": "1", "state": "failed"}
    gpus.repartition("node-2", Layout([["1g.10gb"] * 7], strategy="single"))
    assert offers(own, "node-2") == {
        "nvidia.com/gpu": "7", "count": "7", "product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", "memory": "9984",
        "state": "success",
    }  # fmt: skip
    gpus.remove("node-2")
    assert offers(own, "node-2") == {}


def test_a_restarted_kubelet_registers_the_gpus_again(own: OwnCluster, gpus: Gpus, faults: Faults) -> None:
    gpus.install("node-1", Layout([["1g.10gb"]]))
    faults.stop_kubelet("node-1")
    eventually(lambda: own.api.ready_nodes() == {"node-2"}, "the node to be lost")
    faults.start_kubelet("node-1")
    eventually(lambda: own.api.ready_nodes() == {"node-1", "node-2"}, "the node to be back")
    eventually(lambda: offers(own, "node-1").get(SLICE) == "1", "its GPU to be back")


def test_a_killed_container_is_restarted(cluster: Cluster, namespace: str, faults: Faults) -> None:
    apply(cluster, namespace, sleeper("one"))
    wait_for(cluster, namespace, "condition=Ready", "pod/one")
    faults.kill(namespace, "one")
    wait_for(cluster, namespace, "jsonpath={.status.containerStatuses[0].restartCount}=1", "pod/one")
    wait_for(cluster, namespace, "condition=Ready", "pod/one")
    last = look(cluster, namespace, "one")["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert last["exitCode"] == 128 + signal.SIGKILL


def test_a_frozen_container_does_nothing_until_it_is_resumed(cluster: Cluster, namespace: str, faults: Faults) -> None:
    apply(cluster, namespace, pod("server", "perl", "-e", SERVER))
    wait_for(cluster, namespace, "condition=Ready", "pod/server")
    assert [process.name() for process in faults.processes(namespace, "server")] == ["perl"]
    faults.freeze(namespace, "server")
    (process,) = faults.processes(namespace, "server")
    eventually(lambda: process.status() == psutil.STATUS_STOPPED, "it to stand")
    faults.resume()
    assert fetch(cluster.forward("pod/server", 8000, namespace)) == "server"


def test_a_disconnected_node_recovers(own: OwnCluster, namespace: str, faults: Faults) -> None:
    apply(own, namespace, sleeper("one", nodeName="node-2"))
    wait_for(own, namespace, "condition=Ready", "pod/one")
    faults.cut_off("node-2")
    eventually(lambda: own.api.ready_nodes() == {"node-1"}, "the node to be lost")
    wait_for(own, namespace, "condition=Ready=false", "pod/one")
    faults.rejoin("node-2")
    eventually(lambda: own.api.ready_nodes() == {"node-1", "node-2"}, "the node to be back")
    wait_for(own, namespace, "condition=Ready", "pod/one")
    assert look(own, namespace, "one")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_dead_node_can_be_restarted(own: OwnCluster, namespace: str, faults: Faults) -> None:
    apply(own, namespace, sleeper("one", nodeName="node-2"))
    wait_for(own, namespace, "condition=Ready", "pod/one")
    (process,) = faults.processes(namespace, "one")
    faults.kill_node("node-2")
    assert not process.is_running()
    eventually(lambda: own.api.ready_nodes() == {"node-1"}, "the node to be lost")
    faults.revive_node("node-2")
    wait_for(own, namespace, "jsonpath={.status.containerStatuses[0].restartCount}=1", "pod/one")
    wait_for(own, namespace, "condition=Ready", "pod/one")


def test_connections_to_the_api_server_can_be_broken(own: OwnCluster, namespace: str, faults: Faults) -> None:
    own.kubectl("create", "rolebinding", "all", f"--namespace={namespace}", "--clusterrole=admin",
                f"--serviceaccount={namespace}:default")  # fmt: skip
    kubeconfig = own.faulty_login(namespace, "default")

    def attempt(*arguments: str, limit: str = "20s") -> subprocess.CompletedProcess[str]:
        command = (str(own.state / "programs" / "kubectl"), f"--kubeconfig={kubeconfig}", f"--namespace={namespace}")
        return subprocess.run(
            [*command, f"--request-timeout={limit}", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    assert attempt("get", "configmaps", "-o", "name").stdout == "configmap/kube-root-ca.crt\n"

    faults.set_api("pass", Rule("GET", "/configmaps", status=500, times=1), Rule("POST", "/configmaps", status=409))
    assert MESSAGE in attempt("get", "configmaps").stderr
    assert attempt("get", "configmaps").returncode == 0
    assert MESSAGE in attempt("create", "configmap", "mine").stderr
    faults.set_api("pass", Rule("GET", "/configmaps", delay_s=30))
    assert attempt("get", "configmaps", limit="1s").returncode != 0
    # A client that gets Retry-After: 1 retries after a second.
    faults.set_api("pass", Rule("POST", "/configmaps", status=429, times=2))
    assert attempt("create", "configmap", "second").returncode == 0
    faults.set_api("pass", Rule("POST", "/configmaps", lose=True))
    assert attempt("create", "configmap", "lost").returncode != 0
    assert own.kubectl("get", "configmap/lost", f"--namespace={namespace}", "-o", "name") == "configmap/lost\n"

    faults.set_api("hang")
    assert attempt("get", "configmaps", limit="2s").returncode != 0
    faults.set_api("refuse")
    assert attempt("get", "configmaps").returncode != 0
    faults.set_api()
    assert attempt("get", "configmaps").returncode == 0


def test_many_fake_nodes_run_many_pods(own: OwnCluster, namespace: str) -> None:
    own.fake_nodes.add(5, {"nvidia.com/gpu": "8"})
    selected = {"nodeSelector": {MARK: "fake"}, "tolerations": [{"key": MARK, "operator": "Exists"}]}
    apply(own, namespace, *(sleeper(f"pod-{n}", limits={"nvidia.com/gpu": 8}, **selected) for n in range(5)))
    wait_for(own, namespace, "condition=Ready", "pod", "--all")
    pods = json.loads(own.kubectl("get", "pods", f"--namespace={namespace}", "-o", "json"))["items"]
    assert {pod["spec"]["nodeName"] for pod in pods} == {f"fake-{n}" for n in range(5)}
    own.kubectl("delete", "pods", "--all", f"--namespace={namespace}")
    own.fake_nodes.remove()
    eventually(lambda: own.api.ready_nodes() == {"node-1", "node-2"}, "them to go")


def test_an_existing_cluster_can_be_used(own: OwnCluster, namespace: str) -> None:
    apply(own, namespace, pod("server", "perl", "-e", SERVER))
    wait_for(own, namespace, "condition=Ready", "pod/server")
    given = GivenCluster(own.kubeconfig, "registry.example")
    try:
        assert fetch(given.forward("pod/server", 8000, namespace)) == "server"
        assert given.kubectl("get", "pod", f"--namespace={namespace}", "-o", "name") == "pod/server\n"
        login = given.login(namespace, "default")
        user = own.kubectl(f"--kubeconfig={login}", "auth", "whoami", "-o", "jsonpath={.status.userInfo.username}")
        assert user == f"system:serviceaccount:{namespace}:default"
    finally:
        given.stop()


def test_requests_are_in_the_audit_log(own: OwnCluster, namespace: str) -> None:
    own.kubectl("create", "configmap", "seen", f"--namespace={namespace}")

    def written() -> list[tuple[str, str, str, int]]:
        return [
            (event["level"], event["user"]["username"], event["verb"], event["responseStatus"]["code"])
            for event in own.audit_events()
            if "objectRef" in event
            and (event["objectRef"].get("namespace"), event["objectRef"].get("name")) == (namespace, "seen")
        ]

    assert eventually(written, "the request to be written down") == [("Metadata", "admin", "create", 201)]


def traces(state: Path, namespaces: set[str]) -> list[str]:
    """What there is of a cluster by its folder and its process namespaces."""
    processes = [
        str(process) for process in psutil.process_iter(["cmdline"])
        if process_namespace(process.pid) in namespaces or state.name in " ".join(process.info["cmdline"] or ())
    ]  # fmt: skip
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if state.name in line]
    # os.walk, because groups of other programs may go meanwhile, which rglob does not bear.
    groups = [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if Path(folder).name == state.name]
    return [*processes, *mounts, *groups, *([str(state)] if state.exists() else [])]


def process_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""  # it has just ended


def namespaces_below(pid: int) -> set[str]:
    """The process namespaces of all below a process, but the one of this process."""
    below = {process_namespace(child.pid) for child in psutil.Process(pid).children(recursive=True)}
    return below - {process_namespace(os.getpid()), ""}


OWNER = """
import time
from cluster.own import OwnCluster
print(OwnCluster.start().state, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def other_owner() -> Iterator[subprocess.Popen[str]]:
    """A process that starts a cluster, says where, and sleeps."""
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as owner:
        yield owner
        owner.kill()


@pytest.mark.parametrize("killed", ["owner", "owner and keeper"])
def test_a_killed_cluster_leaves_nothing_behind(
    own: OwnCluster, other_owner: subprocess.Popen[str], killed: str
) -> None:
    """Another cluster beside it goes on."""
    assert other_owner.stdout
    state = Path(other_owner.stdout.readline().strip())
    keeper = int((state / "keeper").read_text().split()[0])
    namespaces = namespaces_below(other_owner.pid)
    assert len(namespaces) == 3
    for name, pid in (("keeper", keeper), ("owner", other_owner.pid)):
        if name in killed:
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(process_namespace(pid) in namespaces for pid in psutil.pids()), "all to end")
    if "keeper" in killed:
        # It could not clean up; whoever starts the next cluster does.
        eventually(lambda: not is_alive(state), "the lock to be free")
        sweep()
    eventually(lambda: not traces(state, namespaces), "everything to be gone")
    assert own.api.is_ready()


def freeze(program: Program) -> None:
    """Return when `nsenter`, which waits for the program, has stopped too."""
    nsenter = psutil.Process(program.outer_pid)
    nsenter.children()[0].suspend()
    eventually(lambda: nsenter.status() == psutil.STATUS_STOPPED, f"{program.name} to stand still")


def test_stopping_also_ends_frozen_programs() -> None:
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    others = namespaces_below(os.getpid())
    cluster = OwnCluster.start()
    namespaces = namespaces_below(os.getpid()) - others
    assert len(namespaces) == 3
    assert subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout == routes
    freeze(cluster.control.space.programs["kube-apiserver"])
    freeze(cluster.nodes["node-1"].kubelet)
    begun = time.monotonic()
    cluster.stop()
    assert time.monotonic() - begun < LIMIT_S
    assert traces(cluster.state, namespaces) == []
