"""Packages of the running environment for other environments, so that tests need no network."""

import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(name: str, *extras: str) -> set[str]:
    """The direct and indirect dependencies of a package with these extras, from the metadata of the installed packages."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(name, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for requirement in map(Requirement, metadata.requires(name) or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, each) for each in ("", *requirement.extras)]
                found.add(canonicalize_name(requirement.name))
    return found


def repack(name: str, into: Path) -> None:
    """Rebuild the wheel of an installed package."""
    package = metadata.distribution(name)
    tags = [
        line.removeprefix("Tag: ").split("-")
        for line in (package.read_text("WHEEL") or "").splitlines()
        if "Tag: " in line
    ]
    python, abi, platform = (".".join(dict.fromkeys(column)) for column in zip(*tags, strict=True))
    wheel = into / f"{name.replace('-', '_')}-{package.version}-{python}-{abi}-{platform}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in package.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                archive.write(str(file.locate()), str(file))


def link(name: str, site: Path) -> None:
    """Install a package into `site`, a folder site-packages of the same Python, by links to its files."""
    for file in metadata.distribution(name).files or ():
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        source, target = Path(str(file.locate())), site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
        # Without the compiled files a large framework is compiled again, for half a minute.
        compiled, its_own = source.parent / "__pycache__", target.parent / "__pycache__"
        if file.suffix == ".py" and target.parent != site and compiled.is_dir() and not its_own.exists():
            its_own.symlink_to(compiled)
