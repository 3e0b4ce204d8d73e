"""Command-line tools for gRPC against the running server: grpcurl, which needs reflection, and ghz, a load generator."""

import base64
import json
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import support.server
from support.grpc_models import write_models
from support.probe import go_tool, provided
from support.server import RunningServer, serving

# Without fixtures: the first run builds the tools.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(120, func_only=True)]

PKI = Path(support.server.__file__).parent / "pki"
TLS = (f"--grpc-server-cert={PKI / 'server.pem'}", f"--grpc-server-key={PKI / 'server.key'}", "--grpc-use-ssl=true")
SERVICE = "inference.GRPCInferenceService"
METHODS = {
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer"),
    *("ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
}
RAW = base64.b64encode(struct.pack("<4f", 1, 2, 3, 4)).decode()


@pytest.fixture(scope="module", params=["plain", "tls"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("repository") / "models"
    models.mkdir()
    write_models(models)
    flags = [
        "--model-repository",
        models,
        "--grpc-header-forward-pattern=x-.*",
        *(TLS if request.param == "tls" else ()),
    ]
    with serving(tmp_path_factory.mktemp("log"), flags) as running:
        yield running
    assert "unexpected error" not in running.log


@pytest.fixture(scope="module")
def tool(request: pytest.FixtureRequest):
    """Runs a tool on the server; its exit code and its output."""
    programs = provided(request.config, lambda: {name: go_tool(name) for name in ("grpcurl", "ghz")})

    def run_tool(name: str, server: RunningServer, *arguments: str) -> tuple[int, str]:
        is_encrypted = "--grpc-use-ssl=true" in server.process.args  # type: ignore[operator]
        root = {"grpcurl": "-cacert", "ghz": "--cacert"}[name]
        plain = {"grpcurl": "-plaintext", "ghz": "--insecure"}[name]
        command = [programs[name], *([root, str(PKI / "root.pem")] if is_encrypted else [plain]), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL
        )
        return done.returncode, done.stdout + done.stderr

    return run_tool


def request(model: str = "ident", **parameters: int) -> dict[str, object]:
    return {
        "model_name": model,
        "id": "7",
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4]}],
        "raw_input_contents": [RAW],
        "parameters": {name: {"int64_param": value} for name, value in parameters.items()},
    }


def documents(output: str) -> list[dict]:
    """The JSON documents of an output, one after the other."""
    found, decoder = [], json.JSONDecoder()
    while output := output.lstrip():
        document, end = decoder.raw_decode(output)
        found.append(document)
        output = output[end:]
    return found


def address(server: RunningServer) -> str:
    return f"localhost:{server.grpc_port}"


def test_grpcurl_lists_services_and_methods(tool, server: RunningServer) -> None:
    code, output = tool("grpcurl", server, address(server), "list")
    assert code == 0, output
    assert {SERVICE, "grpc.health.v1.Health"} <= set(output.split())
    code, output = tool("grpcurl", server, address(server), "list", SERVICE)
    assert code == 0, output
    assert {f"{SERVICE}.{name}" for name in METHODS} <= set(output.split())


@pytest.mark.parametrize(
    "name", [SERVICE, f"{SERVICE}.ModelInfer", "inference.ModelInferRequest", "inference.ModelConfig"]
)
def test_grpcurl_describes(tool, server: RunningServer, name: str) -> None:
    code, output = tool("grpcurl", server, address(server), "describe", name)
    assert code == 0, output
    assert output.startswith(f"{name} is a")


def test_grpcurl_calls(tool, server: RunningServer) -> None:
    code, output = tool("grpcurl", server, "-d", json.dumps(request()), address(server), f"{SERVICE}/ModelInfer")
    assert code == 0, output
    (answer,) = documents(output)
    assert (answer["id"], answer["rawOutputContents"]) == ("7", [RAW])
    code, output = tool("grpcurl", server, address(server), "grpc.health.v1.Health/Check")
    assert (code, documents(output)) == (0, [{"status": "SERVING"}])


def test_grpcurl_sends_metadata(tool, server: RunningServer) -> None:
    headers = ("-H", "x-one: a b", "-H", "x-two-bin: AAE=", "-H", "other: 1")
    data = ("-d", json.dumps(request("mirror")))
    code, output = tool("grpcurl", server, *headers, *data, address(server), f"{SERVICE}/ModelInfer")
    assert code == 0, output
    assert documents(output)[0]["parameters"] == {"x-one": {"stringParam": "a b"}}


def test_grpcurl_streams(tool, server: RunningServer) -> None:
    data = "\n".join(json.dumps(request("repeat", count=3)) for _ in range(2))
    code, output = tool("grpcurl", server, "-d", data, address(server), f"{SERVICE}/ModelStreamInfer")
    assert code == 0, output
    answers = documents(output)
    assert [each["inferResponse"]["rawOutputContents"] for each in answers] == [[RAW]] * 6


def test_grpcurl_prints_errors(tool, server: RunningServer) -> None:
    data = ("-d", json.dumps(request("nope")))
    code, output = tool("grpcurl", server, *data, address(server), f"{SERVICE}/ModelInfer")
    assert code != 0
    assert "Code: NotFound" in output
    assert "Message: Request for unknown model: 'nope' is not found" in output


def test_grpcurl_cancels_at_its_deadline(tool, server: RunningServer) -> None:
    data = ("-max-time", "0.5", "-d", json.dumps(request("patient")))
    code, output = tool("grpcurl", server, *data, address(server), f"{SERVICE}/ModelInfer")
    assert code != 0
    assert "DeadlineExceeded" in output


@pytest.mark.parametrize("options", [(), ("-e",)], ids=["plain", "gzip"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_ghz_measures_without_errors(tool, server: RunningServer, method: str, options: tuple[str, ...]) -> None:
    """`-e` compresses."""
    count = 500
    load = ("-n", str(count), "-c", "20", "--connections", "4", "-O", "json", "-d", json.dumps(request()))
    code, output = tool("ghz", server, *options, *load, "--call", f"{SERVICE}.{method}", address(server))
    assert code == 0, output
    (report,) = documents(output)
    assert report["statusCodeDistribution"] == {"OK": count}, report["errorDistribution"]


def test_ghz_at_a_rate_with_metadata(tool, server: RunningServer) -> None:
    load = ("-n", "200", "-r", "400", "-O", "json", "-m", '{"x-one": "1"}', "-d", json.dumps(request("mirror")))
    code, output = tool("ghz", server, *load, "--call", f"{SERVICE}.ModelInfer", address(server))
    assert code == 0, output
    assert documents(output)[0]["statusCodeDistribution"] == {"OK": 200}
