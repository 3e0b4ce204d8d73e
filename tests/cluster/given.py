"""An existing cluster: KUBECONFIG names it, and HALIMEDE_TEST_REGISTRY the registry that it pulls images from."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from cluster.access import CommandLines
from cluster.images import BUILD_LIMIT_S, provide
from cluster.spaces import run
from support.image import Unavailable

REGISTRY = "HALIMEDE_TEST_REGISTRY"


class GivenCluster(CommandLines):
    """Tests must not break it, and its GPUs are fixed."""

    faults = None
    gpus = None

    def __init__(self, kubeconfig: Path, registry: str) -> None:
        super().__init__(kubeconfig, "kubectl", "helm")
        self._registry = registry
        self._forwards: dict[tuple[str, str, int], subprocess.Popen[str]] = {}
        self._doors: dict[tuple[str, str, int], str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="halimede-given-")

    @classmethod
    def find(cls) -> Self:
        """The one that the environment names; Unavailable where it names half of one."""
        missing = [program for program in ("kubectl", "helm", "buildah") if shutil.which(program) is None]
        if missing:
            raise Unavailable(f"tests on a cluster that is given need {', '.join(missing)}")
        if not os.environ.get("KUBECONFIG"):
            raise Unavailable(f"{REGISTRY} is set and KUBECONFIG is not")
        return cls(Path(os.environ["KUBECONFIG"]), os.environ[REGISTRY])

    def stop(self) -> None:
        """Of the cluster itself everything stays."""
        for process in self._forwards.values():
            process.kill()
            process.communicate()
        self._folder.cleanup()

    def load_image(self, tag: str) -> str:
        provide(tag)
        name = f"{self._registry}/{tag.removeprefix('localhost/')}"
        run("buildah", "push", "--quiet", tag, f"docker://{name}", limit_s=BUILD_LIMIT_S)
        return name

    def forward(self, target: str, port: int, namespace: str = "default") -> str:
        key = (namespace, target, port)
        if key not in self._doors or self._forwards[key].poll() is not None:
            command = ("kubectl", f"--kubeconfig={self.kubeconfig}", "port-forward", f"--namespace={namespace}")
            process = subprocess.Popen([*command, target, f":{port}"], stdout=subprocess.PIPE, text=True)
            self._forwards[key] = process
            assert process.stdout
            forwarded = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())
            assert forwarded, f"kubectl forwards no port of {target} in {namespace}"
            self._doors[key] = forwarded[0]
        return self._doors[key]

    def login(self, namespace: str, account: str) -> Path:
        document: Any = json.loads(self.kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json"))
        token = self.kubectl("create", "token", account, f"--namespace={namespace}", "--duration=24h").strip()
        for user in document["users"]:
            user["user"] = {"token": token}
        path = Path(self._folder.name) / f"{namespace}-{account}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(document))
        return path
