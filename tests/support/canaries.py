"""Models with code that runs when they are loaded, and writes down in which process: one of each backend that can have
such a model.

A backend's canary writes one model directory. `executes` is whether a load certainly runs the code, and not only if the
backend unpickles a file that it refuses.
"""

import json
import pickle
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.model_files import SAMPLES
from support.models import write_config
from support.plugin import PLAIN_BACKEND, install_backend

PROGRAM = """
import os
descriptor = os.open({marker!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.write(descriptor, f"{{os.getpid()}}\\n".encode())
os.close(descriptor)
"""


class Canary:
    """An object whose unpickling executes a program. It becomes a number."""

    def __init__(self, marker: Path) -> None:
        self.program = f"exec({PROGRAM.format(marker=str(marker))!r}) or 3"

    def __reduce__(self) -> tuple[object, ...]:
        return eval, (self.program,)


def pickled(marker: Path) -> bytes:
    return pickle.dumps(Canary(marker))


TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
"""


def write_python(directory: Path, marker: Path) -> None:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.py").write_text(
        PROGRAM.format(marker=str(marker))
        + "\n\nclass TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
    )
    write_config(directory, f'backend: "python"\n{TENSORS}')


def write_sklearn(directory: Path, marker: Path) -> None:
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.joblib").write_bytes(pickled(marker))
    write_config(directory, 'backend: "sklearn"')


def write_pytorch(directory: Path, marker: Path) -> None:
    (directory / "1").mkdir(parents=True)
    with zipfile.ZipFile(directory / "1" / "model.pt", "w") as archive:
        archive.writestr("m/data.pkl", pickled(marker))
        archive.writestr("m/version", "3\n")
    write_config(directory, f'backend: "pytorch"\n{TENSORS}')


_VECTOR = {"dtype": 7, "sizes": [{"as_int": 2}], "requires_grad": False, "device": {"type": "cpu", "index": None}}
_X = {"arg": {"as_tensor": {"name": "x"}}}
_LEAF = {"type": None, "context": None, "children_spec": []}
_ARGUMENTS = {"type": "builtins.tuple", "context": "null", "children_spec": [_LEAF]}
_NO_KEYWORDS = {"type": "builtins.dict", "context": "[]", "children_spec": []}
_CALL = {"type": "builtins.tuple", "context": "null", "children_spec": [_ARGUMENTS, _NO_KEYWORDS]}
_PROGRAM = {
    "graph_module": {
        "graph": {
            "inputs": [_X["arg"]],
            "outputs": [_X["arg"]],
            "nodes": [],
            "tensor_values": {
                "x": {**_VECTOR, "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}
            },
            "sym_int_values": {},
            "sym_bool_values": {},
        },
        "signature": {"input_specs": [{"user_input": _X}], "output_specs": [{"user_output": _X}]},
        "module_call_graph": [
            {
                "fqn": "",
                "signature": {
                    "inputs": [],
                    "outputs": [],
                    "in_spec": json.dumps([1, _CALL]),
                    "out_spec": json.dumps([1, _LEAF]),
                },
            }
        ],
    },
    "opset_version": {"aten": 10},
    "range_constraints": {},
    "schema_version": {"major": 8, "minor": 1},
}
"""What torch.export writes for a function FP32[2] -> FP32[2] that returns its argument."""


def exported_program(path: Path, marker: Path, more: Mapping[str, str] = {}) -> Path:
    """An archive of torch.export whose weight is a canary. `more` are members beside its own."""
    weight = {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}
    members = {
        "archive_format": "pt2",
        "archive_version": "0",
        "byteorder": "little",
        "version": "3",
        "models/model.json": json.dumps(_PROGRAM),
        "data/sample_inputs/model.pt": "",
        "data/weights/model_weights_config.json": json.dumps({"config": {"w": weight}}),
        "data/weights/weight_0": pickle.dumps(Canary(marker), 2),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**members, **more}.items():
            archive.writestr(f"x/{name}", content)
    return path


LIBRARY = """
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void opened(void) {{
    FILE *file = fopen("{marker}", "a");
    fprintf(file, "%d\\n", (int)getpid());
    fclose(file);
}}
"""


def write_openvino(directory: Path, marker: Path) -> None:
    """A model that names a library with operations of its own."""
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.xml").write_bytes(SAMPLES["openvino"][1])
    (directory / "1" / "model.bin").touch()
    source, library = directory / "1" / "library.c", directory / "1" / "library.so"
    source.write_text(LIBRARY.format(marker=marker))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    parameters = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in {"ISOLATION": "process", "CPU_EXTENSION_PATH": str(library)}.items()
    )
    write_config(directory, f'backend: "openvino"\n{parameters}')


def write_pickler(directory: Path, marker: Path) -> None:
    """Without a configuration: the backend reads it from the pickle."""
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "model.pkl").write_bytes(pickled(marker))
    write_config(directory, 'backend: "pickler"')


def write_careless(directory: Path, marker: Path) -> None:
    write_pickler(directory, marker)
    write_config(directory, 'backend: "careless"')


@dataclass(frozen=True)
class Writer:
    write: Callable[[Path, Path], None]
    executes: bool = True


CANARIES = {
    "python": Writer(write_python),
    "pickler": Writer(write_pickler),
    "openvino": Writer(write_openvino),
    "sklearn": Writer(write_sklearn),
    # It refuses the file before it unpickles it.
    "pytorch": Writer(write_pytorch, executes=False),
}
"""By backend. `pickler` is a plug-in of these tests."""

PICKLER = (
    PLAIN_BACKEND
    + '''
import pickle

from halimede.core.config.autocomplete import ModelSignature, TensorSignature, complete
from halimede.core.types import DataType


class PicklerBackend(PlainBackend):
    """Unpickles a factor, to complete a configuration and to load a model."""

    default_model_filename = "model.pkl"
    isolation = "process"
    unpickles = ("*.pkl",)

    def autocomplete(self, config, source):
        unpickled(source)
        tensors = (TensorSignature("IN", DataType.FP32, (-1, 2)),), (TensorSignature("OUT", DataType.FP32, (-1, 2)),)
        return complete(config, ModelSignature(*tensors))[0]

    def check(self, config, source):
        self.load(config, source)

    def load(self, config, source):
        return Model(unpickled(source))


class CarelessBackend(PicklerBackend):
    isolation = "thread"


def unpickled(source):
    if not source.allow_pickle:
        raise ValueError("it may have been replaced by a pickle")
    return pickle.loads(source.artifact.read_bytes())


class Model:
    def __init__(self, factor):
        self.factor = factor

    def create_instance(self, placement):
        return self

    def run(self, inputs, outputs, context):
        return {"OUT": inputs["IN"] * self.factor}

    def close(self):
        pass
'''
)


def install_pickler(site: Path) -> dict[str, str]:
    """Install the backends `pickler`, and `careless`, which unpickles in the server. Returns the environment."""
    install_backend(site, "careless", PICKLER, "CarelessBackend")
    return install_backend(site, "pickler", PICKLER, "PicklerBackend")
