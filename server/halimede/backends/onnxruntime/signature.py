"""Read the inputs and outputs of an ONNX model, and check a configuration against them."""

import logging
import mmap
from pathlib import Path
from typing import Any

from halimede.backends.onnxruntime.session import DATATYPES
from halimede.backends.protobuf_fields import Data, Range, nested, text
from halimede.core.config.autocomplete import ModelSignature, Scalars, TensorSignature, check_signature, find_scalars
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.sequence_tensors import model_inputs, model_outputs
from halimede.core.types import DataType, invalid, unsupported

log = logging.getLogger(__name__)


def read_signature(session: Any, path: Path, config: ModelConfig) -> ModelSignature:
    """The model's tensors, in its order.

    An overridable initializer is an input if the configuration names it. An output that is not a tensor (the map of a
    scikit-learn classifier) is ignored unless the configuration names it; then, as for any such input, INVALID_ARG.
    """
    configured = {each.name for each in model_inputs(config)} | {each.name for each in model_outputs(config)}
    overridable = [each for each in session.get_overridable_initializers() if each.name in configured]
    inputs = [*session.get_inputs(), *overridable]
    outputs = []
    for each in session.get_outputs():
        if each.type in DATATYPES or each.name in configured:
            outputs.append(each)
        else:
            log.warning("model '%s': output '%s' is left out: it is a %s", config.name, each.name, each.type)
    # The runtime reports the same empty shape for a scalar and for a tensor of unknown rank; the file does not.
    is_unsure = any(not each.shape for each in (*inputs, *outputs))
    unknown = tensors_without_rank(path) if is_unsure else frozenset()
    return ModelSignature(
        tuple(_tensor(each, unknown, config) for each in inputs),
        tuple(_tensor(each, unknown, config) for each in outputs),
    )


def check_model(config: ModelConfig, path: Path, session: Any) -> Scalars:
    """The scalars of the model.

    INVALID_ARG with every disagreement between configuration and model; UNSUPPORTED for types that cannot run.
    """
    signature = read_signature(session, path, config)
    problems = check_signature(config, signature)
    if problems:
        raise invalid("; ".join(problem.message for problem in problems))
    strings = [each.name for each in model_inputs(config) if each.data_type is DataType.BYTES]
    bfloats = [each.name for each in model_outputs(config) if each.data_type is DataType.BF16]
    if strings and bfloats:
        raise unsupported(
            f"model '{config.name}': input '{strings[0]}' is TYPE_STRING and output '{bfloats[0]}' is TYPE_BF16; "
            "onnxruntime's Python interface cannot run both in one model"
        )
    return find_scalars(config, signature)


def tensors_without_rank(path: Path) -> frozenset[str]:
    """The graph's inputs and outputs without any shape. Weights are skipped, not read."""
    names: set[str] = set()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for graph in nested(data, (0, len(data)), 7):  # ModelProto.graph
                for field in (11, 12):  # GraphProto.input, .output
                    names |= {name for info in nested(data, graph, field) if (name := _rankless(data, info))}
    except ValueError:
        # The file is not protobuf (but the runtime's own ORT format): use only what the runtime reports.
        return frozenset()
    return frozenset(names)


def _rankless(data: Data, info: Range) -> str:
    """The name of a ValueInfoProto without a shape, "" if it has one."""
    name = "".join(text(data, at) for at in nested(data, info, 1))
    for type_at in nested(data, info, 2):  # ValueInfoProto.type
        for tensor_at in nested(data, type_at, 1):  # TypeProto.tensor_type
            if any(True for _ in nested(data, tensor_at, 2)):  # TypeProto.Tensor.shape
                return ""
    return name


def _tensor(node: Any, unknown: frozenset[str], config: ModelConfig) -> TensorSignature:
    datatype = DATATYPES.get(node.type)
    if datatype is None:
        raise invalid(
            f"model '{config.name}': unsupported ONNX type '{node.type}' for I/O '{node.name}', expected a tensor of "
            "a datatype that the protocol has"
        )
    if node.name in unknown and not node.shape:
        return TensorSignature(node.name, datatype, None)
    # A symbolic dimension is reported as its name or None.
    shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
    return TensorSignature(node.name, datatype, shape)
