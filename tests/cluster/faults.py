"""Faults to inject into a cluster."""

import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # the package has no types

from cluster.api import Api
from cluster.commands import ask
from cluster.control import ControlPlane
from cluster.faulty_api import Rule
from cluster.gpus import Gpus
from cluster.node import Node
from cluster.spaces import eventually, python


class Faults:
    """Injects faults. Each one lasts until it is undone, or until `heal`."""

    def __init__(self, api: Api, control: ControlPlane, nodes: Mapping[str, Node], gpus: Gpus) -> None:
        self._api = api
        self._control = control
        self._nodes = nodes
        self._gpus = gpus
        self._frozen: list[psutil.Process] = []
        self._without_kubelet: set[str] = set()
        self._cut_off: set[str] = set()
        self._dead: set[str] = set()

    def processes(self, namespace: str, pod: str, container: str | None = None) -> list[psutil.Process]:
        """Of a running container, its first one first; of the pod's only one where none is named."""
        found = self._api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")["status"]["containerStatuses"]
        (status,) = [each for each in found if container in {None, each["name"]}]
        id_ = status["containerID"].rpartition("/")[2]
        inside = [pid for pid in psutil.pids() if id_ in _control_groups(pid)]
        assert inside, f"no process of {namespace}/{pod} runs"
        return [psutil.Process(pid) for pid in sorted(inside)]

    def kill(self, namespace: str, pod: str, container: str | None = None) -> None:
        """Kill the container's first process, and so the container."""
        self.processes(namespace, pod, container)[0].kill()

    def freeze(self, namespace: str, pod: str, container: str | None = None) -> None:
        """Freeze all processes of the container."""
        for process in self.processes(namespace, pod, container):
            process.send_signal(signal.SIGSTOP)
            self._frozen.append(process)

    def freeze_program(self, name: str) -> None:
        """A program of the control plane stands still; connections to it stay."""
        outer = psutil.Process(self._control.space.programs[name].outer_pid)
        for process in outer.children():
            process.send_signal(signal.SIGSTOP)
            self._frozen.append(process)

    def restart_program(self, name: str) -> None:
        """Kill a program of the control plane; it starts again with its data on disk."""
        program = self._control.space.programs[name]
        program.stop()
        program.start()

    def resume(self) -> None:
        """Continue all stopped processes."""
        for process in self._frozen:
            if process.is_running():
                process.send_signal(signal.SIGCONT)
        self._frozen.clear()

    def stop_kubelet(self, node: str) -> None:
        self._nodes[node].kubelet.stop()
        self._without_kubelet.add(node)

    def start_kubelet(self, node: str) -> None:
        self._nodes[node].kubelet.start()
        self._without_kubelet.remove(node)

    def cut_off(self, node: str) -> None:
        """Its cable is out: neither the API server nor pods of other nodes reach it."""
        self._nodes[node].connect(up=False)
        self._cut_off.add(node)

    def rejoin(self, node: str) -> None:
        self._nodes[node].connect(up=True)
        self._cut_off.remove(node)

    def kill_node(self, node: str) -> None:
        """All of it is dead at once."""
        self._nodes[node].kill()
        self._dead.add(node)
        self._cut_off.discard(node)
        self._without_kubelet.discard(node)

    def revive_node(self, node: str) -> None:
        """It starts again with the disk that it had."""
        self._nodes[node].boot()
        self._nodes[node].join()
        self._dead.remove(node)
        self._gpus.plug_in(node)

    def set_api(self, mode: str = "pass", *rules: Rule) -> list[int | None]:
        """What the faulty way to the API server does from now on; see there for what a mode is.

        Returns how often each of the former rules could still hold.
        """
        socket = self._control.state / "faulty-api.sock"
        if "faulty-api" not in self._control.space.programs:
            program = self._control.space.start("faulty-api", *python("faulty_api", socket, self._control.pki))
            eventually(socket.exists, "the faulty API", check=program.check)
        left: list[int | None] = ask(socket, {"mode": mode, "rules": [asdict(rule) for rule in rules]})
        return left

    def heal(self) -> None:
        """End all faults; returns when all nodes are ready."""
        if "faulty-api" in self._control.space.programs:
            self.set_api()
        self.resume()
        for node in sorted(self._cut_off):
            self.rejoin(node)
        for node in sorted(self._without_kubelet):
            self.start_kubelet(node)
        for node in sorted(self._dead):
            self.revive_node(node)
        eventually(lambda: self._api.ready_nodes() >= set(self._nodes), "all nodes to be ready again")


def _control_groups(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""  # it has ended
