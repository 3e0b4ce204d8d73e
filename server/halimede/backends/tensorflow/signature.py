"""Choose the graph and the signature of a SavedModel, and convert them to the server's types. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from halimede.backends.tensorflow.model_file import FileTensor, FrozenGraph, MetaGraph, Signature, node_of
from halimede.core.config.autocomplete import ModelSignature, TensorSignature, check_signature
from halimede.core.config.made_inputs import made_inputs
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.sequence_tensors import model_inputs, model_outputs
from halimede.core.types import DataType
from halimede.core.types.error import clip, invalid

DEFAULT_TAG, DEFAULT_SIGNATURE = "serve", "serving_default"

_NO_SERVING = ("__saved_model_init_op", "__saved_model_train_op")
"""Signatures that are not for inference."""

DATATYPES: Mapping[int, DataType] = {
    1: DataType.FP32,
    2: DataType.FP64,
    3: DataType.INT32,
    4: DataType.UINT8,
    5: DataType.INT16,
    6: DataType.INT8,
    7: DataType.BYTES,
    9: DataType.INT64,
    10: DataType.BOOL,
    14: DataType.BF16,
    17: DataType.UINT16,
    19: DataType.FP16,
    22: DataType.UINT32,
    23: DataType.UINT64,
}
"""Datatype by TensorFlow's number. The others (complex and quantized numbers, resources) have no wire datatype."""

_OTHERS = {8: "complex64", 11: "qint8", 12: "quint8", 13: "qint32", 18: "complex128", 20: "resource", 21: "variant"}


def choose_graph(graphs: Sequence[MetaGraph], wanted: str, model: str) -> MetaGraph:
    """The graph with this tag, "" for the default one. INVALID_ARG lists the tags that there are."""
    tags = set((wanted or DEFAULT_TAG).split(","))
    exact = [each for each in graphs if set(each.tags) == tags]
    found = exact or [each for each in graphs if tags <= set(each.tags)]
    if len(found) == 1 or exact:
        return found[0]
    there = "; ".join(f"'{','.join(each.tags)}'" for each in graphs) or "none"
    problem = "several graphs have" if found else "no graph has"
    raise invalid(
        f"model '{clip(model)}': {problem} the tag '{clip(wanted or DEFAULT_TAG)}' (parameter TF_GRAPH_TAG); the "
        f"tags of the SavedModel's graphs are {clip(there)}"
    )


def choose_signature(graph: MetaGraph, wanted: str, model: str) -> Signature:
    """The signature of this name; "" for `serving_default`, or else the only one. INVALID_ARG lists those there are."""
    names = [name for name in graph.signatures if name not in _NO_SERVING]
    name = wanted or (DEFAULT_SIGNATURE if DEFAULT_SIGNATURE in names or len(names) != 1 else names[0])
    if name in graph.signatures:
        return graph.signatures[name]
    hint = (
        f"it has {clip(', '.join(names))}"
        if names
        else "it has none: give `signatures=` to tf.saved_model.save, or use the `export` method of a Keras model"
    )
    raise invalid(
        f"model '{clip(model)}': the SavedModel has no signature '{clip(name)}' (parameter TF_SIGNATURE_DEF); {hint}"
    )


def model_signature(signature: Signature, config: ModelConfig) -> tuple[ModelSignature, tuple[str, ...]]:
    """The signature in the server's types, and notes on outputs that are left out because they have no datatype.

    INVALID_ARG if an input, or an output that the configuration names, has no datatype.
    """
    configured = {each.name for each in model_outputs(config)}
    notes: list[str] = []
    outputs = []
    for each in signature.outputs:
        if each.name in configured or not (problem := _problem(each)):
            outputs.append(each)
        else:
            notes.append(f"model '{clip(config.name)}': output '{clip(each.name)}' is left out: it is {problem}")
    return ModelSignature(_tensors(signature.inputs, config), _tensors(outputs, config)), tuple(notes)


def frozen_outline(nodes: FrozenGraph, config: ModelConfig) -> ModelSignature:
    """What the file of a frozen graph says without TensorFlow: names, and the datatypes and shapes of placeholders.

    Of other tensors that the configuration names it repeats the datatype. The inputs are those that the configuration
    names, and the placeholders that its outputs need.
    """

    def found(name: str, configured: DataType) -> list[TensorSignature]:
        node = nodes.nodes.get(node_of(name))
        if node is None:
            return []
        return [TensorSignature(name, DATATYPES.get(node.number, configured), node.shape if node.number else None)]

    inputs = {each.name: each.data_type for each in model_inputs(config)}
    inputs |= {each.name: each.datatypes[0] for each in made_inputs(config)}
    outputs = {each.name: each.data_type for each in model_outputs(config)}
    needed = nodes.needed(tuple(outputs), frozenset(map(node_of, inputs)))
    inputs |= dict.fromkeys(needed, DataType.INVALID)
    outputs |= dict.fromkeys((name for name in nodes.ends() if name not in outputs), DataType.INVALID)
    return ModelSignature(
        tuple(each for name, datatype in inputs.items() for each in found(name, datatype)),
        tuple(each for name, datatype in outputs.items() for each in found(name, datatype)),
    )


def check_tensors(config: ModelConfig, signature: ModelSignature, placeholders: Iterable[str] = ()) -> None:
    """INVALID_ARG with every disagreement between a complete configuration and the model's tensors.

    `placeholders` are the inputs without a default in the file, which requests cannot leave out.
    """
    problems = [problem.message for problem in check_signature(config, signature)]
    optional = {each.name for each in model_inputs(config) if each.optional}
    problems += [
        f"unable to load model '{clip(config.name)}', input '{clip(name)}' is optional in the configuration, and the "
        "model has no default for it"
        for name in placeholders
        if name in optional
    ]
    if problems:
        raise invalid("; ".join(problems))


def _tensors(tensors: Iterable[FileTensor], config: ModelConfig) -> tuple[TensorSignature, ...]:
    return tuple(_tensor(each, config) for each in tensors)


def _tensor(tensor: FileTensor, config: ModelConfig) -> TensorSignature:
    if problem := _problem(tensor):
        raise invalid(
            f"model '{clip(config.name)}': '{clip(tensor.name)}' is {problem}, and the protocol has no datatype for it"
        )
    return TensorSignature(tensor.name, DATATYPES[tensor.number], tensor.shape)


def _problem(tensor: FileTensor) -> str:
    """What the tensor is, if it is not an array of a datatype of the protocol."""
    if tensor.encoding:
        return f"a {tensor.encoding} tensor"
    if tensor.number in DATATYPES:
        return ""
    return f"a tensor of {_OTHERS.get(tensor.number, f'TensorFlow type {tensor.number}')}"
