"""The programs of the cluster: Kubernetes' own, built once from Go modules, and Debian's for what runs containers."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.image import Unavailable, install_programs

TOOLS = Path(__file__).parent / "tools"
CNI_PLUGINS = Path("/usr/lib/cni")
PACKAGES = {
    "buildah": "buildah",
    "conntrack": "conntrack",
    "containerd": "containerd",
    str(CNI_PLUGINS / "ptp"): "containernetworking-plugins",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "nft": "nftables",
    "runc": "runc",
}
BUILD_LIMIT_S = 3600
KWOK_CONFIG = "kwok.yaml"
KWOK_STAGES = ("node/fast", "node/heartbeat-with-lease", "pod/fast")


def cache() -> Path:
    """Where what takes minutes to make is kept from one run to the next."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halimede" / "kubernetes"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Whoever else wants the same waits here, in this process and in others."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def provide_programs() -> Path:
    """The folder with Kubernetes' programs, all packages installed; Unavailable where that cannot be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("it takes namespaces and mounts: root on Linux")
    with only_one(cache() / "packages.lock"):
        install_programs(PACKAGES)
    files = sorted(path for path in TOOLS.rglob("*") if path.is_file())
    key = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
    with only_one(cache() / f"{key}.lock"):
        if not (cache() / key).exists():
            _build(cache() / key)
    return cache() / key


def _build(folder: Path) -> None:
    if shutil.which("go") is None:
        raise Unavailable("Kubernetes' programs are built with Go, which is not installed")
    version = re.search(r"^\tk8s.io/kubernetes (v1\.(\d+)\.\d+)", (TOOLS / "go.mod").read_text(), re.MULTILINE)
    assert version, "go.mod names no version of Kubernetes"
    # What a build without Kubernetes' own scripts must be told; kubectl fails without it.
    values = {
        "k8s.io/component-base/version.gitVersion": version[1],
        "k8s.io/component-base/version.gitMajor": "1",
        "k8s.io/component-base/version.gitMinor": version[2],
        "k8s.io/client-go/pkg/version.gitVersion": version[1],
    }
    flags = "-s -w " + " ".join(f"-X {name}={value}" for name, value in values.items())
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    _go("build", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o", f"{partial}/", "tool", "./...")
    (partial / "server").rename(partial / "etcd")
    # How kwok's nodes and pods live comes in files beside its program.
    kwok = Path(_go("list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kwok").strip()) / "kustomize" / "stage"
    stages = [path.read_text() for kind in KWOK_STAGES for path in sorted((kwok / kind).glob(f"{kind[:3]}*.yaml"))]
    (partial / KWOK_CONFIG).write_text("\n---\n".join(stages))
    partial.rename(folder)


def _go(*arguments: str) -> str:
    done = subprocess.run(
        ["nice", "go", *arguments],
        cwd=TOOLS,
        env={**os.environ, "CGO_ENABLED": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"Kubernetes' programs could not be built: {done.stderr[-2000:]}")
    return done.stdout
