"""The interface of a test cluster, our own or a given one."""

from pathlib import Path
from typing import Protocol

from cluster.faults import Faults
from cluster.gpus import Gpus
from cluster.spaces import LIMIT_S, run


class Cluster(Protocol):
    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the administrator, for programs on this machine."""

    @property
    def faults(self) -> Faults | None:
        """None if nothing in the cluster may be broken."""

    @property
    def gpus(self) -> Gpus | None:
        """None if the cluster's GPUs are not simulated."""

    def kubectl(self, *arguments: str, given: str | None = None, limit_s: float = LIMIT_S) -> str:
        """Run kubectl and return its output. given: its standard input. Raises AssertionError if it fails."""

    def helm(self, *arguments: str, limit_s: float = LIMIT_S) -> str:
        """Like `kubectl`, for helm."""

    def make_namespace(self, name: str) -> None:
        """Return when pods can be made in it."""

    def end_namespace(self, name: str) -> None:
        """Return when none of its pods runs; its other objects are deleted soon."""

    def login(self, namespace: str, account: str) -> Path:
        """A kubeconfig with which programs on this machine log in as this ServiceAccount."""

    def load_image(self, tag: str) -> str:
        """Make an image of buildah's storage available to pods; return the name for them."""

    def forward(self, target: str, port: int, namespace: str = "default") -> str:
        """Forward a local address, `127.0.0.1:PORT`, to `port` of `service/NAME` or `pod/NAME`; return it."""


class CommandLines:
    """kubectl and helm as a person runs them."""

    def __init__(self, kubeconfig: Path, kubectl: str, helm: str) -> None:
        self.kubeconfig = kubeconfig
        self._kubectl = kubectl
        self._helm = helm

    def kubectl(self, *arguments: str, given: str | None = None, limit_s: float = LIMIT_S) -> str:
        return run(self._kubectl, f"--kubeconfig={self.kubeconfig}", *arguments, given=given, limit_s=limit_s)

    def helm(self, *arguments: str, limit_s: float = LIMIT_S) -> str:
        return run(self._helm, f"--kubeconfig={self.kubeconfig}", *arguments, limit_s=limit_s)

    def make_namespace(self, name: str) -> None:
        self.kubectl("create", "namespace", name)
        self.kubectl("wait", "--for=create", "serviceaccount/default", f"--namespace={name}", "--timeout=60s")

    def end_namespace(self, name: str) -> None:
        # No controller makes a pod in a namespace that ends.
        self.kubectl("delete", "namespace", name, "--wait=false")
        self.kubectl("delete", "pods", "--all", "--grace-period=1", f"--namespace={name}", "--timeout=80s")

    def by(self, kubeconfig: Path) -> "CommandLines":
        """The same programs with another login."""
        return CommandLines(kubeconfig, self._kubectl, self._helm)
