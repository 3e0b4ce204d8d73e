"""Graphs as OpenVINO reads them: their ports, and the changes that fit them to a configuration.

OpenVINO's objects are Any, because its stubs do not pass mypy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halimede.backends.openvino.errors import openvino_error
from halimede.backends.openvino.options import OpenVinoOptions
from halimede.backends.openvino.runtime import operations, runtime
from halimede.backends.openvino.signature import NamedPort, Port, Ports, choose_ports
from halimede.core.config.made_inputs import made_inputs
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.sequence_tensors import model_inputs
from halimede.core.types import invalid

STRING = "string"
BATCH_HELP = (
    "set the parameters SKIP_OV_DYNAMIC_BATCHSIZE and ENABLE_BATCH_PADDING to YES to fill up each batch to the file's "
    "size, or max_batch_size to 0 to serve the file's shape"
)


def read_ports(graph: Any, config: ModelConfig) -> Ports:
    """The graph's inputs and outputs with their names. INVALID_ARG as `choose_ports`, or for names that are no text."""
    try:
        inputs = [_port(each, each.node.get_friendly_name()) for each in graph.inputs]
        outputs = [_port(each, _source_name(each.node.input_value(0))) for each in graph.outputs]
    except UnicodeDecodeError as error:
        raise invalid(f"unable to load model '{config.name}': the file has a name that is not UTF-8 text") from error
    return choose_ports(inputs, outputs, config)


def fit_shapes(graph: Any, config: ModelConfig, options: OpenVinoOptions) -> int:
    """Give the graph the shapes that the configuration needs. Returns the rows to which batches are filled up, or 0.

    A file whose batch has a fixed size gets one of any size, unless the options keep it. INVALID_ARG if it cannot.
    """
    ports = read_ports(graph, config)
    batched = _batched_inputs(ports, config) if config.max_batch_size else ()
    fixed = [each for each in batched if each.port.shape and each.port.shape[0] > 0]
    keeps = bool(fixed) and (options.keeps_batch or options.pads_batches)
    rows = -1
    if keeps:
        rows = _fixed_rows(fixed, ports, config)
    shapes = {} if keeps else {each.index: (rows, *(each.port.shape or ())[1:]) for each in fixed}
    # The CPU device needs the number of dimensions, which a file may leave out.
    taken = [each for each in ports.inputs if options.reshapes or each.port.shape is None]
    shapes |= _configured_shapes(taken, config, rows)
    if shapes:
        try:
            graph.reshape({index: list(shape) for index, shape in shapes.items()})
        except RuntimeError as error:
            text = f"unable to load model '{config.name}': {_reshape_problem(fixed, options)}"
            raise invalid(f"{text}: {openvino_error(error).message}") from error
    if keeps:
        return rows
    if fixed:
        _check_outputs(graph, config, fixed[0])
    return 0


def has_batch_layout(graph: Any) -> bool:
    """Whether the file says of every input that its first dimension is the batch, as the layout NCHW does."""
    layouts = [each.node.layout for each in graph.inputs]
    helpers = runtime().layout_helpers
    return bool(layouts) and all(helpers.has_batch(each) and helpers.batch_idx(each) == 0 for each in layouts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the tensors of a compiled graph are: positions of its inputs and outputs by name.

    A string tensor has three: the places where its elements begin, where they end, and all bytes together.
    """

    inputs: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, tuple[int, ...]]


def with_text_as_bytes(graph: Any, ports: Ports) -> tuple[Any, Plan]:
    """The graph with numeric arrays instead of string tensors, because numpy's strings lose zero bytes at their ends
    and are all as long as the longest."""
    if not any(each.port.type_name == STRING for each in (*ports.inputs, *ports.outputs)):
        return graph, Plan(
            {each.name: (each.index,) for each in ports.inputs}, {each.name: (each.index,) for each in ports.outputs}
        )
    ops, types = operations(), runtime().Type
    parameters: list[Any] = []
    inputs: list[tuple[int, ...]] = []
    for parameter in graph.get_parameters():
        start = len(parameters)
        if parameter.get_element_type() == types.string:
            shape = parameter.get_partial_shape()
            texts = [ops.parameter(shape, types.i32), ops.parameter(shape, types.i32), ops.parameter([-1], types.u8)]
            packed = ops.string_tensor_pack(*texts)
            for target in parameter.output(0).get_target_inputs():
                target.replace_source_output(packed.output(0))
            parameters += texts
        else:
            parameters.append(parameter)
        inputs.append(tuple(range(start, len(parameters))))
    results: list[Any] = []
    outputs: list[tuple[int, ...]] = []
    for result in graph.get_results():
        start = len(results)
        value = result.input_value(0)
        if value.get_element_type() == types.string:
            unpacked = ops.string_tensor_unpack(value)
            results += [ops.result(unpacked.output(index)) for index in range(3)]
        else:
            results.append(result)
        outputs.append(tuple(range(start, len(results))))
    changed = runtime().Model(results, graph.get_sinks(), parameters, graph.get_friendly_name())
    return changed, Plan(
        {each.name: inputs[each.index] for each in ports.inputs},
        {each.name: outputs[each.index] for each in ports.outputs},
    )


def _port(output: Any, node: str) -> Port:
    names = sorted(output.get_names())
    if names:
        first = output.get_any_name()
        names = [first, *(name for name in names if name != first)]
    shape = output.get_partial_shape()
    sizes = None if shape.rank.is_dynamic else tuple(-1 if each.is_dynamic else each.get_length() for each in shape)
    return Port(tuple(names), node, output.get_element_type().get_type_name(), sizes)


def _source_name(value: Any) -> str:
    """The name of an output by the node that computes it, with the number of that node's output if it has several."""
    node = value.get_node()
    name: str = node.get_friendly_name()
    return f"{name}.{value.get_index()}" if node.get_output_size() > 1 else name


def _batched_inputs(ports: Ports, config: ModelConfig) -> tuple[NamedPort, ...]:
    """The inputs whose first dimension is the batch: not those that the scheduler makes flat for a whole batch."""
    flat = {each.name for each in config.input if each.allow_ragged_batch} | {each.name for each in made_inputs(config)}
    return tuple(each for each in ports.inputs if each.name not in flat)


def _fixed_rows(fixed: Sequence[NamedPort], ports: Ports, config: ModelConfig) -> int:
    """The rows of each batch of a graph that keeps its size. INVALID_ARG if it cannot serve the configuration."""
    problems = []
    sizes = {(each.port.shape or (0,))[0] for each in fixed}
    rows = min(sizes)
    if len(sizes) > 1 or len(fixed) < len(ports.inputs):
        listed = ", ".join(f"'{each.name}'" for each in ports.inputs)
        problems.append(f"all inputs must have the same fixed batch: {listed}")
    elif rows < config.max_batch_size:
        problems.append(f"max_batch_size is {config.max_batch_size}; it must be at most {rows}, the batch of the file")
    if problems:
        raise invalid(
            f"unable to load model '{config.name}' with SKIP_OV_DYNAMIC_BATCHSIZE or ENABLE_BATCH_PADDING: "
            f"{'; '.join(problems)}"
        )
    return rows


def _configured_shapes(taken: Sequence[NamedPort], config: ModelConfig, rows: int) -> dict[int, tuple[int, ...]]:
    """The shapes that the configuration gives to these inputs, with the batch if the model batches."""
    wanted = {
        each.name: each.dims if each.reshape is None else each.reshape.shape for each in config.input if each.dims
    }
    flat = {each.name for each in config.input if each.allow_ragged_batch}
    wanted |= {each.name: each.dims for each in model_inputs(config) if each.name not in wanted and each.dims}
    batch = (rows,) if config.max_batch_size else ()
    return {each.index: (*batch, *wanted[each.name]) for each in taken if each.name in wanted and each.name not in flat}


def _reshape_problem(fixed: Sequence[NamedPort], options: OpenVinoOptions) -> str:
    if options.reshapes:
        return "the file cannot take the shapes of the configuration, which RESHAPE_IO_LAYERS asks for"
    if not fixed:
        return "the file cannot take the shapes of the configuration"
    return f"{_fixed_text(fixed[0])} and cannot be changed; {BATCH_HELP}"


def _fixed_text(fixed: NamedPort) -> str:
    return f"the batch of input '{fixed.name}' is fixed at {(fixed.port.shape or (0,))[0]} in the file"


def _check_outputs(graph: Any, config: ModelConfig, fixed: NamedPort) -> None:
    """INVALID_ARG if an output did not get a batch of any size with the inputs."""
    scattered = {name for each in config.batch_output for name in each.target_name}
    for each in read_ports(graph, config).outputs:
        if each.name not in scattered and each.port.shape is not None and each.port.shape[:1] != (-1,):
            raise invalid(
                f"unable to load model '{config.name}': {_fixed_text(fixed)}, and output '{each.name}' has the shape "
                f"{list(each.port.shape)} for inputs of any batch; {BATCH_HELP}"
            )
