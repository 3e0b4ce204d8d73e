"""Requests of a model to another model."""

from typing import NoReturn

from halimede.backends.python.utils.errors import TritonModelException


def infer(model_name: str, decoupled: bool) -> NoReturn:
    """Always TritonModelException: there is no way from a model's process to another model yet."""
    del decoupled
    raise TritonModelException(
        f"Failed for execute the inference request. Calls between models are not supported by this version"
        f"{f' (asked for model {model_name!r})' if model_name else ''}."
    )
