"""Every command in the documents, run as a reader would run it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.models import add_onnx_identity
from support.server import wait_until

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "CONTRIBUTING.md", *sorted(PAGES.glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"(?:<!-- run by (?P<elsewhere>\S+) -->\n)?```sh\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
SERVER = re.compile(r"^(?:\S*/)?(?:halimede serve|tritonserver)\b", re.MULTILINE)
STARTED = "Started Metrics Service"
LIMIT_S = 300.0
"""Some commands import a large library, which takes a minute on a busy machine."""
INSTALLING = {"writing-a-backend.md"}
"""Documents that install packages."""
SITES = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}


@dataclass
class Reader:
    """A user with two terminals in a folder with a model file; servers run in the first one."""

    folder: Path
    programs: Path = Path(sys.executable).parent
    server: subprocess.Popen[bytes] | None = None

    def environment(self) -> dict[str, str]:
        # curl must fail on error statuses.
        path = f"{self.programs}:{os.environ['PATH']}"
        home = str(self.folder)
        return {**os.environ, **OFFLINE, "PATH": path, "CURL_HOME": home, "HOME": home}

    def run(self, text: str) -> None:
        command = ["bash", "-euo", "pipefail", "-c", text]
        if SERVER.search(text) is None:
            done = subprocess.run(
                command, cwd=self.folder, env=self.environment(), capture_output=True, timeout=LIMIT_S, check=False
            )
            assert done.returncode == 0, f"{text}\n{done.stdout.decode()}\n{done.stderr.decode()}\n{self.log()}"
            return
        self.stop()
        with (self.folder / "server.log").open("wb") as log:
            # In a new session, so that a signal reaches the server behind the shell.
            self.server = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(), stdout=log, stderr=log, start_new_session=True
            )
        server = self.server
        wait_until(
            lambda: STARTED in self.log() or server.poll() is not None, f"the server of\n{text}", limit_s=LIMIT_S
        )
        assert server.poll() is None, f"{text}\n{self.log()}"

    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self) -> None:
        if self.server is None:
            return
        server, self.server = self.server, None
        try:
            os.killpg(server.pid, signal.SIGTERM)
            assert server.wait(30) == 0, self.log()
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


# A build without an environment of its own needs no download.
OFFLINE = {"PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def make_environment(folder: Path) -> Path:
    """The programs of an environment with Halimede, into which a reader can install packages: what is installed there
    does not reach this environment, whose packages it sees."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / "halimede-env"], check=True, timeout=LIMIT_S
    )
    (site,) = (folder / "halimede-env" / "lib").glob("python*/site-packages")
    shared = "".join(f"import site; site.addsitedir({path!r})\n" for path in map(str, SITES))
    (site / "shared.pth").write_text(shared)
    programs = folder / "halimede-env" / "bin"
    for name in ("pip", "halimede"):
        (programs / name).write_text(f'#!/bin/sh\nexec "{programs}/python" -m {name} "$@"\n')
        (programs / name).chmod(0o755)
    return programs


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    add_onnx_identity(tmp_path / "models", "resnet", "FP32", ["N", 4])
    shutil.copy(tmp_path / "models" / "resnet" / "1" / "model.onnx", tmp_path)
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    someone = Reader(tmp_path)
    yield someone
    if someone.server is not None:
        os.killpg(someone.server.pid, signal.SIGKILL)
        someone.server.wait()


@pytest.mark.large
@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_works(document: Path, reader: Reader) -> None:
    if document.name in INSTALLING:
        reader.programs = make_environment(reader.folder)
    blocks = list(BLOCK.finditer(document.read_text()))
    for block in blocks:
        if block["elsewhere"]:
            assert (ROOT / block["elsewhere"]).is_file(), block["elsewhere"]
        else:
            reader.run(block["text"])
    reader.stop()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_command_hides_in_a_block_without_a_language(document: Path) -> None:
    text = document.read_text()
    opened = re.findall(r"^```(\w*)$", text, re.MULTILINE)[::2]
    # Commands that need a cluster are `console`, only in the pages on Kubernetes.
    elsewhere = {"console"} if document.name.startswith(("autoscaling", "kubernetes")) else set()
    assert set(opened) <= {"sh", "text", "json", "yaml", "protobuf", "dockerfile"} | elsewhere, opened


@pytest.mark.parametrize("overview", [ROOT / "README.md", PAGES / "index.md"], ids=lambda path: path.name)
def test_the_overviews_link_every_page(overview: Path) -> None:
    linked = {(overview.parent / target).resolve() for target in LINK.findall(overview.read_text())}
    assert {path.name for path in PAGES.glob("*.md")} - {"index.md"} <= {path.name for path in linked}
    assert overview.parent == PAGES or (PAGES / "index.md") in linked


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target
