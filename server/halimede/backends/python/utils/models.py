"""Functions that load, unload and check models on the server, and find the model's own directory."""

from typing import Any

from halimede.backends.python.utils.arguments import text_of, truth_of
from halimede.backends.python.utils.session import current
from halimede.backends.service_calls import IsModelReady, LoadModel, UnloadModel


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load a model of the repository; `config` (JSON) and `files` (`file:1/model.onnx`) replace its own."""
    where = "load_model"
    if files is not None and not isinstance(files, dict):
        raise TypeError(f"load_model(): 'files' must be a dict, not {type(files).__name__}")
    contents = {text_of(name, where, "files"): _content(name, content) for name, content in (files or {}).items()}
    call = LoadModel(text_of(model_name, where, "model_name"), text_of(config, where, "config"), contents)
    current().call(call, "Failed to load model: ")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; with `unload_dependents` also the models that it uses as steps, if it is an ensemble."""
    where = "unload_model"
    name, dependents = text_of(model_name, where, "model_name"), truth_of(unload_dependents, where, "unload_dependents")
    current().call(UnloadModel(name, dependents), "Failed to unload model: ")


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether the model, or this version of it, is ready for requests."""
    where = "is_model_ready"
    call = IsModelReady(text_of(model_name, where, "model_name"), text_of(model_version, where, "model_version"))
    return current().call(call, "Failed to check model readiness: ")


def get_model_dir() -> str:
    """The directory of the model's version, even if the code is elsewhere."""
    return current().model_dir


def _content(name: str, content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, (bytes, bytearray, memoryview)):
        return bytes(content)
    raise TypeError(f"load_model(): file '{name}' must be bytes, not {type(content).__name__}")
