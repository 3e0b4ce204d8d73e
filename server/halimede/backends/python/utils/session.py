"""What the module's classes and functions know of the process that they are in."""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from halimede.backends.hosting import Host
from halimede.backends.python.utils.errors import TritonModelException
from halimede.core.types import ErrorCode, InferenceError


class Session:
    """One hosted instance. A process has one; only tests make several, one after another."""

    __slots__ = (
        "_unknown",
        "decoupled",
        "host",
        "model_dir",
        "output_names",
        "released",
        "sender_lock",
        "serves",
        "strict_outputs",
    )

    def __init__(
        self,
        host: Host,
        model_dir: str,
        decoupled: bool,
        output_names: tuple[str, ...],
        *,
        strict_outputs: bool = False,
    ) -> None:
        self.host = host
        self.model_dir = model_dir
        self.decoupled = decoupled
        self.output_names = output_names
        self.strict_outputs = strict_outputs
        self._unknown: set[str] = set()
        """Names of outputs that the model sent and does not declare."""
        self.serves = False
        """Whether the model is between its `initialize` and its `finalize`."""
        self.released: deque[int] = deque()
        """Metric families whose objects are gone; see `metrics`."""
        self.sender_lock = threading.Lock()
        """Held while a request gets its one sender."""

    def check_unwanted(self, name: str) -> None:
        """Warn once of an output that is left out of an answer because the model does not declare it.

        InferenceError instead where outputs are checked strictly. Declared outputs that were not asked for are fine.
        """
        if name in self.output_names:
            return
        text = f"unexpected inference output '{name:.256}'; the model has {', '.join(self.output_names)}"
        if self.strict_outputs:
            raise InferenceError(ErrorCode.INTERNAL, text)
        if name not in self._unknown and len(self._unknown) < _MOST_UNKNOWN:
            self._unknown.add(name)
            self.host.log("WARNING", f"{text}: it is left out of the answer")

    def call(self, method: str, arguments: Mapping[str, Any], failed: str = "") -> Any:
        """`Host.call`; TritonModelException, its text begins with `failed`."""
        try:
            return self.host.call(method, arguments)
        except InferenceError as error:
            raise TritonModelException(failed + error.message) from None


_MOST_UNKNOWN = 256

_current: Session | None = None


def use(session: Session) -> None:
    global _current  # noqa: PLW0603  models call functions and static methods: they have no object to ask
    _current = session


def current() -> Session:
    """Raises TritonModelException outside of a model's process."""
    if _current is None:
        raise TritonModelException("this works in the process of a model only")
    return _current
