"""The error of a failed request of a python model, and the model's module."""

import sys
from types import ModuleType

from halimede.core.types import ErrorCode, InferenceError

FAILED = "Failed to process the request(s) for model instance 'm_0', message: "


def imported() -> ModuleType:
    """The model's module."""
    return sys.modules["1.model"]


def failure(text: str, code: ErrorCode = ErrorCode.INTERNAL) -> InferenceError:
    return InferenceError(code, FAILED + text)
