"""h2spec, the conformance tests of HTTP/2: built once from its Go module, and its runs."""

import hashlib
import os
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from support.phases import only_one, phase

TOOLS = Path(__file__).parent / "go"
PROGRAM = "github.com/summerwind/h2spec/cmd/h2spec"
BUILD_LIMIT_S = 600
RUN_LIMIT_S = 300
CASE_LIMIT_S = 5
"""A case that passes takes milliseconds. A busy machine must not fail one."""

# Debugging information costs a tenth of the build, collecting garbage a quarter.
BUILD_ENVIRONMENT = {"CGO_ENABLED": "0", "GOGC": "off", "GOMEMLIMIT": "1GiB"}
BUILD_FLAGS = ("-mod=readonly", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", "-ldflags=-s -w")


class Unavailable(Exception):
    """This machine cannot build h2spec; the message has the reason."""


@dataclass(frozen=True)
class Report:
    """The titles of the cases that ran, each with the section of its specification; `failed` has the causes, too."""

    ran: list[str]
    failed: dict[str, str]


def provide_h2spec() -> Path:
    """The program, from the cache if it was built before; Unavailable where it cannot be built."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halimede" / "h2spec"
    folder.mkdir(parents=True, exist_ok=True)
    versions = b"\0".join((TOOLS / name).read_bytes() for name in ("go.mod", "go.sum"))
    program = folder / hashlib.sha256(versions).hexdigest()[:16] / "h2spec"
    with only_one(program.parent.with_suffix(".lock"), "h2spec"):
        if not program.exists():
            _build(program)
    return program


def _build(program: Path) -> None:
    if shutil.which("go") is None:
        raise Unavailable("h2spec is built with Go, which is not installed")
    partial = program.with_suffix(".partial")
    partial.parent.mkdir(exist_ok=True)
    with phase("Building h2spec"):
        done = subprocess.run(
            ["nice", "go", "build", *BUILD_FLAGS, "-o", partial, PROGRAM],
            cwd=TOOLS,
            env={**os.environ, **BUILD_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILD_LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise Unavailable(f"h2spec could not be built: {done.stderr[-2000:]}")
    partial.rename(program)


def run_h2spec(program: Path, port: int, directory: Path, *flags: str) -> Report:
    """Run all cases, the strict ones too, against a port of this machine. `directory` is for its report."""
    report = directory / "h2spec.xml"
    command = [program, "--strict", "--port", str(port), "--timeout", str(CASE_LIMIT_S), "--junit-report", report]
    done = subprocess.run(
        [*command, *flags], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )
    assert report.exists(), f"h2spec made no report: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    ran: list[str] = []
    failed: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        title = f"{case.get('package')}: {case.get('classname')}"
        ran.append(title)
        # A child of any kind: a failure, an error, or that the case was skipped.
        for cause in case:
            failed[title] = f"{cause.tag}: {''.join(cause.itertext()).strip()}"
    return Report(ran, failed)
