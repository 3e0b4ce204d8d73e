"""Commands to a process of the cluster, over a Unix socket, which works across network namespaces."""

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGEST_BYTES = 200_000
ANSWER_LIMIT_S = 60.0

Answer = Callable[[Any, list[int]], Any]
"""Handles a command and the file descriptors sent with it; the result is sent back."""


def ask(path: Path, order: Any, *descriptors: int) -> Any:
    """Send a command and return the answer. Raises RuntimeError with the error of the other side, ConnectionError if no process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(ANSWER_LIMIT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * LONGEST_BYTES)
        connection.connect(str(path))
        socket.send_fds(connection, [json.dumps(order).encode()], descriptors)
        answer = json.loads(connection.recv(LONGEST_BYTES) or b'{"error": "it ended"}')
    if "error" in answer:
        raise RuntimeError(f"{path.name}: {answer['error']}")
    return answer["result"]


def listen(path: Path, answer: Answer) -> None:
    """Answer commands, one at a time, until this process ends."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The socket gets its final name only when it accepts connections.
    early = path.with_suffix(".early")
    listener.bind(str(early))
    listener.listen(64)
    early.rename(path)
    threading.Thread(target=_serve, args=(listener, answer), daemon=True).start()


def _serve(listener: socket.socket, answer: Answer) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            message, descriptors, _, _ = socket.recv_fds(connection, LONGEST_BYTES, 4)
            try:
                reply = {"result": answer(json.loads(message), descriptors)}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"}
            try:
                connection.sendall(json.dumps(reply).encode())
            except OSError:
                continue  # who asked is gone
