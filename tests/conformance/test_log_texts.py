"""Log texts that are Triton's: requests at verbose level 1, failed loads, stops."""

import signal
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient

from support.calls import load
from support.models import add_identity, write_config
from support.served import Stage
from support.server import RunningServer, Start, wait_until


def lines(server: RunningServer) -> list[str]:
    """Severity and text of each line."""
    return [line[0] + " " + line.split('] "', 1)[1][:-1] for line in server.log.splitlines() if '] "' in line]


def test_requests_are_logged_at_verbose_level_one(start: Start, repository: Path) -> None:
    add_identity(repository, "ident")
    server = start("--model-repository", repository, "--log-verbose=1")
    assert server.post("/v2/models/ident/infer", b"{}").status == 400
    server.metrics()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert client.is_server_live()
    wanted = {
        "I HTTP request: 2 /v2/models/ident/infer",
        "I HTTP request: 0 /metrics",
        "I Process for ServerLive, rpc_ok=1, 0 step START",
    }
    wait_until(lambda: wanted <= set(lines(server)), "the requests to be logged", server)


def test_requests_are_not_logged_by_default(stage: Stage) -> None:
    log_start = len(stage.server.log)
    assert stage.server.get("/v2/health/live").status == 200
    assert load(stage.server, "unlogged")[0] == 500
    # The request was before it: lines are written in order.
    wait_until(lambda: "'unlogged'" in stage.server.log[log_start:], "the line of the failed load", stage.server)
    assert "HTTP request: " not in stage.server.log[log_start:]


def test_a_failed_load_call_leaves_its_reason_in_the_log(stage: Stage) -> None:
    server, repository = stage.server, stage.repository
    (repository / "garbage" / "1").mkdir(parents=True)
    (repository / "garbage" / "1" / "model.onnx").write_bytes(b"garbage")
    write_config(repository / "mistyped", "max_batch_sise: 1")
    for name in ("garbage", "mistyped"):
        assert server.post(f"/v2/repository/models/{name}/load").status in {400, 500}
    beginnings = (
        "E failed to load 'garbage' version 1: Internal: onnx runtime error 7: ",
        "I failed to load 'garbage'",
        "E Poll failed for model directory 'mistyped': mistyped/config.pbtxt:1:1: ",
    )
    wait_until(
        lambda: all(any(line.startswith(text) for line in lines(server)) for text in beginnings), "the reasons", server
    )


def test_a_stop_logs_each_second_what_it_waits_for(start: Start, repository: Path) -> None:
    add_identity(repository, "slow", extra='parameters { key: "execute_delay_ms" value { string_value: "1500" } }')
    server = start("--model-repository", repository)
    # The server is ready before it has logged its tables and what it started.
    wait_until(lambda: "I Started Metrics Service at " in "\n".join(lines(server)), "the end of the start", server)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        tensor = grpcclient.InferInput("IN", [1, 16], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 16), np.float32))
        answers: list[object] = []

        def take(result: object, error: object) -> None:
            answers.append(error)

        client.async_infer("slow", [tensor], take)
        running = 'halimede_executing_requests{model="slow",version="1"} 1'
        wait_until(lambda: running in server.metrics(), "the execution", server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        wait_until(lambda: answers == [None], "the answer")
    # The first sample of the metrics may come at any time.
    logged = [line for line in lines(server) if not line.startswith("I Collecting ")]
    assert logged[logged.index("I Signal (15) received.") :][:3] == [
        "I Signal (15) received.",
        "I Waiting for in-flight requests to complete.",
        "I Timeout 25: Found 1 model versions that have in-flight inferences",
    ]
    assert "I Timeout 24: Found 1 model versions that have in-flight inferences" in logged
    assert "I All models are stopped, unloading models" in logged
    assert logged[-1] == "I successfully unloaded 'slow' version 1"
