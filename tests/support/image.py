"""The server's image, built by `make image` with buildah, and containers of it, run by runc as in a cluster.

Missing programs are installed from Debian's packages. Without access to a registry, the base image is made from them too.
Images stay in buildah's storage, so that only changed layers are built again.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from support.phases import only_one, phase
from support.served import add_python, infer
from support.server import LOOPBACK, RunningServer, start_command

REPOSITORY_ROOT = Path(__file__).parents[2]
BASE = "debian:bookworm-slim"
SUITE = "bookworm"
LOCK = Path(gettempdir()) / "halimede-test-image.lock"
PACKAGES_LOCK = LOCK.with_name("halimede-test-packages.lock")
CONTAINERS = "halimede-test-"
"""Prefix of container names in a test run; the variant and the process id follow."""
LEFT_OVER_LIMIT = 8
"""The number of images of earlier builds to keep, at half a gigabyte each. They are the cache of the next build."""

IMAGE_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap", "runc": "runc"}
"""Debian packages by program."""

ENVIRONMENT = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
# A slim image lacks them.
UNNEEDED = (
    *("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian"),
    *("var/cache/apt", "var/lib/apt/lists", "var/log"),
)


def documented_mb() -> dict[str, float]:
    """The compressed size of each variant on the page about images."""
    page = (REPOSITORY_ROOT / "docs/pages/container.md").read_text()
    return {
        variant: float(size) for variant, size in re.findall(r"^\| `VARIANT=(\w+)` \|.*\| (\d+) MB", page, re.MULTILINE)
    }


class Unavailable(Exception):
    """This machine cannot build or run images; the message has the reason."""


def run(*command: str | Path, timeout_s: float = 600) -> str:
    """The command's output; an AssertionError with its output and errors if it fails."""
    done = attempt(*command, timeout_s=timeout_s)
    report = f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}{done.stderr[-8000:]}"
    assert done.returncode == 0, report
    return done.stdout


def attempt(*command: str | Path, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=REPOSITORY_ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def install_programs(packages: Mapping[str, str] = IMAGE_PACKAGES) -> None:
    """Install the missing programs from Debian's packages."""
    with only_one(PACKAGES_LOCK, "Debian's packages"):
        _install_missing(packages)


def _install_missing(packages: Mapping[str, str]) -> None:
    missing = sorted({package for program, package in packages.items() if shutil.which(program) is None})
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise Unavailable(f"{', '.join(missing)} must be installed, and apt-get does not exist")
    apt = ("apt-get", "--quiet", "--option", "DPkg::Lock::Timeout=120")
    with phase(f"Installing Debian's packages {', '.join(missing)}", "some 100 MB"):
        for command in (("update",), ("install", "-y", "--no-install-recommends", *missing)):
            if (done := attempt(*apt, *command)).returncode:
                raise Unavailable(f"apt-get {command[0]} of {', '.join(missing)}: {done.stderr[-500:]}")


def image_id(tag: str) -> str:
    """Of the image in buildah's storage; "" if there is none."""
    return attempt("buildah", "inspect", "--type=image", "--format={{.FromImageID}}", tag).stdout.strip()


def provide_base() -> None:
    """Provide the base image of Dockerfile.server: the local one, a registry's, or one made of Debian's packages."""
    if image_id(BASE):
        return
    expect = "30 MB; debootstrap downloads 60 MB and takes a minute or two"
    with phase(f"Pulling the image {BASE}, or making it from Debian's packages", expect):
        _make_base()


def _make_base() -> None:
    if attempt("buildah", "pull", "--quiet", BASE, timeout_s=120).returncode == 0:
        return
    with TemporaryDirectory() as scratch:
        if (made := attempt("debootstrap", "--variant=minbase", SUITE, scratch)).returncode:
            raise Unavailable(f"{BASE} can neither be pulled nor made: {made.stdout[-500:]}{made.stderr[-500:]}")
        for directory in UNNEEDED:
            for path in (Path(scratch) / directory).glob("*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        container = run("buildah", "from", "scratch").strip()
        try:
            run("buildah", "add", "--quiet", container, scratch, "/")
            run("buildah", "commit", "--quiet", "--format=docker", container, BASE)
        finally:
            run("buildah", "rm", container)


@dataclass(frozen=True)
class Image:
    name: str
    root: Path
    """The root folder of its files."""
    config: Mapping[str, Any]
    """Its configuration in Docker: User, Entrypoint, Env, Healthcheck ..."""

    def compressed_bytes(self) -> int:
        """The size that a registry stores and a node pulls."""
        with TemporaryDirectory() as scratch:
            run("buildah", "push", "--quiet", self.name, f"oci:{scratch}")
            return sum(path.stat().st_size for path in Path(scratch).rglob("*") if path.is_file())


@contextmanager
def built_image(variant: str = "cpu", *, kept: bool = True) -> Iterator[Image]:
    """Run `make image`, and mount the result's files within the context.

    An image that is not kept leaves nothing on the disk, not even layers: those of some variants have 20 GB.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("images are built and run by buildah and runc, as root on Linux")
    with ExitStack() as stack:
        with one_build_at_a_time():
            install_programs()
            provide_base()
            tag = f"{tag_of(variant)}{'' if kept else '-once'}"
            without_layers = [] if kept else ["FLAGS_buildah=--format docker --isolation chroot"]
            with phase(f"Building the server's image ({variant})"):
                run(
                    "make",
                    "image",
                    "ENGINE=buildah",
                    f"IMAGE={tag}",
                    f"VARIANT={variant}",
                    *without_layers,
                    timeout_s=3600,
                )
            if not kept:
                stack.callback(run, "buildah", "rmi", tag)
            remove_left_overs()
            image = stack.enter_context(_mounted(tag))
        yield image


@contextmanager
def extended_image(dockerfile: str, tag: str) -> Iterator[Image]:
    """Build an image from this Dockerfile, whose base exists. pip uses the package index of this machine."""
    with ExitStack() as stack, TemporaryDirectory() as folder:
        (Path(folder) / "Dockerfile").write_text(dockerfile)
        settings = {"cert": "PIP_CERT", "index-url": "PIP_INDEX_URL", "timeout": "PIP_DEFAULT_TIMEOUT"}
        given = {option: os.environ[name] for option, name in settings.items() if os.environ.get(name)}
        mounts = []
        if certificates := given.get("cert"):
            given["cert"] = "/tmp/certificates.pem"
            mounts.append(f"--volume={certificates}:{given['cert']}:ro")
        configuration = Path(folder) / "pip.conf"
        configuration.write_text("\n".join(["[global]", *(f"{option} = {value}" for option, value in given.items())]))
        mounts.append(f"--volume={configuration}:/etc/pip.conf:ro")
        flags = ("--format=docker", "--layers", "--isolation=chroot", f"--tag={tag}", *mounts)
        with one_build_at_a_time():
            run("buildah", "build", *flags, folder, timeout_s=1800)
            image = stack.enter_context(_mounted(tag))
        yield image


def one_build_at_a_time() -> AbstractContextManager[None]:
    """A second test run waits, and then finds everything in the cache."""
    return only_one(LOCK, "container images")


def tag_of(variant: str) -> str:
    return f"localhost/halimede:test-{variant}"


@contextmanager
def _mounted(tag: str) -> Iterator[Image]:
    kind = tag.rpartition("test-")[2]
    name = f"{CONTAINERS}{kind}-{os.getpid()}"
    container = run("buildah", "from", "--pull-never", f"--name={name}", tag).strip()
    config = json.loads(run("buildah", "inspect", "--type=image", tag))["Docker"]["config"]
    try:
        yield Image(tag, Path(run("buildah", "mount", container).strip()), config)
    finally:
        run("buildah", "rm", container)


def remove_left_overs() -> None:
    """Remove the leftovers of killed test runs, and old images that fill the disk."""
    for name in run("buildah", "containers", "--format", "{{.ContainerName}}").split():
        if name.startswith(CONTAINERS) and not Path("/proc", name.rpartition("-")[2]).exists():
            run("buildah", "rm", name)
    # The newest ones come first. Those of the last build have the installed packages, which the next build needs.
    for old in run("buildah", "images", "--quiet", "--filter=dangling=true").split()[LEFT_OVER_LIMIT:]:
        attempt("buildah", "rmi", old)  # fails for images in use


@dataclass(frozen=True)
class Container:
    """One container: the image's environment, no capabilities, a read-only root and no writable folder.

    `models` is mounted read-only on /models.
    """

    image: Image
    directory: Path
    """Folder of runc's state, the bundle and the log."""
    models: Path
    user: str = ""
    """As for `docker run --user`; the image's user if empty."""
    tmp: str = ""
    """Mount options of a tmpfs on /tmp, as for `--tmpfs /tmp:<options>`; no tmpfs if empty."""

    @property
    def id(self) -> str:
        return f"halimede-{self.directory.name}-{os.getpid()}"

    def runc(self, *arguments: str | Path) -> tuple[str, ...]:
        return ("runc", "--root", str(self.directory / "state"), *map(str, arguments))

    def start(self, *arguments: str, private_network: bool = False) -> RunningServer:
        """Start a server with the arguments after the image's name in `docker run IMAGE ...`."""
        command = self._prepare(arguments, private_network)
        return start_command(self.directory, command, ready=not private_network)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command and wait for its end."""
        return attempt(*self._prepare(arguments, private_network=True), timeout_s=60)

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run another command in the running container."""
        return attempt(*self.runc("exec", self.id, *command), timeout_s=60)

    def health(self) -> int:
        """The exit code of the image's health check."""
        kind, *command = self.image.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.execute(*command).returncode

    def remove(self) -> None:
        attempt(*self.runc("delete", "--force", self.id))

    def _prepare(self, arguments: Sequence[str], private_network: bool) -> tuple[str, ...]:
        bundle = self.directory / f"bundle-{time.monotonic_ns()}"
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(self._specification(arguments, private_network)))
        return self.runc("run", "--bundle", bundle, self.id)

    def _specification(self, arguments: Sequence[str], private_network: bool) -> dict[str, Any]:
        config = self.image.config
        user, _, group = (self.user or config["User"]).partition(":")
        namespaces = ["pid", "mount", "ipc", "uts", *(["network"] if private_network else [])]
        memory = {"type": "tmpfs", "source": "tmpfs"}
        sets = ("bounding", "effective", "inheritable", "permitted", "ambient")
        return {
            "ociVersion": "1.0.2",
            "root": {"path": str(self.image.root), "readonly": True},
            "process": {
                "user": {"uid": int(user), "gid": int(group)},
                "args": [*config["Entrypoint"], *(config["Cmd"] or []), *arguments],
                "env": config["Env"],
                "cwd": config["WorkingDir"] or "/",
                "noNewPrivileges": True,
                "capabilities": {name: [] for name in sets},
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
                {**memory, "destination": "/dev", "options": ["nosuid", "mode=755"]},
                {"destination": "/models", "type": "bind", "source": str(self.models), "options": ["rbind", "ro"]},
                *([{**memory, "destination": "/tmp", "options": [self.tmp]}] if self.tmp else []),
            ],
            "linux": {"namespaces": [{"type": namespace} for namespace in namespaces]},
        }


def check_serves_with(container: Container, head: str, execute: str) -> None:
    """Serve a python model that needs a package of the image, beside an ONNX model."""
    add_python(container.models, "packed", execute, head=head)
    server = container.start("--model-repository=/models", *LOOPBACK)
    assert infer(server, "packed", 20.5) == (200, [42])
    assert infer(server, "simple", 1)[0] == 400  # it is there too
    assert server.stop() == 0, server.log
