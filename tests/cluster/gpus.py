"""Simulated GPUs of nodes: devices that pods can request, and the labels that describe them."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.api import Api
from cluster.commands import ask
from cluster.node import Node
from cluster.spaces import eventually, python
from support.played_driver import library

LABEL = "nvidia.com/"
MIB = 1 << 20
DRIVER_MAJOR, DRIVER = "580", "580.95.05"
RUNTIME_MAJOR, RUNTIME = "13", "13.0"


@dataclass(frozen=True)
class Model:
    """What a GPU is called and can do; by profile the memory in MiB and the multiprocessors of its slices."""

    product: str
    family: str
    compute_capability: tuple[int, int]
    memory_mib: int
    slices: Mapping[str, tuple[int, int]]


H100 = Model(
    "NVIDIA-H100-80GB-HBM3", "hopper", (9, 0), 81559,
    {"1g.10gb": (9984, 16), "1g.20gb": (20096, 26), "2g.20gb": (20096, 32), "3g.40gb": (40448, 60), "4g.40gb": (40448, 64)},
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """What a node has: a card is a tuple of the profiles of its slices, empty for a whole GPU."""

    cards: Sequence[Sequence[str]]
    model: Model = H100
    strategy: str = "mixed"
    """NVIDIA's `mig.strategy`: with `single` all cards have slices of one profile, offered as `nvidia.com/gpu`."""
    config: str = "custom"

    def devices(self, node: str) -> dict[str, dict[str, Any]]:
        """By resource and by UUID, which are the same for the same node and place."""
        found: dict[str, dict[str, Any]] = {}
        for number, card in enumerate(self.cards):
            for position, profile in enumerate(card or ("",)):
                kind = "MIG" if profile else "GPU"
                name = f"{kind}-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node} {number} {position} {profile}')}"
                memory = self.model.slices[profile][0] if profile else self.model.memory_mib
                found.setdefault(self.resource(profile), {})[name] = {
                    "kind": kind,
                    "uuid": name,
                    "name": f"{self.model.product} MIG {profile}" if profile else self.model.product,
                    "memory_bytes": memory * MIB,
                    "compute_capability": ".".join(map(str, self.model.compute_capability)),
                    "health": "Healthy",
                }
        return found

    def resource(self, profile: str) -> str:
        return LABEL + ("gpu" if not profile or self.strategy == "single" else f"mig-{profile.replace('+', '.')}")

    def labels(self) -> dict[str, str]:
        """What GPU feature discovery and mig-manager write."""
        model = self.model
        profiles = [profile for card in self.cards for profile in card]
        major, minor = model.compute_capability
        labels: dict[str, Any] = {
            "gpu.present": "true",
            "gpu.product": model.product,
            "gpu.family": model.family,
            "gpu.memory": model.memory_mib,
            "gpu.count": len(self.cards),
            "gpu.replicas": 1,
            "gpu.compute.major": major,
            "gpu.compute.minor": minor,
            "gpu.sharing-strategy": "none",
            "cuda.driver-version.full": DRIVER,
            "cuda.driver-version.major": DRIVER_MAJOR,
            "cuda.runtime-version.full": RUNTIME,
            "cuda.runtime-version.major": RUNTIME_MAJOR,
            "mig.capable": "true" if model.slices else "false",
            "mig.strategy": self.strategy,
            "mig.config": self.config,
            "mig.config.state": "success",
            "gpu.deploy.device-plugin": "true",
            "gpu.deploy.mig-manager": "true",
        }
        for profile in set(profiles):
            memory, multiprocessors = model.slices[profile]
            if self.strategy == "single":
                product = f"{model.product}-MIG-{profile}"
                labels |= {"gpu.product": product, "gpu.count": len(profiles), "gpu.memory": memory}
                labels |= {"gpu.multiprocessors": multiprocessors, "gpu.slices.gi": profile[0]}
            else:
                name = f"mig-{profile.replace('+', '.')}"
                labels |= {f"{name}.count": profiles.count(profile), f"{name}.memory": memory}
                labels |= {f"{name}.multiprocessors": multiprocessors, f"{name}.slices.gi": profile[0]}
        return {LABEL + key: str(value) for key, value in labels.items()}


class Gpus:
    """The played driver of all nodes."""

    def __init__(self, api: Api, nodes: Mapping[str, Node]) -> None:
        self._api = api
        self._nodes = nodes
        self._devices: dict[str, dict[str, dict[str, Any]]] = {}

    def install(self, node: str, layout: Layout) -> None:
        """The node has these and no others; returns when pods can ask for them."""
        self._offer(node, layout.devices(node))
        self._label(node, layout.labels())

    def remove(self, node: str) -> None:
        self._offer(node, {})
        self._label(node, {})

    def repartition(self, node: str, layout: Layout, succeeds: bool = True) -> None:
        """As mig-manager does: nothing can be asked for meanwhile, and a label says how it went. When it fails, the
        devices are what they were."""
        before = self._devices.get(node, {})
        config, paused = (
            {f"{LABEL}mig.config": layout.config},
            {f"{LABEL}gpu.deploy.device-plugin": "paused-for-mig-change"},
        )
        self._merge(node, {**config, **paused, f"{LABEL}mig.config.state": "pending"})
        self._offer(node, {})
        if succeeds:
            self.install(node, layout)
            return
        self._offer(node, before)
        self._merge(node, {f"{LABEL}gpu.deploy.device-plugin": "true", f"{LABEL}mig.config.state": "failed"})

    def devices(self, node: str, resource: str) -> list[str]:
        """The UUIDs of what the node offers under this name."""
        return list(self._devices.get(node, {}).get(resource, {}))

    def mark(self, node: str, device: str, healthy: bool) -> None:
        """One device fails, or is well again."""
        health = "Healthy" if healthy else "Unhealthy"
        self._offer(node, {
            resource: {name: {**entry, "health": health} if name == device else entry for name, entry in devices.items()}
            for resource, devices in self._devices[node].items()
        })  # fmt: skip

    def use(self, node: str, used_mib: Mapping[str, int]) -> None:
        """Change the memory in use of devices, by UUID."""
        self._offer(node, {
            resource: {name: {**entry, "used_mib": used_mib.get(name, 0)} for name, entry in devices.items()}
            for resource, devices in self._devices[node].items()
        })  # fmt: skip

    def plug_in(self, node: str) -> None:
        """Start the driver of a node that has been off."""
        if node in self._devices:
            self._offer(node, self._devices[node])

    def reset(self) -> None:
        """No node has any."""
        for node in list(self._devices):
            self.remove(node)

    def _offer(self, node: str, devices: dict[str, dict[str, Any]]) -> None:
        fake_node = self._nodes[node]
        socket = fake_node.folder / "gpus.sock"
        if "gpus" not in fake_node.space.programs:
            socket.unlink(missing_ok=True)  # of an earlier life of the node
            program = fake_node.space.start("gpus", *python("gpu_plugin", socket, fake_node.folder / "gpus", library()))
            eventually(socket.exists, f"the driver of {node}", check=program.check)
        self._devices[node] = devices
        ask(socket, devices)
        well = {
            name: sum(each["health"] == "Healthy" for each in entries.values()) for name, entries in devices.items()
        }

        def found() -> dict[str, int]:
            allocatable = self._api.get(f"/api/v1/nodes/{node}")["status"]["allocatable"]
            return {name: int(count) for name, count in allocatable.items() if name.startswith(LABEL) and int(count)}

        wanted = {name: count for name, count in well.items() if count}
        try:
            eventually(lambda: found() == wanted, f"{node} to offer {wanted}")
        except AssertionError as error:
            programs = [fake_node.space.programs[name] for name in ("gpus", "kubelet")]
            error.add_note(f"it offers {found()}\n" + "\n".join(program.last_output() for program in programs))
            raise

    def _label(self, node: str, labels: Mapping[str, str]) -> None:
        """These and no others of NVIDIA's."""
        before = self._api.get(f"/api/v1/nodes/{node}")["metadata"]["labels"]
        gone = {name: None for name in before if name.startswith(LABEL) and name not in labels}
        self._merge(node, {**gone, **labels})

    def _merge(self, node: str, labels: Mapping[str, str | None]) -> None:
        self._api.patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": labels}})
