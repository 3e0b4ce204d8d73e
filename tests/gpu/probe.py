"""Prints what this machine has for the tests on a GPU, as lines of JSON: an import may hang."""

import json
import platform
from collections.abc import Callable
from typing import Any


def devices() -> list[str]:
    from halimede.runtime.devices import read_inventory

    return [f"{each.kind.value} {each.uuid} {each.name}" for each in read_inventory(None).devices]


def driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return f"{pynvml.nvmlSystemGetDriverVersion()}, CUDA {pynvml.nvmlSystemGetCudaDriverVersion() / 1000:g}"


def torch() -> str:
    import torch

    return f"{torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices"


def onnxruntime() -> str:
    import onnxruntime

    return f"{onnxruntime.__version__}, {', '.join(onnxruntime.get_available_providers())}"


def cupy() -> str:
    import cupy

    return f"{cupy.__version__}, CUDA {cupy.cuda.runtime.runtimeGetVersion() / 1000:g}"


def attempt(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        return [] if read is devices else f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print(json.dumps({"python": platform.python_version()}), flush=True)
    for each in (devices, driver, torch, onnxruntime, cupy):
        found = attempt(each)
        print(json.dumps({each.__name__: found}), flush=True)
