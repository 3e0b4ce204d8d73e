"""The backlog of a sequence model is bounded: requests beyond the bound are refused at once, all others are answered."""

import json
import resource
import socket
from contextlib import ExitStack

import pytest

from support.calls import executing, pending
from support.served import Stage
from support.server import wait_until

BOUND = 4096
BEYOND = 5


def request(sequence: int, seconds: float) -> bytes:
    """The only request of a sequence, on a connection that it closes."""
    parameters = {"sequence_id": sequence, "sequence_start": True, "sequence_end": True}
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [seconds]}
    body = json.dumps({"parameters": parameters, "inputs": [tensor]}).encode()
    head = f"POST /v2/models/seq/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.load
def test_sequences_beyond_a_full_backlog_are_refused(stage: Stage) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    stage.deploy(
        "seq",
        "time.sleep(value(requests[0]))\nreturn [answer(request) for request in requests]",
        extra="sequence_batching { oldest { max_candidate_sequences: 1 } max_sequence_idle_microseconds: 60000000 }",
    )
    server = stage.server
    with ExitStack() as stack:

        def send(sequence: int, seconds: float = 0.0) -> socket.socket:
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port), timeout=60))
            connection.sendall(request(sequence, seconds))
            return connection

        def status(connection: socket.socket) -> bytes:
            answer = b""
            while part := connection.recv(1 << 16):
                answer += part
            return answer.split(b" ", 2)[1] + b" " + answer.partition(b"\r\n\r\n")[2]

        held = [send(1, 6.0)]
        wait_until(lambda: executing(server, "seq") == 1, "the first request", server)
        held += [send(sequence) for sequence in range(2, BOUND + 2)]
        wait_until(lambda: pending(server, "seq") == BOUND, "a full backlog", server)
        for sequence in range(BOUND + 2, BOUND + 2 + BEYOND):
            assert status(send(sequence)) == b'503 {"error":"[request id: <id_unknown>] Exceeds maximum queue size"}'
        assert executing(server, "seq") == 1, "refused at once, while the first request executes"
        assert {status(connection)[:4] for connection in held} == {b"200 "}
