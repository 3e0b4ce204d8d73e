"""TorchScript files: what `forward` takes and returns, and calls of it."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halimede.backends.pytorch.naming import Argument, ArgumentKind, Results
from halimede.backends.pytorch.runtime import runtime
from halimede.core.types.error import clip, internal, invalid

log = logging.getLogger(__name__)

HINTS = (
    "Search for `cuda",
    "CUDA kernel errors might be asynchronously reported",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING",
    "Compile with `TORCH_USE_CUDA_DSA`",
    "Device-side assertions were explicitly omitted",
)
"""The beginnings of lines that PyTorch writes after every error of CUDA. They say nothing about this one."""


class ScriptProgram:
    """A TorchScript module on its device."""

    def __init__(self, path: Path, model: str, device: Any | None) -> None:
        torch = runtime()
        try:
            with warnings.catch_warnings():
                # Each call warns that TorchScript is deprecated.
                warnings.simplefilter("ignore", FutureWarning)
                self.module = torch.jit.load(str(path), map_location=device)
        except Exception as error:
            text = f"model '{clip(model)}': {path.name} cannot be loaded as TorchScript: {cause_of(error)}"
            raise internal(text) from error
        if not hasattr(self.module, "forward"):
            raise invalid(f"model '{clip(model)}': the TorchScript module in {path.name} has no method forward")
        if getattr(self.module, "training", False):
            note = "model '%s': %s was saved in training mode (dropout, batch norm); save it after model.eval()"
            log.warning(note, model, path.name)
        schema = self.module.forward.schema
        self.arguments = tuple(_argument(each) for each in schema.arguments[1:])
        self.results = _results(self.module, schema.returns, model)
        self.is_writing, self.is_stateful = _effects(self.module)
        self._call = Call(None, self.arguments)

    def bind(self, indexes: Mapping[str, int] | None) -> None:
        """The positions of the inputs among the arguments; None: one dictionary takes all."""
        self._call = Call(indexes, self.arguments)

    def call(self, values: Mapping[str, Any]) -> Any:
        return self._call(self.module, values)


class Call:
    """Calls of `forward` with values by the names of the configuration."""

    def __init__(self, indexes: Mapping[str, int] | None, arguments: Sequence[Argument]) -> None:
        """`indexes` are the positions of the names among the arguments; None: one dictionary takes all."""
        self._indexes = indexes
        self._order = sorted(indexes, key=indexes.__getitem__) if indexes is not None else ()
        self._has_gaps = indexes is not None and [indexes[name] for name in self._order] != list(range(len(indexes)))
        self._arguments = arguments

    def __call__(self, function: Any, values: Mapping[str, Any]) -> Any:  # Any: a torch.nn.Module, torch.Tensor
        if self._indexes is None:
            return function(dict(values))
        if len(values) == len(self._order) and not self._has_gaps:
            return function(*[values[name] for name in self._order])
        # By position, and by name from the first argument that is left out.
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for name in self._order:
            if name not in values:
                continue
            if self._indexes[name] == len(positional):
                positional.append(values[name])
            else:
                keywords[self._arguments[self._indexes[name]].name] = values[name]
        return function(*positional, **keywords)


def cause_of(error: BaseException) -> str:
    """The cause in an exception of PyTorch, without tracebacks of C++ and TorchScript, and without hints on CUDA."""
    text = str(error).partition("\nException raised from ")[0]
    text = "\n".join(line for line in text.splitlines() if not line.startswith(HINTS)).strip()
    lines = [line for line in text.splitlines() if line.strip()]
    if any(line.startswith("Traceback of TorchScript") for line in lines):
        return lines[-1].strip()
    name = type(error).__name__
    return f"{name}: {text}" if not text.startswith(name) else text


def _argument(argument: Any) -> Argument:  # Any: a torch Argument
    kind = argument.type
    if kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return Argument(argument.name, _kind(kind), argument.has_default_value(), str(argument.type))


def _kind(kind: Any) -> ArgumentKind:  # Any: a torch JitType
    match kind.kind():
        case "TensorType":
            return ArgumentKind.TENSOR
        case "ListType" if kind.getElementType().kind() == "StringType":
            return ArgumentKind.STRINGS
        case "DictType" if (kind.getKeyType().kind(), kind.getValueType().kind()) == ("StringType", "TensorType"):
            return ArgumentKind.DICT
    return ArgumentKind.OTHER


def _results(module: Any, returns: Sequence[Any], model: str) -> Results:
    if len(returns) != 1:
        return Results(count=len(returns))
    kind = returns[0].type
    match kind.kind():
        case "TensorType":
            return Results(count=1)
        case "TupleType":
            return Results(count=len(kind.elements()))
        case "ListType" if kind.getElementType().kind() == "StringType":
            return Results(count=1)
        case "ListType" if kind.getElementType().kind() == "TensorType":
            return Results()
        case "DictType":
            return Results(by_name=True, names=_keys(module))
    raise invalid(
        f"model '{clip(model)}': forward returns {clip(str(kind))}; it must return a tensor, a tuple or list of "
        "tensors, a dictionary of tensors by name, or a list of strings"
    )


def _keys(module: Any) -> tuple[str, ...] | None:
    """The keys of the dictionary that `forward` makes at its end, if they are constants."""
    (output,) = module.inlined_graph.outputs()
    node = output.node()
    if node.kind() != "prim::DictConstruct":
        return None
    keys = [each.toIValue() for each in node.inputs()][::2]
    return tuple(keys) if all(isinstance(key, str) for key in keys) else None


def _effects(module: Any) -> tuple[bool, bool]:
    """Whether `forward` may write to its arguments, and whether it may change the module."""
    try:
        graph = module.inlined_graph
        aliases = graph.alias_db()
        itself, *arguments = graph.inputs()
        is_writing = any(aliases.has_writers(each) for each in arguments)
        return is_writing, bool(aliases.has_writers(itself)) or _sets_attributes(graph)
    except RuntimeError:
        return True, True


def _sets_attributes(block: Any) -> bool:
    return any(
        node.kind() == "prim::SetAttr" or any(_sets_attributes(inner) for inner in node.blocks())
        for node in block.nodes()
    )
