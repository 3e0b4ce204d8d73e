"""What a test may ask of a cluster, whoever made it."""

from pathlib import Path
from typing import Protocol

from cluster.faults import Faults
from cluster.gpus import Gpus
from cluster.spaces import LIMIT_S, run


class Cluster(Protocol):
    @property
    def kubeconfig(self) -> Path:
        """The administrator's, for programs of this machine."""

    @property
    def faults(self) -> Faults | None:
        """None where nothing may be broken."""

    @property
    def gpus(self) -> Gpus | None:
        """None where GPUs are what the cluster has."""

    def kubectl(self, *arguments: str, given: str | None = None, limit_s: float = LIMIT_S) -> str:
        """What `kubectl` says, with `given` on its standard input; an AssertionError when it fails."""

    def helm(self, *arguments: str, limit_s: float = LIMIT_S) -> str:
        """The same for `helm`."""

    def login(self, namespace: str, account: str) -> Path:
        """A kubeconfig for programs of this machine that are to be this ServiceAccount."""

    def load_image(self, tag: str) -> str:
        """Let pods use an image of buildah's storage by the name that is returned."""

    def forward(self, target: str, port: int, namespace: str = "default") -> str:
        """`127.0.0.1:PORT` that leads to `port` of `service/NAME` or `pod/NAME`."""


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
