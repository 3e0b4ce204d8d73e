"""Programs that tests build once, into a cache: h2spec, tools for gRPC, and gRPC clients of other languages.

The clients are small programs that run a plan.
"""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

import halimede.core.wire.protocol
from support.grpc_clients import PYTHON_CLIENTS
from support.grpc_plans import LIMIT_S, Answer, Client, Plan, Result
from support.image import Unavailable
from support.phases import only_one, phase, shown

T = TypeVar("T")

PROBES = Path(__file__).parent / "probes"
DESCRIPTORS = Path(halimede.core.wire.protocol.__file__).parent / "descriptors.binpb"
BUILD_LIMIT_S = 900
# As for the programs of the cluster (tests/cluster/programs.py): with equal flags Go builds what both need only once.
GO_ENVIRONMENT = {"CGO_ENABLED": "0", "GOGC": "off", "GOMEMLIMIT": "1GiB"}
GO_BUILD = ["go", "build", "-buildvcs=false", "-trimpath", "-gcflags=all=-dwarf=false", "-ldflags", "-s -w"]


def provided(config: pytest.Config, make: Callable[[], T]) -> T:
    """What needs such programs, for a fixture. Tests that use it are skipped where they cannot be built; CI builds all."""
    try:
        with shown(config):
            return make()
    except Unavailable as reason:
        if os.environ.get("CI"):
            pytest.fail(str(reason))
        pytest.skip(str(reason))


def cache() -> Path:
    """The folder for programs that tests build, kept between runs."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halimede" / "interop"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def built(name: str, build: Sequence[str], *, needs: str, places: Sequence[str] = ()) -> Path:
    """The folder of what a command makes of `probes/NAME`; Unavailable where its tool is missing or fails.

    `{out}` in the command is that folder. The command runs in a copy of the sources. It is built again when these or
    the command change. `places` are further arguments, on which the result does not depend.
    """
    sources = PROBES / name
    files = sorted(path for path in sources.rglob("*") if path.is_file())
    contents = [*(path.read_bytes() for path in files), *(argument.encode() for argument in build)]
    digest = hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]
    folder = cache() / f"{name}-{digest}"
    with only_one(cache() / f"{name}.lock", f"the programs of {name}"):
        if folder.exists():
            return folder
        if shutil.which(needs) is None:
            raise Unavailable(f"the programs of {name} need {needs}, which is not installed")
        partial, copy = folder.with_suffix(".partial"), folder.with_suffix(".sources")
        for each in (partial, copy):
            shutil.rmtree(each, ignore_errors=True)
        partial.mkdir()
        shutil.copytree(sources, copy)
        with phase(f"Building the programs of {name}"):
            done = subprocess.run(
                ["nice", *(argument.replace("{out}", str(partial)) for argument in build), *places],
                cwd=copy,
                env={**os.environ, **GO_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=BUILD_LIMIT_S,
                check=False,
            )
        shutil.rmtree(copy)
        if done.returncode:
            raise Unavailable(f"the programs of {name} could not be built: {(done.stdout + done.stderr)[-2000:]}")
        partial.rename(folder)
    return folder


@dataclass(slots=True)
class Program:
    """A probe at work."""

    process: subprocess.Popen[str]

    def tell(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.close()
        self.process.stdin = None

    def result(self) -> Result:
        try:
            output, errors = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        assert self.process.returncode == 0, errors
        found = json.loads(output)
        answers = [Answer(**each) for each in found.pop("answers", None) or []]
        return Result(answers=answers, **{name: value for name, value in found.items() if value is not None})


@dataclass(frozen=True, slots=True)
class ProgramClient:
    """Runs each plan in a process of its own."""

    command: tuple[str, ...]
    compressions: tuple[str, ...] = ("gzip",)

    def start(self, plan: Plan) -> Program:
        return Program(
            subprocess.Popen(
                [*self.command, plan.text(DESCRIPTORS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )


def go_client() -> ProgramClient:
    """grpc-go."""
    folder = built("go", [*GO_BUILD, "-o", "{out}/probe", "."], needs="go")
    return ProgramClient((str(folder / "probe"),))


def go_tool(name: str) -> Path:
    """The program of `probes/NAME`, which has only a go.mod with it as a tool."""
    return built(name, [*GO_BUILD, "-o", "{out}/", "tool"], needs="go") / name


def node_client() -> ProgramClient:
    """@grpc/grpc-js."""
    install = "npm install --no-package-lock --no-audit --no-fund --prefix {out}"
    folder = built("node", ["sh", "-c", f"cp * {{out}} && {install}"], needs="npm")
    return ProgramClient(("node", str(folder / "probe.js")), ("gzip", "deflate"))


def java_client() -> ProgramClient:
    """grpc-java with Netty."""
    folder = built("java", ["mvn", "--batch-mode", "--quiet", "package", "-Dout={out}"], needs="mvn")
    return ProgramClient(("java", "-Xmx2g", "-cp", f"{folder}/*", "Probe"))


CI_CLIENTS = (*PYTHON_CLIENTS, "go")
INTEROP_CLIENTS = ("node", "java")
GRPC_CLIENTS = (*CI_CLIENTS, *INTEROP_CLIENTS)


def make_client(name: str) -> Client:
    """A client by name; Unavailable where it cannot be built."""
    match name:
        case "go":
            return go_client()
        case "node":
            return node_client()
        case "java":
            return java_client()
    return PYTHON_CLIENTS[name]
