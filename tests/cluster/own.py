"""Our own cluster: a control plane and two nodes, in Linux namespaces, until its owner ends."""

import fcntl
import http.client
import json
import os
import select
import signal
import socket
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from cluster.access import CommandLines
from cluster.api import Api, Refused
from cluster.commands import ask
from cluster.control import ADDRESS, FAULTY_PORT, PORT, QUICK, ControlPlane, HpaTiming
from cluster.fake_nodes import FakeNodes
from cluster.faults import Faults
from cluster.gpus import Gpus
from cluster.images import archived, full_name, provide_pause
from cluster.keeper import clean_up
from cluster.node import Node
from cluster.pki import Authority, Identity, write_kubeconfig
from cluster.programs import PACKAGES, cache, check_machine, provide_programs
from cluster.spaces import CLEAN_UP_LIMIT_S, Program, Space, eventually, find_first, python
from support.image import install_programs
from support.phases import only_one, phase

PREFIX = "halimede-cluster-"
STANDING = Path(tempfile.gettempdir()) / f"{PREFIX}standing"
"""The one that the command line starts, and that no process owns."""
START_LOCK = "start.lock"
NODES = 2


class OwnCluster(CommandLines):
    """Made by `start`, ended by `stop`; it ends with the process that started it, unless it is `standing`."""

    def __init__(
        self, state: Path, programs: Path, keeper: Program, space: Space, nodes: int, images: Sequence[str]
    ) -> None:
        super().__init__(state / "kubeconfig", str(programs / "kubectl"), str(programs / "helm"))
        self.state = state
        self.control = ControlPlane(state, programs, space, Authority("ca"))
        self._first = [archived(tag) for tag in images]
        self.nodes: dict[str, Node] = {}
        for _ in range(nodes):
            self._make_node()
        self._keeper = keeper
        self._doors: dict[tuple[str, int], str] = {}
        self._loaded: dict[Path, None] = dict.fromkeys(self._first)
        self._connections = ExitStack()
        self._autoscaling: tuple[HpaTiming, tuple[str, ...]] = (QUICK, ())

    @classmethod
    def start(cls, standing: bool = False, nodes: int = NODES, images: Sequence[str] = ()) -> Self:
        """Unavailable where the machine cannot have one. images: those that all nodes have from the beginning."""
        check_machine()
        # What Go needs is downloaded while apt installs.
        with ThreadPoolExecutor() as pool:
            packages = pool.submit(install_programs, PACKAGES)
            programs = provide_programs()
            packages.result()
        provide_pause(programs)
        sweep()
        with phase("Starting a cluster"):
            cluster = cls._hold(programs, standing, nodes, images)
            try:
                cluster._start()
            except BaseException:
                cluster.stop()
                raise
        return cluster

    def stop(self) -> None:
        """Everything of it at once; nothing is left of it, its files included."""
        self._connections.close()
        self._keeper.terminate()
        for space in (self.control.space, *(node.space for node in self.nodes.values() if node.runs)):
            space.collect()

    def load_image(self, tag: str) -> str:
        archive = archived(tag)
        if archive not in self._loaded:
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda node: node.load(archive), self.nodes.values()))
            self._loaded[archive] = None
        return full_name(tag)

    def add_node(self) -> None:
        """One more, with the images that the others have."""
        node = self._make_node()
        node.boot()
        node.join()
        for archive in self._loaded:
            if archive not in self._first:
                node.load(archive)
        eventually(self.is_complete, node.name, check=self._check)

    def _make_node(self) -> Node:
        node = Node(len(self.nodes) + 1, self.control, self._first)
        self.nodes[node.name] = node
        return node

    def make_namespace(self, name: str) -> None:
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        accounts = f"/api/v1/namespaces/{name}/serviceaccounts"
        eventually(lambda: self.api.get(accounts)["items"], f"the default account of {name}")

    def end_namespace(self, name: str) -> None:
        path = f"/api/v1/namespaces/{name}"
        pods = f"{path}/pods"
        # No controller makes a pod in a namespace that ends.
        try:
            self.api.send("DELETE", path)
        except Refused as refusal:
            if refusal.status != http.client.NOT_FOUND:
                raise
        self.api.send("DELETE", pods, {"gracePeriodSeconds": 1})
        eventually(lambda: not self.api.get(pods)["items"], f"the pods of {name} to end")

    def login(self, namespace: str, account: str) -> Path:
        return self._write_login(namespace, account, PORT, "")

    def faulty_login(self, namespace: str, account: str) -> Path:
        """The same by the way that `faults.set_api` breaks."""
        self.faults.set_api()
        return self._write_login(namespace, account, FAULTY_PORT, "-faulty")

    def _write_login(self, namespace: str, account: str, port: int, kind: str) -> Path:
        path = self.state / f"{namespace}-{account}{kind}.kubeconfig"
        server = f"https://{self.forward_address(ADDRESS, port)}"
        return write_kubeconfig(path, server, self.control.authority.certificate, self.api.token(namespace, account))

    def forward(self, target: str, port: int, namespace: str = "default") -> str:
        kind, _, name = target.partition("/")
        found = self.api.get(f"/api/v1/namespaces/{namespace}/{kind}s/{name}")
        return self.forward_address(found["spec"]["clusterIP"] if kind == "service" else found["status"]["podIP"], port)

    def forward_address(self, address: str, port: int) -> str:
        """`127.0.0.1:PORT` that leads to an address within the cluster's network."""
        if (address, port) not in self._doors:
            with socket.create_server(("127.0.0.1", 0)) as outside:
                door = outside.getsockname()[1]
                ask(self.state / "forwarder.sock", {"host": address, "port": port}, outside.fileno())
            self._doors[address, port] = f"127.0.0.1:{door}"
        return self._doors[address, port]

    def set_autoscaling(self, timing: HpaTiming = QUICK, gates: Sequence[str] = ()) -> None:
        """Start the controllers again with these settings of autoscaling; the API server too if the gates change."""
        if (timing, tuple(gates)) == self._autoscaling:
            return
        programs = self.control.space.programs
        # First, since it ends by itself when the API server goes while it starts.
        programs["kube-controller-manager"].stop()
        if tuple(gates) != self._autoscaling[1]:
            programs["kube-apiserver"].stop()
            self.control.start_api(gates)
            eventually(self.api.is_ready, "the API server", check=programs["kube-apiserver"].check)
        self.control.start_manager(timing, gates)
        self._autoscaling = (timing, tuple(gates))

    def audit_events(self, containing: str = "") -> list[dict[str, Any]]:
        """The requests so far whose line in the audit log contains a text: `verb`, `user`, `objectRef` and more.

        The user's name is empty if the API server ended the request before it was authenticated.
        """
        return audit_events(self.audit_log().read(), containing)

    def audit_log(self) -> "GrowingLog":
        """A reader of the audit log, from its beginning, for `audit_events`."""
        return GrowingLog(self.state / "audit.log")

    @classmethod
    def _hold(cls, programs: Path, standing: bool, nodes: int, images: Sequence[str]) -> Self:
        """The namespaces in which the cluster runs, and the process that ends it."""
        first = programs / "pause"
        with only_one(cache() / START_LOCK, "the folders of clusters"):
            state = STANDING if standing else Path(tempfile.mkdtemp(prefix=PREFIX))
            (state / "logs").mkdir(parents=True)
            (state / "programs").symlink_to(programs)
            command = python("keeper", state, 0 if standing else os.getpid(), first)
            keeper = Program("keeper", command, state / "logs" / "keeper.log")
            with (state / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                keeper.start(keep_open=(lock.fileno(),))
        try:
            eventually((state / "keeper").exists, "the keeper to start", check=keeper.check)
            outer = int((state / "keeper").read_text().split()[1])
            holder = eventually(lambda: find_first(outer, first), "the cluster's namespaces", check=keeper.check)
        except BaseException:
            keeper.terminate()
            raise
        return cls(state, programs, keeper, Space(holder, state / "logs"), nodes, images)

    def _start(self) -> None:
        control = self.control
        control.prepare_network()
        forwarder = control.space.start("forwarder", *python("forwarder", self.state / "forwarder.sock"))
        control.write_pki()
        control.start_store()
        control.start_api()
        with ThreadPoolExecutor() as pool:
            booted = [pool.submit(node.boot) for node in self.nodes.values()]
            eventually((self.state / "forwarder.sock").exists, "the forwarder", check=forwarder.check)
            door = self.forward_address(ADDRESS, PORT)
            self.api = Api(int(door.rpartition(":")[2]), control.pki / "ca.crt", control.pki / "admin.crt")
            self._connections.callback(self.api.close)
            admin = Identity((control.pki / "admin.crt").read_bytes(), (control.pki / "admin.key").read_bytes())
            self.gpus = Gpus(self.api, self.nodes)
            self.fake_nodes = FakeNodes(self.api, control)
            self.faults = Faults(self.api, control, self.nodes, self.gpus)
            write_kubeconfig(self.kubeconfig, f"https://{door}", control.authority.certificate, admin)
            eventually(self.api.is_ready, "the API server", check=control.space.check)
            control.start_controllers()
            control.start_network(next(iter(self.nodes)))
            for each in booted:
                each.result()
        for node in self.nodes.values():
            node.join()
        control.announce_dns(self.api)
        eventually(self.is_complete, "nodes and controllers", check=self._check)

    def is_complete(self) -> bool:
        """All nodes are ready, and pods can be made."""
        try:
            self.api.get("/api/v1/namespaces/default/serviceaccounts/default")
        except Refused:
            return False
        return self.api.ready_nodes() >= set(self.nodes)

    def _check(self) -> None:
        for space in (self.control.space, *(node.space for node in self.nodes.values())):
            space.check()


class GrowingLog:
    """A file to which lines are appended; each line is read once, when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_bytes = path, 0

    def read(self) -> list[str]:
        """The lines that were completed since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            data, _, _unfinished = file.read().rpartition(b"\n")
        if not data:
            return []
        self._read_bytes += len(data) + 1
        return data.decode(errors="replace").split("\n")


def audit_events(lines: Sequence[str], containing: str) -> list[dict[str, Any]]:
    """The requests whose line contains a text. The user's name is empty where the log has none."""
    events = [json.loads(line) for line in lines if containing in line]
    for event in events:
        event["user"].setdefault("username", "")
    return events


def sweep() -> None:
    """Remove what clusters have left whose keeper was killed too."""
    # Not while somebody has made a folder and no lock in it yet.
    with only_one(cache() / START_LOCK, "the folders of clusters"):
        for state in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if not is_alive(state):
                clean_up(state)


def is_alive(state: Path) -> bool:
    """Its keeper has the lock."""
    try:
        with (state / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def stop_standing() -> bool:
    """End the cluster that the command line has started; False if none runs."""
    if not is_alive(STANDING):
        sweep()
        return False
    keeper = os.pidfd_open(int((STANDING / "keeper").read_text().split()[0]))
    try:
        signal.pidfd_send_signal(keeper, signal.SIGTERM)
        ended, _, _ = select.select([keeper], [], [], CLEAN_UP_LIMIT_S)
    finally:
        os.close(keeper)
    assert ended, f"waited {CLEAN_UP_LIMIT_S} s for the cluster to end"
    # It has removed everything, or could not: then this raises the reason.
    sweep()
    return True
