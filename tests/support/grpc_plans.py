"""What a test asks of a gRPC client in any language, and what the client saw."""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Calls of one client to models IN -> OUT that take rows of FP32; IN has the numbers `number % 251`.

    `action` is infer (one ModelInfer), stream (one ModelStreamInfer of so many `requests`, with their numbers as ids)
    or repeat (ModelInfer without pause until it is told). A call is cancelled when the client is told (`line`), or after
    the first answer of a stream (`first`). Values of `root`, `certificate` and `key` are paths; with `root` the client uses
    TLS.
    """

    target: str = ""
    action: str = "infer"
    model: str = "ident"
    elements: int = 16
    requests: int = 1
    parameters: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    binary_metadata: Mapping[str, bytes] = field(default_factory=dict)
    compression: str = ""
    deadline_ms: int = 0
    cancel: str = "never"
    keepalive_ms: int = 0
    root: str = ""
    certificate: str = ""
    key: str = ""

    def text(self, descriptors: Path) -> str:
        """The plan for a program in another language."""
        binary = {name: base64.b64encode(value).decode() for name, value in self.binary_metadata.items()}
        return json.dumps(
            {**asdict(replace(self, binary_metadata={})), "binary_metadata": binary, "descriptors": str(descriptors)}
        )

    def content(self) -> bytes:
        """The values of IN."""
        return _content(self.elements)


@lru_cache(2)
def _content(elements: int) -> bytes:
    return np.resize(np.arange(251, dtype="<f4"), elements).tobytes()


@dataclass(frozen=True, slots=True)
class Answer:
    """A message of the server: whether OUT equals IN, or the error of a stream's request."""

    id: str = ""
    error: str = ""
    equal: bool = False
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """The status and the answers, or how often a repeated call had each status and texts of some failures."""

    code: str = ""
    message: str = ""
    answers: list[Answer] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class Running(Protocol):
    """A client at work."""

    def tell(self) -> None:
        """Let it cancel its call, or stop repeating it."""

    def result(self) -> Result:
        """Wait for its end."""


class Client(Protocol):
    """A gRPC client of one kind, and the compressions that it knows."""

    @property
    def compressions(self) -> tuple[str, ...]: ...

    def start(self, plan: Plan) -> Running: ...


def run(client: Client, plan: Plan) -> Result:
    """Start it and wait for its end."""
    return client.start(plan).result()
