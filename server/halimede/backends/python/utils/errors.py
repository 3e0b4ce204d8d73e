"""TritonError and TritonModelException, and the conversion of a model's exceptions to error texts."""

import os
import sys
import traceback
from collections.abc import Iterable, Sequence

from halimede.backends.python.utils.arguments import ProtocolNumber, text_of
from halimede.core.types import ErrorCode, InferenceError

CAUSE_LIMIT = 1024
"""Maximum number of characters of an exception in an error; the log has the full text."""
CONTEXT_FAULTS = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    # Every CUDA error of PyTorch ends with a hint on device-side assertions.
    "device-side assert triggered",
    "unspecified launch failure",
    "hardware stack error",
    "invalid program counter",
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "the launch timed out",
    "global/shared address space",
    "over nvlink or a hardware error",
    "tensor memory not completely freed",
    "mps client has been terminated",
    "external entity outside of cuda",
)
"""Texts of CUDA errors after which the process has to be restarted, by its manual; others, as out of memory, pass."""
CONTEXT_FAULT_NAMES = (
    "cuda_error_contained",
    "cuda_error_ecc_uncorrectable",
    "cuda_error_nvlink_uncorrectable",
    "cuda_error_illegal_address",
    "cuda_error_launch_timeout",
    "cuda_error_assert",
    "cuda_error_hardware_stack_error",
    "cuda_error_illegal_instruction",
    "cuda_error_misaligned_address",
    "cuda_error_invalid_address_space",
    "cuda_error_invalid_pc",
    "cuda_error_launch_failed",
    "cuda_error_tensor_memory_leak",
    "cuda_error_mps_client_terminated",
    "cuda_error_external_device",
)
"""The names of these errors in CUDA's driver, which are all that some libraries say, such as numba."""
CUDA_LIBRARIES = ("cuda", "cublas", "cudnn", "cufft", "cusolver", "cusparse")
"""What the error of a library that computes with CUDA has in its text."""
NO_DEBUGGER = "a served model has no terminal for a debugger; run it by `halimede debug MODEL_DIR REQUEST.json`"
"""For a breakpoint() in a served model."""
TRACEBACK_LIMIT = 12 << 10
"""Maximum number of characters of a traceback, its last ones: less than the limit for a line from a worker process."""


class TritonModelException(Exception):
    """The exception that the functions of this module raise."""

    __module__ = "c_python_backend_utils"


class TritonErrorCode(ProtocolNumber):
    """The protocol's error codes."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError(Exception):
    """The error of a response. If a model raises it, all requests of the batch fail with its code."""

    __module__ = "c_python_backend_utils"

    UNKNOWN = TritonErrorCode.UNKNOWN
    INTERNAL = TritonErrorCode.INTERNAL
    NOT_FOUND = TritonErrorCode.NOT_FOUND
    INVALID_ARG = TritonErrorCode.INVALID_ARG
    UNAVAILABLE = TritonErrorCode.UNAVAILABLE
    UNSUPPORTED = TritonErrorCode.UNSUPPORTED
    ALREADY_EXISTS = TritonErrorCode.ALREADY_EXISTS
    CANCELLED = TritonErrorCode.CANCELLED

    def __init__(self, message: str, code: TritonErrorCode = TritonErrorCode.INTERNAL) -> None:
        message = text_of(message, "TritonError", "message")
        if not isinstance(code, TritonErrorCode):
            raise TypeError(f"TritonError(): 'code' must be one of TritonError's codes, not {type(code).__name__}")
        super().__init__(message)
        self._message = message
        self._code = code

    def code(self) -> TritonErrorCode:
        return self._code

    def message(self) -> str:
        return self._message


def code_of(error: BaseException) -> ErrorCode:
    """The error code for an exception of a model."""
    return ErrorCode[error.code().name] if isinstance(error, TritonError) else ErrorCode.INTERNAL


def is_device_lost(error: BaseException) -> bool:
    """Whether it shows that CUDA's context is corrupt, so that this process can no longer use the device.

    A kernel fails after its call has returned. A call in between may get the error of another library, such as cuBLAS's
    CUBLAS_STATUS_EXECUTION_FAILED, which has many causes. So after an error of such a library PyTorch is asked, if the
    process uses CUDA by it: a corrupt context answers every call with its first error.
    """
    text = _lower_text(error)
    if not any(library in text for library in CUDA_LIBRARIES):
        return False
    return _names_context_fault(text) or _names_context_fault(_error_of_torch())


def _names_context_fault(text: str) -> bool:
    return "cuda" in text and any(fault in text for fault in (*CONTEXT_FAULTS, *CONTEXT_FAULT_NAMES))


def _error_of_torch() -> str:
    """The text of the error that PyTorch gets from its device; "" if there is none, or it does not use CUDA."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  whatever a model has imported under this name
        return _lower_text(error)
    return ""


def _lower_text(error: BaseException) -> str:
    try:
        return str(error).lower()
    except BaseException:  # noqa: BLE001  the model's own __str__
        return ""


def inference_error(error: TritonError) -> InferenceError:
    return InferenceError(ErrorCode[error.code().name], bounded(error.message()))


def triton_error(error: InferenceError) -> TritonError:
    return TritonError(error.message, TritonErrorCode[error.code.name])


def bounded(text: str) -> str:
    """Valid Unicode text of at most 1,024 characters, with `...` if it was cut."""
    if len(text) > CAUSE_LIMIT:
        text = text[: CAUSE_LIMIT - 3] + "..."
    return text.encode("utf-8", "replace").decode()


def describe(error: BaseException, directories: Iterable[str] = ()) -> str:
    """`ValueError: boom`, without the directories in the exception's own file names and those under `directories`.

    Never raises, even if the model's exception does. File names are kept but their directories are removed, because
    the text goes to clients.
    """
    name = type(error).__name__
    try:
        text = str(error) or (NO_DEBUGGER if name == "BdbQuit" and not _has_input() else "")
        for attribute in ("filename", "filename2", "path"):
            path = getattr(error, attribute, None)
            if isinstance(path, str) and os.path.isabs(path):
                text = text.replace(path, os.path.basename(path.rstrip("/")) or "/")
    except BaseException:  # noqa: BLE001  the model's own __str__
        return f"{name}: its text cannot be shown, because its __str__ fails"
    for directory in directories:
        text = text.replace(directory.rstrip("/") + "/", "").replace(directory, os.path.basename(directory))
    return bounded(f"{name}: {text}" if text else name)


def _has_input() -> bool:
    """False in the process of a served model, where a debugger reads the end of its input at once and quits."""
    return not os.path.samestat(os.fstat(0), os.stat(os.devnull))


def full_traceback(error: BaseException, directories: Sequence[str] = ()) -> str:
    """The traceback for the log, from the first frame in one of the model's own `directories`, if there is one.

    Of a file that cannot be compiled no frame is shown: all are those of the server, and the error names the file.
    Never raises; a long traceback is cut at the beginning.
    """
    try:
        begin, own = error.__traceback__, tuple(directories)
        while begin is not None and not begin.tb_frame.f_code.co_filename.startswith(own):
            begin = begin.tb_next
        if begin is None and isinstance(error, SyntaxError):
            return "".join(("Traceback (most recent call last):\n", *traceback.format_exception_only(error)))
        text = "".join(traceback.format_exception(type(error), error, begin or error.__traceback__))
    except BaseException:  # noqa: BLE001  the model's own __str__, or no memory left
        return f"{type(error).__name__} (its traceback cannot be shown)"
    return text if len(text) <= TRACEBACK_LIMIT else "..." + text[-TRACEBACK_LIMIT:]
