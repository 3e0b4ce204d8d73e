"""Runs of h2spec, the conformance tests of HTTP/2."""

import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

RUN_LIMIT_S = 300
CASE_LIMIT_S = 5
"""A case that passes takes milliseconds. A busy machine must not fail one."""


@dataclass(frozen=True)
class Report:
    """The titles of the cases that ran, each with the section of its specification; `failed` has the causes, too."""

    ran: list[str]
    failed: dict[str, str]


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
