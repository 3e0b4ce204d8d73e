"""The state of the process that the module's classes and functions share."""

import threading
from collections import deque

from halimede.backends.hosting import Host
from halimede.backends.python.utils.errors import TritonModelException
from halimede.backends.service_calls import ResultT_co, ServiceCall
from halimede.core.types import InferenceError, internal


class Session:
    """One hosted instance. A process has one; only tests create several, one after another."""

    def __init__(
        self,
        host: Host,
        model_dir: str,
        decoupled: bool,
        output_names: tuple[str, ...],
        *,
        strict_outputs: bool = False,
        reschedules: bool = False,
    ) -> None:
        self.host = host
        self.model_dir = model_dir
        self.decoupled = decoupled
        self.output_names = output_names
        self.strict_outputs = strict_outputs
        self.reschedules = reschedules
        """Whether a request may be executed again, as the configuration says."""
        self._unknown: set[str] = set()
        """Names of undeclared outputs that the model has sent."""
        self.serves = False
        """Whether the model has been initialized and not yet finalized."""
        self.released: deque[int] = deque()
        """Metric families whose objects were deleted; see `metrics`."""
        self.sender_lock = threading.Lock()
        """Held while a request creates its only sender."""

    def check_unwanted(self, name: str) -> None:
        """Warn once about an output that is dropped from a response because the model does not declare it.

        Raises InferenceError instead if outputs are checked strictly. Declared outputs need not be requested.
        """
        if name in self.output_names:
            return
        text = f"unexpected inference output '{name:.256}'; the model has {', '.join(self.output_names)}"
        if self.strict_outputs:
            raise internal(text)
        if name not in self._unknown and len(self._unknown) < _MOST_UNKNOWN:
            self._unknown.add(name)
            self.host.log("WARNING", f"{text}: it is left out of the answer")

    def call(self, call: ServiceCall[ResultT_co], failed: str = "") -> ResultT_co:
        """`Host.call`; raises TritonModelException with a text that begins with `failed`."""
        try:
            return self.host.call(call)
        except InferenceError as error:
            raise TritonModelException(failed + error.message) from None


_MOST_UNKNOWN = 256

_current: Session | None = None


def use(session: Session) -> None:
    global _current  # noqa: PLW0603  models call functions and static methods: they have no object to ask
    _current = session


def current() -> Session:
    """The current session; TritonModelException outside of a model's process."""
    if _current is None:
        raise TritonModelException("this works in the process of a model only")
    return _current
