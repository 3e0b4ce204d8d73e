"""Attacks of clients and of model directories on the real process."""

import asyncio
import signal
import socket
import time
from pathlib import Path

import grpc
import pytest

from support.calls import load
from support.forked import run_python
from support.models import add_identity, write_config
from support.served import Stage
from support.server import RunningServer, Start

LABELLED = """
backend: "identity"
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 label_filename: "labels.txt" }
output { name: "TWO" data_type: TYPE_FP32 dims: 1 label_filename: "labels.txt" }
"""


@pytest.mark.parametrize("connections", [10, pytest.param(40, marks=pytest.mark.large)])
def test_a_burst_of_grpc_calls_is_answered_and_not_cancelled(server: RunningServer, connections: int) -> None:
    async def burst() -> list[bytes]:
        channels = [
            grpc.aio.insecure_channel(
                server.grpc_url, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.channel_number", number)]
            )
            for number in range(connections)
        ]
        calls = [
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)
            for channel in channels
            for _ in range(60)
        ]
        answers = await asyncio.gather(*calls)
        for channel in channels:
            await channel.close()
        return answers

    assert asyncio.run(burst()) == [b"\x08\x01"] * connections * 60


def test_a_client_that_does_not_read_its_answer_does_not_hold_the_exit(repository: Path, start: Start) -> None:
    add_identity(repository, "ident", max_batch_size=0, dims="-1")
    server = start("--model-repository", repository, "--exit-timeout-secs", "60")
    size = 24 << 20
    request = b'{"inputs":[{"name":"IN","shape":[%d],"datatype":"FP32","parameters":{"binary_data_size":%d}}]}' % (
        *(size // 4, size),
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.http_port))
        head = b"POST /v2/models/ident/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nInference-Header-Content-Length: %d\r\n\r\n"
        client.sendall(head % (len(request) + size, len(request)) + request + bytes(size))
        client.recv(1)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        # The goal is about 5 s; a server that waits for the client uses the whole exit timeout and fails.
        assert server.process.wait(50) == 0, server.log
        assert time.monotonic() - started < 40


@pytest.mark.parametrize("count", [1 << 20, (1 << 19) + 1])
def test_a_model_with_too_many_labels_is_refused(stage: Stage, count: int) -> None:
    (stage.repository / "many" / "1").mkdir(parents=True)
    write_config(stage.repository / "many", LABELLED)
    (stage.repository / "many" / "labels.txt").write_text("a\n" * count)
    status, error = load(stage.server, "many")
    assert (status, "the outputs of a model have more than 1048576 labels together" in error) == (500, True), error
    assert stage.server.get("/v2/models/many/ready").status == 404


def test_output_of_a_model_cannot_control_the_terminal(repository: Path) -> None:
    (repository / "m" / "1").mkdir(parents=True)
    command = ["-m", "halimede", "explain-config", repository / "m"]

    write_config(repository / "m", 'name: "\\033]0;x\\007" backend: "identity"')
    refused = run_python(*command)
    assert refused.returncode == 1
    assert "\\x1b]0;x\\x07" in refused.stderr
    assert not set("\x1b\x07") & set(refused.stderr)

    # ESC, the same in one character (CSI), and a mark that turns the direction of writing.
    write_config(
        repository / "m",
        LABELLED.replace(' label_filename: "labels.txt"', "")
        + 'input { name: "IN2" data_type: TYPE_FP32 dims: 1 }'
        + 'parameters { key: "k" value { string_value: "\\033[31m\\302\\233\\342\\200\\256" } }',
    )
    for form in ("pbtxt", "yaml", "json"):
        shown = run_python(*command, "--format", form)
        assert shown.returncode == 0, shown.stderr
        assert "[31m" in shown.stdout
        assert all(each.isprintable() or each == "\n" for each in shown.stdout)
