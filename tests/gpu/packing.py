"""Packs what the tests on a GPU need of Python packages, for a machine without network: `make gpu-pack`.

The machine has PyTorch, ONNX Runtime, CuPy, numpy and NVIDIA's libraries. The pack has the project's wheel, and wheels of
what else the tests import, in the versions and with the hashes of requirements.lock.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.environment import name, requirements

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "gpu-pack"
STAND_IN = ROOT / "build" / "gpu-stand-in"
PROJECT = "halimede"
ROOTS = (PROJECT, "hypothesis", "onnx", "psutil", "pytest", "pytest-timeout", "pytest-xdist")
"""What the product and the tests on a GPU import."""

STAND_INS = ("numpy", "onnxruntime")
"""Of the packages that the machine has, those that are small enough for a dry run."""

TARGET = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "os_name": "posix"}
"""The machine, as markers of requirements see it."""
TARGET_TAGS = ["--python-version=3.12", "--implementation=cp", "--only-binary=:all:"]
# glibc 2.34 is that of distributions from 2021 on.
TARGET_TAGS += [f"--platform=manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 26, 24, 17, 12, 5)]
TARGET_TAGS += [f"--platform=manylinux{year}_x86_64" for year in (2014, 2010, 1)]

THERE = re.compile(r"torch|triton|cupy(-.*)?|numpy|onnxruntime(-.*)?|tensorrt(-.*)?|cuda-.*|nvidia-(?!ml-py$).*")
"""Packages that are never packed: the machine has them, or does without. nvidia-ml-py, which is small, is packed."""

MOST_BYTES = 64 << 20
"""Of the pack and the working tree together: this much can be copied to the machine."""


class PackError(Exception):
    """The pack cannot be made, or is too large."""


@dataclass(frozen=True, slots=True)
class Size:
    pack_bytes: int
    tree_bytes: int

    def check(self) -> str:
        """The sizes as text. PackError if they are beyond the limit."""
        mib = [f"{size / (1 << 20):.1f}" for size in (self.pack_bytes, self.tree_bytes)]
        text = f"{mib[0]} MiB of wheels and {mib[1]} MiB of the working tree; {MOST_BYTES >> 20} MiB is the most"
        if self.pack_bytes + self.tree_bytes > MOST_BYTES:
            raise PackError(f"the pack is too large: {text}")
        return text


def needed(
    roots: Iterable[str], requires_of: Callable[[str], Sequence[str]], there: re.Pattern[str] = THERE
) -> frozenset[str]:
    """The names of all packages that the roots need on the target, without those that are `there`.

    `requires_of` has the requirements of a package, as its metadata writes them.
    """
    found: set[str] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        each = waiting.pop()
        key = canonicalize_name(each.name)
        if key in found or there.fullmatch(key):
            continue
        found.add(key)
        for text in requires_of(key):
            child = Requirement(text)
            # An extra is chosen by nobody here.
            if child.marker is None or child.marker.evaluate({**TARGET, "extra": ""}):
                waiting.append(child)
    return frozenset(found)


def pins(lock: str, names: frozenset[str]) -> str:
    """The lines of the lock for these packages on the target, with their hashes. PackError if one is missing.

    Without their markers: pip evaluates them for the Python that runs it, whatever Python it downloads for.
    """
    lines = {name(each): line for each in requirements(lock) for line in _on_target(each)}
    if missing := sorted(names - lines.keys()):
        raise PackError(f"requirements.lock does not have {', '.join(missing)}")
    return "".join(lines[each] for each in sorted(names))


def _on_target(requirement: str) -> Iterator[str]:
    """Of the lines of a package, one for each version, those whose marker fits."""
    for line in re.findall(r"^[a-z0-9].*\n(?:[ \t]+.*\n)*", requirement, re.MULTILINE):
        pin, marker, hashes = re.fullmatch(r"([^;\\]*)(?:;([^\\]*))?(\\.*)", line, re.DOTALL).groups()
        if marker is None or Marker(marker.strip()).evaluate(dict(TARGET)):
            yield f"{pin}{hashes}"


def pack(say: Callable[[str], None]) -> Size:
    """Make the pack anew. PackError. Needs the network, or pip's cache of the same wheels."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    names = needed(ROOTS, _installed) - {PROJECT}
    say(f"Packing {len(names)} packages and the project into {FOLDER.relative_to(ROOT)}")
    _download(names, FOLDER)
    _run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(FOLDER)], "")
    return Size(sum(file.stat().st_size for file in FOLDER.iterdir()), _tree_bytes())


def pack_stand_in() -> None:
    """Download some packages that the machine has, for a Python that has none: a dry run of the pack uses them."""
    packed = needed(ROOTS, _installed)
    shutil.rmtree(STAND_IN, ignore_errors=True)
    STAND_IN.mkdir(parents=True)
    _download(needed(STAND_INS, _installed, re.compile("|".join(packed))), STAND_IN)


def _download(names: frozenset[str], folder: Path) -> None:
    lines = pins((ROOT / "requirements.lock").read_text(), names)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    into = ["--no-deps", f"--dest={folder}"]
    _run([*pip, *into, *TARGET_TAGS, "--require-hashes", "--requirement=/dev/stdin"], lines)


def _installed(package: str) -> Sequence[str]:
    try:
        return requires(package) or ()
    except PackageNotFoundError as error:
        raise PackError(f"{package} is not installed here: run `make .venv` first") from error


def _run(command: Sequence[str], given: str) -> None:
    done = subprocess.run(command, input=given, text=True, capture_output=True, check=False, cwd=ROOT)
    if done.returncode:
        raise PackError(f"`{command[2]} {command[3]} ...` failed: {done.stdout}{done.stderr}")


def _tree_bytes() -> int:
    """Of the files that git would copy: tracked ones, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    files: Mapping[Path, None] = dict.fromkeys(ROOT / each for each in listed.split("\0") if each)
    return sum(file.lstat().st_size for file in files if file.is_file())
