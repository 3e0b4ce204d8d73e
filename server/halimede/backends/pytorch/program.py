"""The interface of a loaded model file, and the programs of `.pt2` files."""

import importlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from halimede.backends.pytorch.exported import ExportedTensor
from halimede.backends.pytorch.runtime import runtime
from halimede.backends.pytorch.sizes import SizeCheck
from halimede.core.types.error import clip, invalid

MOST_SHAPES = 1024
"""Shapes of batches that are remembered as checked by an exported program."""


class Program(Protocol):
    """A model on its device. It gets tensors and lists of strings by the names of the configuration."""

    is_writing: bool
    """Whether it may write to its inputs."""
    is_stateful: bool
    """Whether a run may change the results of later ones."""

    def call(self, values: Mapping[str, Any]) -> Any:  # Any: torch.Tensor, and whatever a model returns
        """What the model returns."""


class ExportedProgram:
    """A program of torch.export. Its results are a flat list.

    torch.export's own module checks the shapes of its arguments each time, and takes them apart and together; that
    costs several times more than a small model. So each shape is checked once, and then the graph is called itself.
    """

    def __init__(self, path: Path, model: str, device: Any | None, inputs: Mapping[str, int]) -> None:
        """`inputs` are the positions of the configured names."""
        torch = runtime()
        program = torch.export.load(str(path))
        devices = _devices(program)
        if device is not None and devices - {device}:
            program = importlib.import_module("torch.export.passes").move_to_device_pass(program, device)
        # With KIND_MODEL the inputs go to the program's device; if it has several, to the CPU.
        self.device = device or (devices.pop() if len(devices) == 1 else torch.device("cpu"))
        self._module = program.module()
        self._spec = program.call_spec.in_spec
        self._order = sorted(inputs, key=inputs.__getitem__)
        kinds = torch.export.graph_signature.InputKind
        tensor = torch.export.graph_signature.TensorArgument
        self._template: list[Any] = []
        """The graph's arguments: weights and constants, and None for each input."""
        self._flat: list[Any] = []
        """The caller's arguments in the same way."""
        self._positions: list[int] = []
        self._flat_positions: list[int] = []
        known = {**program.state_dict, **program.constants}
        is_plain = all(
            each.kind is torch.export.graph_signature.OutputKind.USER_OUTPUT and isinstance(each.arg, tensor)
            for each in program.graph_signature.output_specs
        )
        for spec in program.graph_signature.input_specs:
            if spec.kind is kinds.USER_INPUT:
                if isinstance(spec.arg, tensor):
                    self._positions.append(len(self._template))
                    self._flat_positions.append(len(self._flat))
                value = getattr(spec.arg, "value", None)
                self._flat.append(value)
            else:
                value = known.get(spec.target)
                is_plain = is_plain and isinstance(value, torch.Tensor)
            self._template.append(value)
        self.is_stateful = not is_plain
        self.is_writing = not is_plain
        self._graph = program.graph_module if is_plain else None
        self.checked: set[tuple[Any, ...]] = set()
        """The shapes of batches that the program has accepted."""
        self._model = model

    def call(self, values: Mapping[str, Any]) -> Any:
        tensors = [values[name] for name in self._order]
        shapes = tuple(tensor.shape for tensor in tensors)
        if self._graph is not None and shapes in self.checked:
            arguments = self._template.copy()
            for position, tensor in zip(self._positions, tensors, strict=True):
                arguments[position] = tensor
            return self._graph(*arguments)
        pytree = runtime().utils._pytree
        flat = self._flat.copy()
        for position, tensor in zip(self._flat_positions, tensors, strict=True):
            flat[position] = tensor
        arguments, keywords = pytree.tree_unflatten(flat, self._spec)
        try:
            result = self._module(*arguments, **keywords)
        except AssertionError as error:
            # A guard: the sizes of the client do not fit.
            text = f"model '{clip(self._model)}': its exported program refuses the shapes: {clip(str(error))}"
            raise invalid(text) from error
        if len(self.checked) < MOST_SHAPES:
            self.checked.add(shapes)
        return pytree.tree_flatten(result)[0]


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """PyTorch's C++ code unpacks the archive into TMPDIR."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _devices(program: Any) -> set[Any]:  # Any: a torch ExportedProgram
    torch = runtime()
    found = {each.device for each in program.state_dict.values()}
    found |= {each.device for each in program.constants.values() if isinstance(each, torch.Tensor)}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            found.add(value.device)
    return found


class PackageProgram:
    """An AOTInductor package: a compiled library in the archive. Its results are a flat list."""

    # The library does not say whether it writes to its inputs.
    is_writing = True
    is_stateful = False

    def __init__(
        self,
        path: Path,
        model: str,
        name: str,
        device: Any | None,
        inputs: Mapping[str, int],
        tensors: Sequence[ExportedTensor] | None,
    ) -> None:
        """`name` is that of the model in the archive; `tensors` None: the library has to check its inputs itself."""
        if tensors is None:
            # Read by the library at its first run.
            os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
        self._check = None if tensors is None else SizeCheck(tensors, inputs)
        self._order = sorted(inputs, key=inputs.__getitem__)
        torch = runtime()
        loader = importlib.import_module("torch._C._aoti").AOTIModelPackageLoader
        compiled_for = str(loader.load_metadata_from_package(str(path), name).get("AOTI_DEVICE_KEY", ""))
        if device is not None and compiled_for not in ("", device.type):
            kind = "KIND_GPU" if compiled_for == "cuda" else "KIND_CPU"
            raise invalid(
                f"model '{clip(model)}': the package was compiled for '{compiled_for}', and its instance runs on "
                f"'{device.type}'; write instance_group [ {{ kind: {kind} }} ], or compile it for '{device.type}'"
            )
        self.device = device if device is not None else torch.device(compiled_for or "cpu")
        index = -1 if self.device.type == "cpu" else self.device.index or 0
        self._folder = tempfile.TemporaryDirectory(prefix="halimede-pytorch-", ignore_cleanup_errors=True)
        try:
            with _temporary_files_in(self._folder.name):
                # PyTorch's own function for packages unpickles the exported programs that are beside the library.
                self._loader = loader(str(path), name, run_single_threaded=True, num_runners=1, device_index=index)
        except BaseException:
            self._folder.cleanup()
            raise
        if self.device.type == "cpu":
            # The library is mapped. Its file would stay behind if the process was killed. For a GPU there are more
            # files, which are read at first runs.
            self._folder.cleanup()

    def call(self, values: Mapping[str, Any]) -> Any:
        tensors = [values[name] for name in self._order]
        if self._check is not None:
            self._check.check([tensor.shape for tensor in tensors])
        return self._loader.boxed_run(tensors)
