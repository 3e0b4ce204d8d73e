"""Entry points of test worker processes, instead of the server's loop. They execute code that the test sends.

Standard library only, for any CPython from 3.10 on: only the folder of this file is on their path.
"""

import json
import socket
from typing import Any


class EndError(BaseException):
    """Ends the entry with this exit code."""


def obey(descriptor: int) -> int:
    """Evaluate each line, a JSON string of Python, and answer with JSON; statements put their answer in `answer`."""
    channel = socket.socket(fileno=descriptor)
    names: dict[str, Any] = {"end": _end, "channel": channel}
    try:
        for line in channel.makefile("r"):
            channel.sendall(json.dumps(_evaluate(json.loads(line), names)).encode() + b"\n")
    except EndError as ended:
        return ended.args[0]
    return 0


def fail(descriptor: int) -> int:
    """An entry that raises."""
    raise RuntimeError("there is a bug")


def greet(descriptor: int) -> int:
    """Send one byte, and end when the test closes the channel."""
    channel = socket.socket(fileno=descriptor)
    channel.sendall(b"!")
    channel.recv(1)
    return 0


def _end(code: int) -> None:
    raise EndError(code)


def _evaluate(code: str, names: dict[str, Any]) -> Any:
    try:
        expression = compile(code, "<test>", "eval")
    except SyntaxError:
        names["answer"] = None
        exec(code, names)
        return names["answer"]
    return eval(expression, names)
