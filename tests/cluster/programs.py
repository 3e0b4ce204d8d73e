"""The programs of the cluster: Kubernetes', built once from Go modules, and Debian's container runtime."""

import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from support.image import Unavailable
from support.phases import only_one, phase, say

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
TELL_EVERY_S = 30.0
PACKAGE_CPU_S = 0.35
"""What a package takes a core to compile, on average."""
# The compiler, once per package, is a short process: collecting garbage costs it a quarter of its time, debugging
# information a tenth. Together a third of the whole build is saved.
BUILD_ENVIRONMENT = {"CGO_ENABLED": "0", "GOGC": "off", "GOMEMLIMIT": "1GiB"}
COMPILER_FLAGS = "-gcflags=all=-dwarf=false"
KWOK_CONFIG = "kwok.yaml"
KWOK_STAGES = ("node/fast", "node/heartbeat-with-lease", "pod/fast")


def cache() -> Path:
    """The folder for files that take minutes to build, kept between runs."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halimede" / "kubernetes"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_machine() -> None:
    """Unavailable where no cluster can be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("it takes namespaces and mounts: root on Linux")
    if shutil.which("go") is None and not folder_of(TOOLS).exists():
        raise Unavailable("Kubernetes' programs are built with Go, which is not installed")


def provide_programs() -> Path:
    """The folder with Kubernetes' programs; Unavailable where they cannot be made."""
    check_machine()
    folder = folder_of(TOOLS)
    with only_one(folder.with_suffix(".lock"), "Kubernetes' programs"):
        if not folder.exists():
            _build(folder)
    return folder


def folder_of(module: Path) -> Path:
    """The folder for the programs of a Go module, of this version of it."""
    files = sorted(path for path in module.rglob("*") if path.is_file())
    return cache() / hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _build(folder: Path) -> None:
    version = re.search(r"^\tk8s.io/kubernetes (v1\.(\d+)\.\d+)", (TOOLS / "go.mod").read_text(), re.MULTILINE)
    assert version, "go.mod names no version of Kubernetes"
    # Settings that Kubernetes' own scripts pass to a build; kubectl fails without them.
    values = {
        "k8s.io/component-base/version.gitVersion": version[1],
        "k8s.io/component-base/version.gitMajor": "1",
        "k8s.io/component-base/version.gitMinor": version[2],
        "k8s.io/client-go/pkg/version.gitVersion": version[1],
    }
    flags = "-s -w " + " ".join(f"-X {name}={value}" for name, value in values.items())
    partial = folder.with_suffix(".partial")
    compile_programs(TOOLS, "Kubernetes", partial, flags, "tool", "./...")
    (partial / "server").rename(partial / "etcd")
    # How kwok's nodes and pods live comes in files beside its program.
    kwok = Path(go(TOOLS, "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kwok").strip()) / "kustomize" / "stage"
    stages = [path.read_text() for kind in KWOK_STAGES for path in sorted((kwok / kind).glob(f"{kind[:3]}*.yaml"))]
    (partial / KWOK_CONFIG).write_text("\n---\n".join(stages))
    partial.rename(folder)


def compile_programs(module: Path, whose: str, folder: Path, linker_flags: str, *programs: str) -> None:
    """Compile programs of a Go module into a new folder. Raises Unavailable."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with phase(f"Downloading the sources of the programs of {whose}", "hundreds of MB"):
        packages = len(go(module, "list", "-deps", *programs).splitlines())
    minutes = math.ceil(PACKAGE_CPU_S * packages / (os.cpu_count() or 1) / 60)
    what = f"Compiling the programs of {whose}, {packages:,} packages of Go, on {os.cpu_count()} cores"
    with phase(what, f"about {minutes} minutes if they are idle"):
        _compile(module, packages, "-trimpath", COMPILER_FLAGS, "-ldflags", linker_flags, "-o", f"{folder}/", *programs)


def _compile(module: Path, packages: int, *arguments: str) -> None:
    """`go build`, which tells now and then how far it is."""
    output: list[str] = []
    compiled = 0
    tell_at = time.monotonic() + TELL_EVERY_S
    with subprocess.Popen(
        ["nice", "go", "build", "-v", "-buildvcs=false", *arguments],
        cwd=module,
        env={**os.environ, **BUILD_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        limit = threading.Timer(BUILD_LIMIT_S, process.kill)
        limit.start()
        assert process.stderr
        for line in process.stderr:
            output.append(line)
            compiled += not line.startswith(("#", "go: ")) and " " not in line
            if time.monotonic() > tell_at:
                say(f"  {compiled:,} of {packages:,} packages")
                tell_at = time.monotonic() + TELL_EVERY_S
        limit.cancel()
    if process.returncode:
        raise Unavailable(f"the programs of {module} could not be built: {''.join(output)[-2000:]}")


def go(module: Path, *arguments: str) -> str:
    """The output of a command of Go in a module. Raises Unavailable."""
    done = subprocess.run(
        ["nice", "go", *arguments],
        cwd=module,
        env={**os.environ, **BUILD_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"{module}: go {arguments[0]}: {done.stderr[-2000:]}")
    return done.stdout
