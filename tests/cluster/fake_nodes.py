"""Simulated nodes and pods (kwok), for tests that need large numbers of them."""

import http.client
from collections.abc import Mapping

from cluster.api import Api, Refused
from cluster.control import ControlPlane
from cluster.programs import KWOK_CONFIG

MARK = "kwok.x-k8s.io/node"
ROOM = {"cpu": "64", "memory": "256Gi", "pods": "250"}


class FakeNodes:
    """Beside the real nodes; a pod gets there only if it tolerates the taint and has the label in its selector, which
    both are MARK, `fake`."""

    def __init__(self, api: Api, control: ControlPlane) -> None:
        self._api = api
        self._control = control
        self._names: list[str] = []

    def add(
        self, count: int, resources: Mapping[str, str] | None = None, labels: Mapping[str, str] | None = None
    ) -> None:
        """Create simulated nodes. They become ready soon; pods on them appear to run at once."""
        if "kwok" not in self._control.space.programs:
            self._control.space.start(
                "kwok",
                self._control.programs / "kwok",
                f"--config={self._control.programs / KWOK_CONFIG}",
                f"--kubeconfig={self._control.write_login('kwok', 'system:masters')}",
                f"--manage-nodes-with-annotation-selector={MARK}=fake",
                # Renewed four times as often, and missed after ten seconds.
                "--node-lease-duration-seconds=20",
            )
        for number in range(len(self._names), len(self._names) + count):
            name = f"fake-{number}"
            room = {**ROOM, **(resources or {})}
            self._api.create("/api/v1/nodes", {
                "metadata": {
                    "name": name,
                    "annotations": {MARK: "fake"},
                    "labels": {MARK: "fake", "kubernetes.io/hostname": name, **(labels or {})},
                },
                "spec": {"taints": [{"key": MARK, "value": "fake", "effect": "NoSchedule"}]},
                "status": {"allocatable": room, "capacity": room},
            })  # fmt: skip
            self._names.append(name)

    def remove(self) -> None:
        """Delete all simulated nodes, and their pods, which would otherwise stay for the 40 s of the pods' collector."""
        for name in self._names:
            self._api.send("DELETE", f"/api/v1/nodes/{name}")
        for name in self._names:
            for pod in self._api.get(f"/api/v1/pods?fieldSelector=spec.nodeName%3D{name}")["items"]:
                about = pod["metadata"]
                path = f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}"
                try:
                    self._api.send("DELETE", f"{path}?gracePeriodSeconds=0")
                except Refused as refusal:
                    if refusal.status != http.client.NOT_FOUND:
                        raise
        self._names.clear()
