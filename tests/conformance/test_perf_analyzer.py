"""perf_analyzer, NVIDIA's load generator, over gRPC in each mode that needs neither shared memory nor tracing."""

import base64
import json
import os
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import support.server
from bench import perf_analyzer
from support.calls import metric
from support.models import add_identity, add_simple, add_simple_string
from support.phases import only_one, phase, shown
from support.probe import cache
from support.served import add_python
from support.server import RunningServer, serving

PKI = Path(support.server.__file__).parent / "pki"
SHORT = ("-p", "80", "-r", "10", "-s", "900")
"""Three windows of 80 ms, and more only if a busy machine makes one ten times as slow as another."""
LIMIT_S = 60

# Without fixtures: the first run downloads the program.
pytestmark = pytest.mark.timeout(120, func_only=True)

TWICE = """
for request in requests:
    sender = request.get_response_sender()
    for _ in range(2):
        sender.send(answer(request))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@dataclass(frozen=True, slots=True)
class Mode:
    """Options of perf_analyzer, and whether it uses the decoupled model."""

    options: tuple[str, ...]
    model: str = "simple"


MODES = {
    "sync": Mode(("--sync", "--concurrency-range", "2")),
    "async": Mode(("--async", "--concurrency-range", "4")),
    "streaming": Mode(("--streaming", "--async", "--concurrency-range", "4")),
    "range of concurrency": Mode(("--async", "--concurrency-range", "1:5:2")),
    "periodic concurrency": Mode(
        (
            "--async",
            "--streaming",
            "--periodic-concurrency-range",
            "1:3:1",
            "--request-period",
            "1",
            "--profile-export-file",
            "{profile}",
        ),
        "twice",
    ),
    "binary search": Mode(("--concurrency-range", "1:4", "--binary-search", "-l", "10000")),
    "request rate": Mode(("--request-rate-range", "100:200:100")),
    "poisson request rate": Mode(("--async", "--request-rate-range", "150", "--request-distribution", "poisson")),
    "request rate of a stream": Mode(("--streaming", "--async", "--request-rate-range", "100")),
    "custom intervals": Mode(("--request-intervals", "{intervals}")),
    "count windows": Mode(
        ("--measurement-mode", "count_windows", "--measurement-request-count", "30", "-r", "10", "-s", "900")
    ),
    "batch": Mode(("-b", "8", "--concurrency-range", "2")),
    "version": Mode(("-x", "1")),
    "percentile": Mode(("--percentile", "95")),
    "gzip": Mode(("--grpc-compression-algorithm", "gzip")),
    "deflate": Mode(("--grpc-compression-algorithm", "deflate", "--async")),
    "no compression": Mode(("--grpc-compression-algorithm", "none")),
    "gzip in a stream": Mode(("--grpc-compression-algorithm", "gzip", "--streaming", "--async")),
    "zero data": Mode(("--input-data", "zero")),
    "data of a file": Mode(("--input-data", "{data}")),
    "strings": Mode(("--string-length", "2", "--string-data", "7"), "simple_string"),
    "shape": Mode(
        (
            "--shape",
            "IN:40",
        ),
        "ident",
    ),
    "large tensors": Mode(("--shape", "IN:250000", "--async"), "ident"),
    "decoupled": Mode(("--streaming", "--async", "--concurrency-range", "2"), "twice"),
    "sequences": Mode(
        ("--sequence-length", "20", "--sequence-length-variation", "20", "--concurrency-range", "4"), "sequence"
    ),
    "request rate of sequences": Mode(("--num-of-sequences", "6", "--request-rate-range", "150"), "sequence"),
    "streamed sequences": Mode(
        ("--streaming", "--async", "--concurrency-range", "4", "--sequence-id-range", "1:100"), "sequence"
    ),
    "metadata": Mode(("-H", "x-a: b", "-H", "authorization: none")),
    "request parameters": Mode(("--request-parameter", "n:7:int", "--streaming", "--async"), "twice"),
    "metrics": Mode(("--collect-metrics", "--metrics-url", "{metrics}", "--metrics-interval", "40")),
    "profile": Mode(("--profile-export-file", "{profile}", "-f", "{report}")),
}

SERVED_ALIKE = {
    *(
        "async",
        "range of concurrency",
        "binary search",
        "request rate",
        "poisson request rate",
        "request rate of a stream",
    ),
    *("custom intervals", "count windows", "periodic concurrency", "percentile", "profile", "zero data", "shape"),
    *("version", "gzip", "no compression", "metadata", "request rate of sequences", "streaming"),
}
"""Modes whose requests differ from those of another mode only in their times or numbers: `make test-all` has them."""


@pytest.fixture(scope="module")
def home(request: pytest.FixtureRequest) -> Path:
    lock = cache() / "perf_analyzer.lock"
    with shown(request.config), only_one(lock, "fetching perf_analyzer"), phase("Fetching perf_analyzer"):
        return perf_analyzer.fetch()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository") / "models"
    path.mkdir()
    add_simple(path)
    add_simple_string(path)
    add_identity(path, "ident", dims="-1")
    add_python(path, "twice", TWICE, dims="4", decoupled=True)
    add_python(path, "sequence", dims="4", extra="sequence_batching { oldest { } }")
    return path


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from served(models, tmp_path_factory, "--grpc-infer-response-compression-level=low")


def served(models: Path, tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", models, *flags]) as running:
        yield running
    assert "unexpected error" not in running.log


def measure(home: Path, address: str, mode: Mode, values: dict[str, str]) -> None:
    """Run it; every window must have a throughput, and no request may fail."""
    options = [each.format(**values) for each in mode.options]
    if "count_windows" not in options:
        options += SHORT
    command = [str(home / "perf_analyzer"), "-m", mode.model, "-i", "grpc", "-u", address, *options]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(home)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{command}\n{output}"
    # With periodic concurrency it prints none.
    has_throughput = re.search(r"throughput: [1-9][\d.]* (infer|responses?)/sec|Throughput: [1-9]", output)
    assert has_throughput or "--periodic-concurrency-range" in options, f"{command}\n{output}"
    assert not re.search(r"[Ff]ailed to|[Ee]rror|Thread \[\d+\] had", output), f"{command}\n{output}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.large) if name in SERVED_ALIKE else name for name in MODES]
)
def test_no_request_fails(name: str, home: Path, server: RunningServer, tmp_path: Path) -> None:
    mode = MODES[name]
    profile = tmp_path / "profile.json"
    values = {"profile": str(profile), "report": str(tmp_path / "report.csv")}
    values["intervals"] = str(written(tmp_path / "intervals", "2000\n5000\n10000\n"))
    values["data"] = str(written(tmp_path / "data.json", json.dumps(DATA)))
    values["metrics"] = f"http://127.0.0.1:{server.metrics_port}/metrics"
    before = metric(server, "nv_inference_request_success", mode.model)
    measure(home, server.grpc_url, mode, values)
    assert metric(server, "nv_inference_request_success", mode.model) > before
    if "{profile}" in mode.options:
        requests = json.loads(profile.read_text())["experiments"][0]["requests"]
        assert requests
        assert all(each["response_timestamps"] for each in requests)


def test_tls(home: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Mutual: without its own certificate it could not connect."""
    flags = (
        *("--grpc-use-ssl=true", "--grpc-use-ssl-mutual=true", f"--grpc-root-cert={PKI / 'root.pem'}"),
        *(f"--grpc-server-cert={PKI / 'server.pem'}", f"--grpc-server-key={PKI / 'server.key'}"),
    )
    options = (
        *("--ssl-grpc-use-ssl", "--ssl-grpc-root-certifications-file", str(PKI / "root.pem")),
        *("--ssl-grpc-private-key-file", str(PKI / "client.key")),
        *("--ssl-grpc-certificate-chain-file", str(PKI / "client.pem")),
    )
    for running in served(models, tmp_path_factory, *flags):
        for kind in (("--sync",), ("--async", "--streaming")):
            measure(home, f"localhost:{running.grpc_port}", Mode((*options, *kind)), {})


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


DATA = {
    "data": [
        {
            "INPUT0": {"content": list(range(16)), "shape": [16]},
            "INPUT1": {"b64": base64.b64encode(struct.pack("<16i", *range(16))).decode()},
        },
        {"INPUT0": [1] * 16, "INPUT1": [2] * 16},
    ],
    "validation_data": [
        {"OUTPUT0": [2 * number for number in range(16)], "OUTPUT1": [0] * 16},
        {"OUTPUT0": [3] * 16, "OUTPUT1": [-1] * 16},
    ],
}
