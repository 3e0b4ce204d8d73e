"""Installs the packages of a lock into an environment: `python tests/support/environment.py FOLDER LOCK SIZE`.

It makes the environment, of the Python that runs this, unless it exists. uv installs where it is there, pip elsewhere.
Packages are installed in steps with a line each, because the first installation takes minutes.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

PER_STEP = 10
TELL_EVERY_S = 30.0


def requirements(lock: str) -> list[str]:
    """The lines of each package: requirements with their hashes, several where versions of Python need different ones."""
    lines = re.findall(r"^[a-z0-9].*\n(?:[ \t]+.*\n)*", lock, re.MULTILINE)
    return ["".join(same) for _, same in groupby(lines, key=name)]


def name(requirement: str) -> str:
    return re.split(r"[=\[ ]", requirement, maxsplit=1)[0]


def make(folder: Path) -> list[str]:
    """Make the environment unless it exists; returns the command that installs into it."""
    python = str(folder / "bin/python")
    if uv := shutil.which("uv"):
        if not Path(python).exists():
            subprocess.run([uv, "venv", "--quiet", "--seed", "--python", sys.executable, folder], check=True)
        return [uv, "pip", "install", "--quiet", "--python", python]
    pip = [python, "-m", "pip"]
    if not Path(python).exists() or subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
        if find_spec("ensurepip") is None:
            add_ensurepip()
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    # Files are compiled when they are first imported: most never are.
    return [*pip, "install", "--quiet", "--disable-pip-version-check", "--no-compile"]


def add_ensurepip() -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"{sys.executable} cannot make virtual environments: install the package python3-venv")
    print("Installing python3-venv, which this Python lacks", flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "python3-venv"]):
        subprocess.run(["apt-get", *command], env=environment, check=True)


def main(folder: Path, lock: Path, size: str) -> None:
    found = requirements(lock.read_text())
    begun = time.monotonic()
    print(f"Installing {len(found)} packages into {folder}: {size}", flush=True)
    install = make(folder)
    for done in range(0, len(found), PER_STEP):
        step = found[done : done + PER_STEP]
        report(begun, f"{done} of {len(found)}: {name(step[0])} to {name(step[-1])}")
        # The lock is complete: to follow dependencies would only take time.
        command = [*install, "--no-deps", "--require-hashes", "-r", "/dev/stdin"]
        run_step(command, "".join(step), begun)
    report(begun, "Halimede itself")
    subprocess.run([*install, "--no-deps", "-e", "."], check=True)
    report(begun, "done")


def run_step(command: list[str], given: str, begun: float, tell_every_s: float = TELL_EVERY_S) -> None:
    """Run a command with `given` on its standard input, and say now and then that it is still busy."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
        remaining: str | None = given
        while True:
            try:
                process.communicate(remaining, timeout=tell_every_s)
                break
            except subprocess.TimeoutExpired:
                # What was given is not given again.
                remaining = None
                report(begun, "... still downloading or unpacking these")
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def report(begun: float, text: str) -> None:
    print(f"{time.monotonic() - begun:4.0f} s  {text}", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
