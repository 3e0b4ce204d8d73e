"""What the module's classes and functions know of the process that they are in."""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from halimede.backends.hosting import Host
from halimede.backends.python.utils.errors import TritonModelException
from halimede.core.types import InferenceError


class Session:
    """One hosted instance. A process has one; only tests make several, one after another."""

    __slots__ = ("decoupled", "host", "model_dir", "output_names", "released", "sender_lock", "serves")

    def __init__(self, host: Host, model_dir: str, decoupled: bool, output_names: tuple[str, ...]) -> None:
        self.host = host
        self.model_dir = model_dir
        self.decoupled = decoupled
        self.output_names = output_names
        self.serves = False
        """Whether the model is between its `initialize` and its `finalize`."""
        self.released: deque[int] = deque()
        """Metric families whose objects are gone; see `metrics`."""
        self.sender_lock = threading.Lock()
        """Held while a request gets its one sender."""

    def call(self, method: str, arguments: Mapping[str, Any], failed: str = "") -> Any:
        """`Host.call`; TritonModelException, its text begins with `failed`."""
        try:
            return self.host.call(method, arguments)
        except InferenceError as error:
            raise TritonModelException(failed + error.message) from None


_current: Session | None = None


def use(session: Session) -> None:
    global _current  # noqa: PLW0603  models call functions and static methods: they have no object to ask
    _current = session


def current() -> Session:
    """Raises TritonModelException outside of a model's process."""
    if _current is None:
        raise TritonModelException("this works in the process of a model only")
    return _current
