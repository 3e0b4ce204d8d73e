"""Orders to a process of the cluster, over a socket in the file system, which all network namespaces share."""

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONGEST_BYTES = 200_000
ANSWER_LIMIT_S = 60.0

Answer = Callable[[Any, list[int]], Any]
"""What a process does with an order and the descriptors that came along; the result is sent back."""


def ask(path: Path, order: Any, *descriptors: int) -> Any:
    """The answer to an order; RuntimeError with what went wrong there, ConnectionError when nobody listens."""
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
    """Answer orders, one at a time, for as long as this process lives."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Who sees the socket can connect to it.
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
