"""The openvino module, without its telemetry, and its calls that read and compile models."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

from halimede.backends.extras import install_extra
from halimede.backends.openvino.errors import openvino_error
from halimede.backends.openvino.options import Properties
from halimede.core.types import unsupported

TELEMETRY = "openvino_telemetry"


@cache
def runtime() -> Any:  # Any: OpenVINO's stubs do not pass mypy
    """The openvino module; UNSUPPORTED if it is not installed."""
    # The import of openvino sends a message to Google Analytics and writes into the home directory, unless the package
    # for that cannot be imported; openvino works without it. A server must not do that without consent.
    sys.modules[TELEMETRY] = None  # type: ignore[assignment]  # None makes its import fail
    try:
        import openvino  # type: ignore[import-untyped]  # the package is not marked as typed
    except ImportError as error:
        raise unsupported(f"openvino cannot be imported ({error}); {install_extra('openvino')}") from error
    return openvino


def operations() -> Any:
    """The operations that graphs are changed with."""
    from openvino import opset15

    return opset15


@cache
def _core() -> Any:
    """OpenVINO's plug-ins, which all models of the process share."""
    return runtime().Core()


def open_core(extension: str) -> Any:
    """The core for a model. The library `extension`, if not "", runs code in this process when it is opened."""
    if not extension:
        return _core()
    core = runtime().Core()
    try:
        core.add_extension(extension)
    except RuntimeError as error:
        raise openvino_error(error, f"with CPU_EXTENSION_PATH '{extension}'") from error
    return core


def read_model(core: Any, path: Path) -> Any:
    """The graph in a model file. Weights are read and not mapped: a file that changes would end the server."""
    try:
        return core.read_model(str(path), config={"ENABLE_MMAP": False})
    except (RuntimeError, UnicodeDecodeError) as error:
        # Python cannot read a text of OpenVINO's that quotes the file, if that has names that are not UTF-8.
        raise openvino_error(error, f"in '{path}'") from error


def compile_model(core: Any, graph: Any, device: str, properties: Properties) -> Any:
    """The graph compiled for the device; INTERNAL with OpenVINO's text, and the devices that there are."""
    try:
        return core.compile_model(graph, device, dict(properties))
    except RuntimeError as error:
        available = ", ".join(core.available_devices)
        raise openvino_error(error, f"on device '{device}' (available: {available})") from error


def supports(device: str, key: str) -> bool:
    """Whether a device has a property of this name. Virtual devices pass properties on, so they have all."""
    if device.partition(":")[0].partition(".")[0] not in ("CPU", "GPU", "NPU"):
        return True
    try:
        return key in _properties_of(device)
    except RuntimeError:
        # The device is not there, which the compilation reports.
        return True


@cache  # each of these calls loses some memory
def _properties_of(device: str) -> frozenset[str]:
    return frozenset(_core().get_property(device, "SUPPORTED_PROPERTIES"))
