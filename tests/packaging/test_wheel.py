"""Wheel and source distribution: build, content, installation into a fresh environment, run."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from halimede import __version__
from support.models import add_simple
from support.server import LOOPBACK, start_command
from support.wheels import needed, repack

REPOSITORY_ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.large

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def run(*command: str | Path, cwd: Path = REPOSITORY_ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", into, cwd=source)
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", REPOSITORY_ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", REPOSITORY_ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for name in needed("halimede", "onnx"):
        repack(name, folder)
    return folder


@pytest.fixture(scope="module")
def fresh(wheel: Path, wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with only `pip install 'halimede[onnx]'`."""
    environment = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    install = (*PIP, "--python", environment / "bin" / "python", "install", "--quiet", "--no-index")
    run(*install, "--find-links", wheelhouse, f"halimede[onnx] @ {wheel.as_uri()}")
    return environment / "bin"


def test_the_wheel_has_the_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.name == f"halimede-{__version__}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} == {
        "halimede",
        "halimede_operator",
        "halimede_spec",
        f"halimede-{__version__}.dist-info",
    }
    assert {"halimede/py.typed", "halimede/core/wire/protocol/descriptors.binpb"} <= names
    demo = "halimede/demo/models"
    assert {
        f"{demo}/{model}/{file}" for model in ("photos", "sketch") for file in ("config.pbtxt", "1/model.py")
    } <= names
    assert not any("__pycache__" in name or "/tests/" in name for name in names)


def test_the_metadata_of_the_wheel(wheel: Path) -> None:
    information = f"halimede-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        fields = HeaderParser().parsestr(archive.read(f"{information}/METADATA").decode())
        licence = archive.read(f"{information}/licenses/LICENSE").decode()
    assert (fields["Name"], fields["Version"]) == ("halimede", __version__)
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["License-Expression"] == "Apache-2.0"
    assert "Apache License" in licence
    assert {"onnx", "gpu"} <= set(fields.get_all("Provides-Extra", []))
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields.get_payload().startswith("# Halimede")


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = build("wheel", source, tmp_path / "again")
    assert again.read_bytes() == wheel.read_bytes()
    for name in (
        "tests/support/server.py",
        "Makefile",
        "requirements.lock",
        "requirements-demo.lock",
        "Dockerfile.server",
        "server/gpu.lock",
    ):
        assert (source / name).is_file(), name


def test_a_fresh_environment_has_the_commands(fresh: Path) -> None:
    assert run(fresh / "halimede", "--version") == f"halimede {__version__}\n"
    assert run(fresh / "python", "-m", "halimede", "--version") == f"halimede {__version__}\n"
    assert "--model-repository" in run(fresh / "tritonserver", "--help")


def test_a_fresh_environment_has_all_dependencies(fresh: Path) -> None:
    run(*PIP, "--python", fresh / "python", "check")


def test_a_fresh_environment_serves_a_model_over_http_and_grpc_without_grpcio(fresh: Path, tmp_path: Path) -> None:
    assert run(fresh / "python", "-c", "from importlib.util import find_spec; print(find_spec('grpc'))") == "None\n"
    add_simple(tmp_path / "models")
    server = start_command(
        tmp_path, [str(fresh / "tritonserver"), f"--model-repository={tmp_path / 'models'}", *LOOPBACK]
    )
    try:
        value = np.arange(16, dtype=np.int32)[None]
        for library, url in ((tritonclient.http, server.http_url), (tritonclient.grpc, server.grpc_url)):
            inputs = [library.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
            for each in inputs:
                each.set_data_from_numpy(value)
            with library.InferenceServerClient(url) as client:
                result = client.infer("simple", inputs)
            assert np.array_equal(result.as_numpy("OUTPUT0"), 2 * value)
        assert server.stop() == 0, server.log
    finally:
        server.kill()
