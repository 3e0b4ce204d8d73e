"""The image, built by `make image` and run as in a cluster: its own user, a read-only root, no capabilities."""

import os
import re
import stat
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from halimede import __version__
from support.image import REPOSITORY_ROOT, Container, Image, check_serves_with, documented_mb
from support.models import add_simple
from support.served import add_python, infer, parameter
from support.server import LOOPBACK, wait_until

# The first build on a machine fetches programs, a base image and all packages: 90 s on an idle machine.
pytestmark = [pytest.mark.large, pytest.mark.timeout(900)]

COMPRESSED_LIMIT_BYTES = 300_000_000
TOOLS = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|cpp|clang|as|ld|make|pip|pip3)([-.\d].*)?")


EXTENDED = ["cpu", "numexpr"]
"""The image, and one built from it as on the page, with a package that needs NumPy instead of PyTorch."""


@pytest.mark.parametrize("image", EXTENDED, indirect=True)
def test_the_images_configuration(image: Image) -> None:
    config = image.config
    assert config["User"] == "65532:65532"
    assert set(config["ExposedPorts"]) == {"8000/tcp", "8001/tcp", "8002/tcp"}
    assert config["StopSignal"] == "SIGTERM"
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert sorted(name for name, _, _ in (entry.partition("=") for entry in config["Env"])) == [
        "HOME",
        "LANG",
        "ORT_DISABLE_TELEMETRY",
        "PATH",
        "PYTHONDONTWRITEBYTECODE",
        "USER",
    ]


def test_a_container_with_only_flags_serves_on_tritons_ports(container: Container) -> None:
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


def test_tritons_command_line_starts_the_server(container: Container) -> None:
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
    ("arguments", "code", "output"),
    [
        (["halimede", "--version"], 0, f"halimede {__version__}\n"),
        (["python", "-c", "import halimede; print(halimede.__version__)"], 0, f"{__version__}\n"),
        (["--help"], 0, "--model-repository"),
        (["tritonserver", "--help"], 0, "--model-repository"),
        (["/opt/tritonserver/bin/tritonserver", "--help"], 0, "--model-repository"),
        ([], 2, "--model-repository must be specified"),
    ],
    ids=["halimede", "any command", "flags", "tritonserver", "the path of Triton's image", "nothing"],
)
def test_arguments_of_docker_run(container: Container, arguments: list[str], code: int, output: str) -> None:
    done = container.run(*arguments)
    assert done.returncode == code, done.stderr
    assert output in done.stdout + done.stderr


@pytest.mark.parametrize("image", EXTENDED, indirect=True)
def test_the_image_has_no_build_tools_and_no_setuid_files(image: Image) -> None:
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
    done = container.run("python", "-v", "-c", "import halimede.app, numpy, onnxruntime, hpack")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^# code object from '/opt/.*\.pyc'$", done.stderr, re.MULTILINE)
    assert re.findall(r"^# code object from '.*\.py'$", done.stderr, re.MULTILINE) == []


@pytest.mark.parametrize("image", EXTENDED, indirect=True)
def test_installed_packages_are_those_of_the_lock(image: Image) -> None:
    lock = (REPOSITORY_ROOT / "requirements.lock").read_text()
    pins = set(re.findall(r"^([a-z0-9-]+==[^ ;]+)", re.sub(r"(?m)^([a-z0-9-]+)\[.+?\]", r"\1", lock), re.MULTILINE))
    packages = (image.root / "opt/halimede/lib").glob("python3.*/site-packages/*.dist-info")
    installed = {re.sub("[-_.]+", "-", name).lower() + "==" + version
                 for name, version in (package.stem.split("-") for package in packages)}  # fmt: skip
    assert f"halimede=={__version__}" in installed
    assert any(pin.startswith("onnxruntime==") for pin in installed)
    added = {pin for pin in installed if pin.startswith("numexpr==")}
    assert bool(added) == image.name.endswith("numexpr")
    assert installed - pins - added == {f"halimede=={__version__}"}


def test_the_images_size_is_small_and_as_documented(image: Image) -> None:
    size = image.compressed_bytes()
    assert size < COMPRESSED_LIMIT_BYTES
    assert size / 1e6 == pytest.approx(documented_mb()["cpu"], rel=0.05)


LOCALE = """
        def initialize(self, args):
            import locale
            self.names = []
            for name in ("", "en_US.UTF-8"):
                locale.setlocale(locale.LC_ALL, name)
                self.names.append(f"{name} {locale.nl_langinfo(locale.CODESET)} {locale.format_string('%d', 1000, True)}")
            locale.setlocale(locale.LC_ALL, "C.UTF-8")
"""


def test_models_find_utf_8_and_the_locale_en_us(container: Container) -> None:
    add_python(container.models, "text", methods=LOCALE, datatype="BYTES", execute="""
        names = np.array(self.names, object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", names[None])]) for _ in requests]
    """)  # fmt: skip
    server = container.start("--model-repository=/models", *LOOPBACK)
    answer = server.post("/v2/models/text/infer", {"inputs": [
        {"name": "IN", "shape": [1, 1], "datatype": "BYTES", "data": ["é"]}
    ]})  # fmt: skip
    assert answer.json["outputs"][0]["data"] == [" UTF-8 1000", "en_US.UTF-8 UTF-8 1,000"]
    assert server.stop() == 0, server.log
    # The server process, in which models on threads run.
    set_locale = "import halimede.app, locale; print(locale.setlocale(locale.LC_ALL, 'en_US.UTF-8'))"
    assert container.run("python", "-c", set_locale).stdout == "en_US.UTF-8\n"


def test_errors_name_files_that_the_user_may_not_read(container: Container) -> None:
    add_simple(container.models, "closed")
    file = container.models / "closed/1/model.onnx"
    file.chmod(0o600)
    server = container.start("--model-repository=/models", "--exit-on-error=false", private_network=True)
    expected = (
        "permission denied: '/models/closed/1/model.onnx' belongs to user 0 and group 0 and has mode 600; the server runs as "
        "user 65532, groups 65532; run `chmod o+r /models/closed/1/model.onnx`, or run the server as user 0"
    )
    wait_until(lambda: expected in server.log, "the error", server)
    assert container.health() == 1
    assert server.stop() == 0, server.log


CACHES = """
        def initialize(self, args):
            import getpass, pathlib, tempfile
            tempfile.NamedTemporaryFile().close()
            cache = pathlib.Path.home() / ".cache/library" / getpass.getuser()
            cache.mkdir(parents=True)
            print("cache in", cache)
"""


def test_models_may_write_to_tmp_under_any_user(image: Image, tmp_path: Path) -> None:
    add_python(tmp_path / "models", "writes", methods=CACHES)
    container = Container(image, tmp_path, tmp_path / "models", user="1000680000:0", tmp="exec")
    try:
        server = container.start("--model-repository=/models", *LOOPBACK)
        assert infer(server, "writes", 2) == (200, [2])
        wait_until(lambda: "cache in /tmp/.cache/library/halimede" in server.log, "what the model prints", server)
        assert server.stop() == 0, server.log
    finally:
        container.remove()


def test_an_environment_unpacked_on_a_noexec_mount_is_an_error(image: Image, tmp_path: Path) -> None:
    """Docker mounts tmpfs with noexec by default."""
    extra = parameter("EXECUTION_ENV_PATH", "/models/packed/env.tar.gz")
    add_python(tmp_path / "models", "packed", extra=extra)
    with tarfile.open(tmp_path / "models/packed/env.tar.gz", "w:gz") as archive:
        archive.add(os.path.realpath("/bin/true"), "bin/python3")
    container = Container(image, tmp_path, tmp_path / "models", tmp="noexec")
    try:
        server = container.start("--model-repository=/models", "--exit-on-error=false", private_network=True)
        wait_until(lambda: "is on a file system that is mounted noexec" in server.log, "the error", server)
        assert server.stop() == 0, server.log
    finally:
        container.remove()


def test_a_model_without_a_writable_folder_gets_an_error_with_the_path(container: Container) -> None:
    add_python(container.models, "writes", methods=CACHES)
    server = container.start("--model-repository=/models", "--exit-on-error=false", private_network=True)
    wait_until(lambda: "No usable temporary directory found in ['/tmp'" in server.log, "the error", server)
    assert server.stop() == 0, server.log


@pytest.mark.parametrize("image", ["numexpr"], indirect=True)
def test_a_dockerfile_adds_packages(container: Container) -> None:
    check_serves_with(container, "import numexpr", """
        array = pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", numexpr.evaluate("2 * array + 1"))])]
    """)  # fmt: skip
