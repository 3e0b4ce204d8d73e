"""Every command of the documents, run in the order of each document as a reader does: from an empty folder, in an
environment that has Halimede with one extra and nothing else."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import perf_analyzer
from support.documents import DOCUMENTS, ROOT, RUN, Block, blocks
from support.reader import LIMIT_S, Reader
from support.wheels import link, needed, repack

pytestmark = [pytest.mark.large, pytest.mark.timeout(900)]

EXTRAS = {
    "backend-openvino.md": "openvino",
    "backend-pytorch.md": "torch",
    "backend-tensorflow.md": "tensorflow",
    "backend-trees.md": "trees",
}
"""What a reader of the document has installed; `onnx` for all others."""
FROM_A_CLONE = {"README.md", "install.md", "quickstart.md"}
"""Documents that begin in a clone, without an environment."""
CLONED = ("pyproject.toml", "README.md", "LICENSE", "server", "operator")
"""What an installation from a clone reads."""
INSTALLED = {"halimede": ("onnx",), "hatchling": (), "onnx": (), "tritonclient": ("grpc", "http")}
"""Packages, with their extras, that the documents install or that build Halimede: pip finds them without a network."""
WITH_COMMANDS = [path for path in DOCUMENTS if any(each.language in RUN and not each.mark for each in blocks(path))]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pip may install."""
    folder = tmp_path_factory.mktemp("wheels")
    names = set(INSTALLED).union(*(needed(name, *extras) for name, extras in INSTALLED.items()))
    for name in names - {"halimede"}:
        repack(name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Halimede's own."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_S)
    [made] = folder.iterdir()
    return made


@pytest.fixture
def reader(tmp_path: Path, wheels: Path) -> Iterator[Reader]:
    """A reader in an empty folder, with nothing but Python."""
    programs, work, home = (tmp_path / name for name in ("programs", "work", "home"))
    for folder in (programs, work, home):
        folder.mkdir()
    (programs / "python3").symlink_to(Path(sys.executable).resolve())
    (home / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    someone = Reader(
        work,
        home,
        {
            "PATH": f"{programs}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        },
    )
    yield someone
    someone.leave()


def install(reader: Reader, wheel: Path, extra: str) -> None:
    """Give the reader the environment of the page Install. Its packages are links: a framework has gigabytes."""
    environment = reader.home / "halimede-env"
    reader.enter(Block("sh", "python3 -m venv --without-pip ~/halimede-env\n. ~/halimede-env/bin/activate\n"))
    [site] = environment.glob("lib/python*/site-packages")
    for name in needed("halimede", extra) | {"pip"}:
        link(name, site)
    (environment / "bin/pip").write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    (environment / "bin/pip").chmod(0o755)
    # pip refuses if a dependency is not there.
    reader.enter(Block("sh", f"pip install '{wheel}[{extra}]'\n"))


def install_perf_analyzer(home: Path) -> None:
    """What the page on tuning installs. It measures for a short time: a busy machine has no stable results."""
    libraries = home / "perf-env/lib/python3/site-packages/nvidia/cuda_runtime/lib"
    libraries.mkdir(parents=True)
    for file in perf_analyzer.fetch().iterdir():
        (libraries / file.name).symlink_to(file)
    program = home / "perf-env/bin/perf_analyzer"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {libraries}/perf_analyzer "$@" -p 100 -r 10 -s 900\n')
    program.chmod(0o755)


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: path.name)
def test_every_command_works(document: Path, reader: Reader, wheel: Path) -> None:
    if document.name in FROM_A_CLONE:
        for name in CLONED:
            of_tree = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            of_tree(ROOT / name, reader.work / name)
    else:
        if "perf-env" in document.read_text():
            install_perf_analyzer(reader.home)
        install(reader, wheel, EXTRAS.get(document.name, "onnx"))
    for block in blocks(document):
        if block.language in RUN and not block.mark:
            reader.enter(block)
    reader.stop()
