"""The Python packages of TensorRT and CUDA, imported when the first engine needs them; TensorRT's log."""

import logging
import re
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from halimede.backends.extras import install_extra
from halimede.core.types import unsupported

log = logging.getLogger(__name__)

OLDEST = (10, 0)
"""The oldest TensorRT that can be used: earlier ones have other calls."""

OLDEST_CUDA = (12, 9, 1)
"""The oldest cuda-bindings: earlier ones hold the interpreter's lock while they wait, which would stop the server."""

TEXT_LIMIT = 1024
_KEPT_ERRORS = 4


@dataclass(frozen=True, slots=True)
class Libraries:
    """The modules `tensorrt` and `cuda.bindings.runtime`, and the logger that all engines of the process share."""

    trt: Any  # the packages have no types
    cudart: Any
    logger: Any
    errors: "Errors"
    plugins: set[str] = field(default_factory=set)
    """The libraries that have been opened: a registry refuses the same one again."""


class Errors:
    """TensorRT's last errors: its calls return a failure without a reason, which is only in its log.

    TensorRT logs on the thread that calls it, so each thread has its own.
    """

    def __init__(self) -> None:
        self._kept = threading.local()

    def add(self, text: str) -> None:
        self._of_thread().append(text)

    def clear(self) -> None:
        """Forget the errors of earlier calls of this thread."""
        self._of_thread().clear()

    def text(self) -> str:
        """The errors since `clear` on this thread, in one line; a general text if there are none."""
        kept = self._of_thread()
        text = " ".join("; ".join(kept).split()) or "TensorRT gives no reason"
        kept.clear()
        return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "..."

    def _of_thread(self) -> deque[str]:
        if not hasattr(self._kept, "errors"):
            self._kept.errors = deque(maxlen=_KEPT_ERRORS)
        errors: deque[str] = self._kept.errors
        return errors


@cache
def installed() -> Libraries:
    """The installed packages. UNSUPPORTED if one is missing, cannot find its libraries, or is too old."""
    try:
        import cuda.bindings  # type: ignore[import-untyped,unused-ignore]  # without types
        import tensorrt  # type: ignore[import-not-found,import-untyped,unused-ignore]  # optional, without types
        from cuda.bindings import runtime  # type: ignore[import-untyped,unused-ignore]  # without types
    except (ImportError, OSError) as error:
        raise unsupported(
            f"TensorRT cannot be imported ({error}), which needs an NVIDIA driver; {install_extra('tensorrt')}"
        ) from error
    check_version("cuda-bindings", str(cuda.bindings.__version__), OLDEST_CUDA)
    return join(tensorrt, runtime)


def check_version(package: str, version: str, oldest: tuple[int, ...]) -> None:
    """UNSUPPORTED if the package is older."""
    numbers = [int(part) for part in re.findall(r"\d+", version)[: len(oldest)]]
    if tuple(numbers) < oldest:
        needed = ".".join(map(str, oldest))
        raise unsupported(f"{package} {version} is installed; {needed} or newer is needed")


def join(trt: Any, cudart: Any) -> Libraries:
    """Prepare the modules: connect TensorRT's log and register the plugins that come with it."""
    check_version("TensorRT", str(trt.__version__), OLDEST)
    errors = Errors()
    logger = _make_logger(trt, errors)
    trt.init_libnvinfer_plugins(logger, "")
    return Libraries(trt, cudart, logger, errors)


def _make_logger(trt: Any, errors: Errors) -> Any:
    """A logger whose lines go to the server's log; errors are kept as well, for the error that the caller raises."""
    severity = trt.ILogger.Severity
    levels = {
        severity.INTERNAL_ERROR: logging.ERROR,
        severity.ERROR: logging.ERROR,
        severity.WARNING: logging.WARNING,
        severity.INFO: logging.DEBUG,
    }

    class Logger(trt.ILogger):  # type: ignore[misc,name-defined,unused-ignore]  # the package has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            level = levels.get(severity)
            if level is None:
                return
            if level == logging.ERROR:
                errors.add(msg)
            log.log(level, "TensorRT: %s", msg)

    return Logger()
