"""The image, built by `make image` and run as a cluster runs it: its own user, a read-only root, no capability."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from halimede import __version__
from support.image import REPOSITORY_ROOT, Container, Image, Unavailable, built_image
from support.models import add_simple
from support.server import LOOPBACK, wait_until

# The first build on a machine fetches its programs, a base and all packages: a minute and a half on an idle one.
pytestmark = pytest.mark.timeout(900)

COMPRESSED_LIMIT_BYTES = 300_000_000
TOOLS = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|cpp|clang|as|ld|make|pip|pip3)([-.\d].*)?")


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """The image of one kind, `cpu` where a test does not say."""
    try:
        with built_image(getattr(request, "param", "cpu")) as built:
            yield built
    except Unavailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"the image is not tested: {reason}")
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\nTHE IMAGE IS NOT TESTED: {reason}")
        pytest.skip(str(reason))


@pytest.fixture
def container(image: Image, tmp_path: Path) -> Iterator[Container]:
    add_simple(tmp_path / "models")
    made = Container(image, tmp_path, tmp_path / "models")
    yield made
    made.remove()


def test_the_image_says_how_it_is_run(image: Image) -> None:
    config = image.config
    assert config["User"] == "65532:65532"
    assert set(config["ExposedPorts"]) == {"8000/tcp", "8001/tcp", "8002/tcp"}
    assert config["StopSignal"] == "SIGTERM"
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert sorted(name for name, _, _ in (entry.partition("=") for entry in config["Env"])) == [
        "ORT_DISABLE_TELEMETRY",
        "PATH",
        "PYTHONDONTWRITEBYTECODE",
    ]


def test_flags_alone_serve_on_tritons_ports_until_sigterm(container: Container) -> None:
    server = container.start("--model-repository=/models", private_network=True)
    assert server.ports == {"HTTPService": 8000, "GRPCInferenceService": 8001, "Metrics Service": 8002}
    wait_until(lambda: container.health() == 0, "the health check to pass", server)

    status = container.execute("cat", "/proc/1/status").stdout
    assert re.search(r"^Uid:\t65532\t65532", status, re.MULTILINE)
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    assert container.execute("cat", "/proc/1/cmdline").stdout.split("\0")[0].endswith("/python")
    assert container.execute("touch", "/tmp/x", "/dev/x").returncode != 0
    assert server.stop() == 0, server.log
    assert "telemetry" not in server.log


def test_the_health_check_fails_until_the_models_serve(container: Container) -> None:
    server = container.start("--model-repository=/models", "--model-control-mode=explicit", "--load-model=nobody",
                             "--exit-on-error=false", private_network=True)  # fmt: skip
    wait_until(lambda: "nobody" in server.log, "the load to fail", server)
    assert container.health() == 1
    assert server.stop() == 0, server.log


def test_tritons_command_line_serves_tritons_clients(container: Container) -> None:
    server = container.start("tritonserver", "--model-repository=/models", *LOOPBACK)
    one, two = np.arange(16, dtype=np.int32)[None], np.full((1, 16), 3, np.int32)
    for protocol, url in ((tritonclient.http, server.http_url), (tritonclient.grpc, server.grpc_url)):
        inputs = [protocol.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        for each, value in zip(inputs, (one, two), strict=True):
            each.set_data_from_numpy(value)
        with protocol.InferenceServerClient(url) as client:
            assert client.is_server_ready()
            result = client.infer("simple", inputs)
        assert np.array_equal(result.as_numpy("OUTPUT0"), one + two)
        assert np.array_equal(result.as_numpy("OUTPUT1"), one - two)
    assert re.search(r'^nv_inference_request_success\{model="simple",version="1"\} 2$', server.metrics(), re.MULTILINE)
    assert server.stop() == 0, server.log


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["halimede", "--version"], 0, f"halimede {__version__}\n"),
        (["python", "-c", "import halimede; print(halimede.__version__)"], 0, f"{__version__}\n"),
        (["--help"], 0, "--model-repository"),
        (["tritonserver", "--help"], 0, "--model-repository"),
        ([], 2, "--model-repository must be specified"),
    ],
    ids=["halimede", "any command", "flags", "tritonserver", "nothing"],
)
def test_what_stands_behind_the_images_name_is_run(
    container: Container, arguments: list[str], code: int, said: str
) -> None:
    done = container.run(*arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def test_nothing_in_it_builds_programs_or_gives_rights(image: Image) -> None:
    tools, rights = [], []
    for directory, _, names in os.walk(image.root):
        for name in names:
            path = Path(directory, name)
            if path.is_symlink() or not path.is_file():
                continue
            mode = path.stat().st_mode
            if mode & stat.S_IXUSR and path.parent.name in {"bin", "sbin"} and TOOLS.fullmatch(name):
                tools.append(path)
            if mode & (stat.S_ISUID | stat.S_ISGID):
                rights.append(path)
    assert tools == []
    assert rights == []
    for kept in ("var/lib/apt/lists", "var/cache/apt", "root/.cache", "wheels", "build"):
        assert list((image.root / kept).glob("*")) == []


def test_a_start_compiles_nothing(container: Container) -> None:
    done = container.run("python", "-v", "-c", "import halimede.app, numpy, onnxruntime, grpc")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^# code object from '/opt/.*\.pyc'$", done.stderr, re.MULTILINE)
    assert re.findall(r"^# code object from '.*\.py'$", done.stderr, re.MULTILINE) == []


def test_what_is_installed_is_what_the_lock_pins(image: Image) -> None:
    pins = set(re.findall(r"^([a-z0-9-]+==[^ ;]+)", (REPOSITORY_ROOT / "requirements.lock").read_text(), re.MULTILINE))
    packages = (image.root / "opt/halimede/lib").glob("python3.*/site-packages/*.dist-info")
    installed = {re.sub("[-_.]+", "-", name).lower() + "==" + version
                 for name, version in (package.stem.split("-") for package in packages)}  # fmt: skip
    assert f"halimede=={__version__}" in installed
    assert any(pin.startswith("onnxruntime==") for pin in installed)
    assert installed - pins == {f"halimede=={__version__}"}


def test_the_download_is_small(image: Image) -> None:
    assert image.compressed_bytes() < COMPRESSED_LIMIT_BYTES


# Two gigabytes of NVIDIA's libraries: four minutes to fetch and build.
@pytest.mark.load
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("image", ["gpu"], indirect=True)
def test_the_gpu_image_has_cudas_libraries_and_serves_without_a_gpu(container: Container) -> None:
    done = container.run(
        "python", "-c", "import onnxruntime as o; o.preload_dlls(); print(o.get_available_providers())"
    )
    assert "CUDAExecutionProvider" in done.stdout
    assert "Failed to load" not in done.stdout + done.stderr
    server = container.start("--model-repository=/models", *LOOPBACK)
    assert server.stop() == 0, server.log
