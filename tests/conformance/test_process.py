"""The server process: its output at the start, its environment, its signals and its end."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tritonclient.grpc as grpcclient

from halimede import __version__
from halimede.commands.flags import TRITON_VERSION
from support.background import in_background
from support.calls import ONES, executing, metric
from support.forked import run_python
from support.models import add_identity
from support.plugin import PLAIN_BACKEND, install_backend
from support.served import Stage
from support.server import LOOPBACK, RunningServer, Start, start_command, start_server, wait_until

SERVE = [sys.executable, "-m", "halimede", "serve"]
SLOW_LOAD = 'parameters { key: "creation_delay_sec" value { string_value: "30" } }'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    add_identity(tmp_path / "models", "ident")
    return tmp_path / "models"


@pytest.fixture
def start(tmp_path: Path, repository: Path) -> Iterator[Start]:
    running: list[RunningServer] = []

    def begin(*arguments: str, before: tuple[str, ...] = (), **options: Any) -> RunningServer:
        given = [f"--model-repository={repository}", *arguments]
        if before:
            running.append(start_command(tmp_path, [*before, *SERVE, *given, *LOOPBACK], **options))
        else:
            running.append(start_server(tmp_path, given, **options))
        return running[-1]

    yield begin
    for server in running:
        server.kill()


@pytest.fixture(scope="module")
def flagged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """With flags that change what it prints and reports."""
    models = tmp_path_factory.mktemp("models")
    add_identity(models, "ident")
    arguments = [
        *("--model-repository", models, "--model-control-mode=explicit", "--load-model=*"),
        *("--id=here", "--backend-config=identity,key=value"),
        *("--repoagent-directory=/nowhere", "--server-version=2.60.1"),
    ]
    running = start_server(tmp_path_factory.mktemp("log"), arguments)
    yield Stage(running, models)
    running.kill()


def infer(server: RunningServer, model: str = "ident") -> int:
    return server.post(f"/v2/models/{model}/infer", ONES).status


def serve_and_fail(*arguments: str) -> tuple[int, str, float]:
    """Exit code, log and seconds of a server that does not start."""
    begun = time.monotonic()
    done = run_python("-m", "halimede", "serve", *arguments)
    return done.returncode, done.stderr, time.monotonic() - begun


# Versions.


def versions(server: RunningServer) -> set[str]:
    """The versions that both protocols report."""
    with grpcclient.InferenceServerClient(server.grpc_url) as over_grpc:
        return {server.get("/v2").json["version"], over_grpc.get_server_metadata().version}  # type: ignore[index]


def test_the_command_tritonserver_reports_a_version_of_triton(tmp_path: Path, repository: Path) -> None:
    command = [str(Path(sys.executable).parent / "tritonserver"), f"--model-repository={repository}", *LOOPBACK]
    server = start_command(tmp_path, command)
    try:
        assert versions(server) == {TRITON_VERSION}
        assert server.get("/v2").headers["server"] == f"halimede/{__version__}"
        version = rf"\| halimede_version +\| {re.escape(__version__)} "
        wait_until(lambda: re.search(version, server.log), "the table of options", server)
    finally:
        server.kill()


def test_halimede_serve_reports_its_own_version_unless_a_flag_sets_one(stage: Stage, flagged: Stage) -> None:
    assert versions(stage.server) == {__version__}
    assert versions(flagged.server) == {"2.60.1"}


# Output.


def test_the_start_prints_tritons_lines_in_order(flagged: Stage) -> None:
    server = flagged.server
    in_order = [
        f'"HTTPService listens at 127.0.0.1:{server.http_port}"',
        '"loading: ident:1"',
        "\"successfully loaded 'ident'\"",
        "| Repository Agent | Path |",
        "| Backend     | Path ",
        '| {"cmdline":{"key":"value"}} |',
        "| Model | Version | Status |",
        "| ident | 1       | READY  |",
        '"Collecting CPU metrics"',
        "| Option ",
        "| server_id                        | here ",
        "| server_version ",
        "| server_extensions ",
        f"| model_repository_path[0]         | {flagged.repository} ",
        "| model_control_mode               | MODE_EXPLICIT ",
        "| strict_model_config              | 0 ",
        "| rate_limit                       | OFF ",
        "| min_supported_compute_capability | 6.0 ",
        "| exit_timeout                     | 25 ",
        f'"Started GRPCInferenceService at 127.0.0.1:{server.grpc_port}"',
        f'"Started HTTPService at 127.0.0.1:{server.http_port}"',
        f'"Started Metrics Service at 127.0.0.1:{server.metrics_port}"',
    ]
    wait_until(lambda: in_order[-1] in server.log, "the last line", server)
    places = [server.log.find(text) for text in in_order]
    assert -1 not in places, in_order[places.index(-1)]
    assert places == sorted(places)


def test_started_lines_are_printed_after_the_models_are_loaded(start: Start, repository: Path) -> None:
    """Scripts wait for `Started` before they send requests; probes are answered before."""
    add_identity(repository, "slow", extra=SLOW_LOAD)
    server = start(ready=False)
    wait_until(lambda: "loading: slow:1" in server.log, "the load", server)
    assert server.get("/v2/health/live").status == 200
    assert server.get("/v2/health/ready").status == 400
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert (client.is_server_live(), client.is_server_ready()) == (True, False)
    assert "Started" not in server.log


def test_flags_without_effect_are_logged_at_the_start(flagged: Stage) -> None:
    assert re.search(r"^W.*--repoagent-directory", flagged.server.log, re.MULTILINE)


# Starts that fail.


@pytest.mark.parametrize("service", ["http", "grpc", "metrics"])
def test_a_busy_port_ends_the_start_before_any_load(repository: Path, service: str) -> None:
    add_identity(repository, "slow", extra=SLOW_LOAD)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = dict.fromkeys(("http", "grpc", "metrics"), 0) | {service: port}
        code, log, seconds = serve_and_fail(
            f"--model-repository={repository}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            *(f"--{name}-port={number}" for name, number in ports.items()),
        )
    name = {"http": "HTTP", "grpc": "GRPC", "metrics": "Metrics"}[service]
    assert code == 1
    assert f"failed to start {name} service: Socket '127.0.0.1:{port}' already in use" in log
    assert "loading" not in log
    assert seconds < 20  # the goal is 1 s, without the start of the interpreter


def test_an_invalid_repository_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        code, log, _ = serve_and_fail(f"--model-repository={path}")
        assert (code, str(path) in log, "--model-repository" in log) == (2, True, True)


def test_a_failed_model_ends_the_start_unless_a_flag_forbids_it(start: Start, repository: Path) -> None:
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "config.pbtxt").write_text("nonsense")
    code, log, _ = serve_and_fail(f"--model-repository={repository}", *LOOPBACK)
    assert code == 1
    assert "creating server: Internal - failed to load all models: broken" in log
    assert re.search(r"\| ident  \| 1 +\| READY", log)
    assert "Started" not in log

    server = start("--exit-on-error=false", "--strict-readiness=false")
    assert infer(server) == 200
    assert server.stop() == 0


def test_an_empty_repository_is_served(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    server = start_server(tmp_path, [f"--model-repository={tmp_path / 'none'}"])
    try:
        assert server.post("/v2/repository/index").json == []
    finally:
        assert server.stop() == 0


# Signals.


def test_unrelated_signals_change_nothing(start: Start) -> None:
    server = start()
    others = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE, signal.SIGCHLD, signal.SIGWINCH)
    for _ in range(100):
        for number in others:
            server.process.send_signal(number)
        assert infer(server) == 200
    assert server.stop() == 0


def test_a_stop_does_not_wait_for_a_load(start: Start, repository: Path) -> None:
    add_identity(repository, "slow", extra=SLOW_LOAD)
    server = start("--drain-delay=30", ready=False)
    wait_until(lambda: "loading: slow:1" in server.log, "the load", server)
    begun = time.monotonic()
    assert server.stop() == 0, server.log
    assert time.monotonic() - begun < 8  # the goal is 2 s


def test_a_stop_before_the_libraries_are_loaded_ends_the_process(repository: Path, tmp_path: Path) -> None:
    """Process 1 of a container ignores signals without a handler."""
    (tmp_path / "slow").mkdir()
    loading, variables = tmp_path / "loading", tmp_path / "variables"
    (tmp_path / "slow" / "uvloop.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(variables)!r}).write_text(os.environ['OPENBLAS_THREAD_TIMEOUT'])\n"
        f"pathlib.Path({str(loading)!r}).touch()\ntime.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "halimede", "serve", "--model-repository", repository],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "slow")},
    )
    try:
        wait_until(loading.exists, "the libraries to be loaded")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        # numpy's idle threads do not spin for as long as they would by default.
        assert variables.read_text() == "20"
    finally:
        process.kill()
        process.wait()


THREADED = (
    PLAIN_BACKEND
    + """
import threading
import time

threading.Thread(target=time.sleep, args=(600,), name="left-behind").start()
print("printed by a model")

class Model:
    def create_instance(self, placement):
        return self
    def run(self, inputs, outputs, context):
        return {"OUT": inputs["IN"]}
    def close(self):
        pass

class ThreadedBackend(PlainBackend):
    def load(self, config, source):
        return Model()
"""
)


def test_a_thread_of_a_backend_does_not_hold_the_exit(start: Start, tmp_path: Path, repository: Path) -> None:
    config = repository / "ident" / "config.pbtxt"
    config.write_text(config.read_text().replace('"identity"', '"threaded"'))
    server = start(environment=install_backend(tmp_path / "site", "threaded", THREADED, "ThreadedBackend"))
    assert infer(server) == 200
    begun = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begun < 8  # the goal is 1 s
    assert "printed by a model" in server.log


# Time.


def test_deadlines_that_pass_while_the_process_is_stopped_are_kept(start: Start, repository: Path) -> None:
    batching = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 1500000 } }"
    one = "instance_group { kind: KIND_CPU count: 1 }"
    delay = 'parameters { key: "execute_delay_ms" value { string_value: "2500" } }'
    add_identity(repository, "slow", extra=f"{one} {delay} {batching}")
    server = start()
    running = in_background(lambda: infer(server, "slow"))
    wait_until(lambda: executing(server, "slow") == 1, "the execution", server)
    queued = in_background(lambda: server.post("/v2/models/slow/infer", ONES))
    wait_until(lambda: metric(server, "halimede_queue_requests", "slow") == 1, "the request to queue", server)
    server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):  # the wait is the purpose
        queued.result(3)
    server.process.send_signal(signal.SIGCONT)
    assert (queued.result(20).status, queued.result().error) == (503, "Request timeout expired")
    assert running.result(20) == 200
    assert infer(server) == 200
    assert server.stop() == 0


JUMPING = """
import itertools
import time

days = itertools.cycle((0, 86_400, -86_400, 400 * 86_400))
true_time, true_time_ns = time.time, time.time_ns
time.time = lambda: true_time() + next(days)
time.time_ns = lambda: true_time_ns() + next(days) * 1_000_000_000
"""


def test_jumps_of_the_wall_clock_affect_no_duration_or_deadline(start: Start, tmp_path: Path, repository: Path) -> None:
    """Each reading of the wall clock differs by days; only `last_inference` and the log may depend on it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(JUMPING)
    policy = "default_queue_policy { default_timeout_microseconds: 300000 }"
    batching = f"dynamic_batching {{ max_queue_delay_microseconds: 100000 {policy} }}"
    delay = 'parameters { key: "execute_delay_ms" value { string_value: "1500" } }'
    add_identity(repository, "slow", extra=f"instance_group {{ kind: KIND_CPU count: 1 }} {delay} {batching}")
    server = start(environment={"PYTHONPATH": str(tmp_path / "site")}, forked=False)
    running = in_background(lambda: infer(server, "slow"))
    wait_until(lambda: executing(server, "slow") == 1, "the execution", server)
    late = server.post("/v2/models/slow/infer", ONES)
    assert (late.status, late.error) == (503, "Request timeout expired")
    assert running.result(20) == 200
    (statistics,) = server.get("/v2/models/slow/stats").json["model_stats"]
    assert 1.5e9 <= statistics["inference_stats"]["success"]["ns"] < 20e9
    assert 0 <= metric(server, "nv_model_load_duration_secs", "slow") < 20
    begun = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begun < 8


# Environments.


def limit_of_open_files(pid: int) -> tuple[int, int]:
    return psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)


def limited(soft: int, hard: int) -> str:
    return f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))"


def test_the_limit_of_open_files_is_raised_to_its_maximum(start: Start) -> None:
    server = start(first=limited(256, 700))
    assert limit_of_open_files(server.process.pid) == (700, 700)
    wait_until(lambda: "Started HTTPService" in server.log, "the end of the start", server)
    assert re.search(r"this process may open 700 files and has \d+ open with its models loaded", server.log)


def test_a_sufficient_limit_of_open_files_causes_no_warning(start: Start) -> None:
    server = start(first=limited(256, 8000))
    assert limit_of_open_files(server.process.pid) == (8000, 8000)
    wait_until(lambda: "Started HTTPService" in server.log, "the end of the start", server)
    assert "this process may open" not in server.log


NOBODY = ("unshare", "--user", "--map-user=65534", "--map-group=65534")
UNPRIVILEGED = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
SEALED = ("unshare", "--mount")


def if_allowed(*command: str) -> pytest.MarkDecorator:
    """Skip the test on machines and containers that do not allow this command."""
    is_there = shutil.which(command[0]) is not None
    is_allowed = is_there and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    return pytest.mark.skipif(not is_allowed, reason=f"this machine does not allow `{' '.join(command)}`")


def check_serves(server: RunningServer) -> None:
    assert infer(server) == 200
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_ready()
    assert "nv_cpu_memory_total_bytes " in server.metrics()
    assert server.stop() == 0


@pytest.mark.parametrize(
    "before",
    [pytest.param(NOBODY, marks=if_allowed(*NOBODY)), pytest.param(UNPRIVILEGED, marks=if_allowed(*UNPRIVILEGED))],
)
def test_the_server_runs_without_privileges_and_without_a_home(start: Start, before: tuple[str, ...]) -> None:
    server = start(before=(*before, "setpriv", "--no-new-privs", "env", "-u", "HOME", "-C", "/"))
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    assert re.search(r"^CapEff:\s0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s1$", status, re.MULTILINE)
    check_serves(server)


@if_allowed(*SEALED)
def test_the_server_needs_no_writable_folder_and_no_shared_memory(start: Start) -> None:
    seal = """
        mount --make-rprivate /
        mount -o remount,bind,ro /
        mountpoint -q /tmp && mount -o remount,bind,ro /tmp
        mount -t tmpfs -o ro none /dev/shm
        for place in / /tmp /dev/shm; do
            touch $place/file 2>/dev/null && exit 9
        done
        exec "$@"
    """
    before = (*SEALED, "sh", "-c", seal, "sh", "env", "HOME=/nonexistent", "TMPDIR=/nonexistent")
    check_serves(start(before=before))


def test_the_server_needs_no_temporary_and_no_working_directory(start: Start, tmp_path: Path) -> None:
    for name in ("work", "tmp"):
        (tmp_path / name).mkdir()
    server = start(before=("env", "-C", str(tmp_path / "work")), environment={"TMPDIR": str(tmp_path / "tmp")})
    for name in ("work", "tmp"):
        shutil.rmtree(tmp_path / name)
    assert infer(server) == 200
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_ready()
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    body = json.dumps({"inputs": [{**ONES["inputs"][0], "shape": [32, 16], "data": [1.0] * 512}]})
    connection.request("POST", "/v2/models/ident/infer", body)
    assert connection.getresponse().status == 200
    connection.close()
    assert server.stop() == 0
