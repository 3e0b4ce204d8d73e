"""Which CUDA graphs an instance records, and for which batches it uses them. Pure.

A graph is an execution with all shapes fixed: launching it costs less than starting each of its kernels. With
`optimization.cuda.graphs` and no `graph_spec`, graphs are recorded for batches of 1 and of the preferred sizes.

`graph_lower_bound` lets smaller batches use a graph: they are filled up with rows of zeros, which are dropped from the
outputs. It can differ from its graph in the batch alone, because smaller dimensions inside of a row would need
outputs of other shapes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halimede.backends.tensorrt.profiles import Profile, Shape, choose, explain
from halimede.core.config.model_config import CudaGraphSpec, ModelConfig
from halimede.core.types import InferenceError
from halimede.core.types.error import clip, invalid, unsupported

MOST_GRAPHS = 1024
MOST_BATCHES = 65_536
"""Maximum number of graphs of an instance, and of batches that may use one of them."""


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """One graph to record: its profile, and the shapes of all inputs. Batches from `least_rows` on use it."""

    profile: Profile
    shapes: Mapping[str, Shape]
    least_rows: int

    def batches(self) -> Sequence[tuple[Shape, ...]]:
        """The shapes of the inputs, in order, of the batches that may use it; the graph's own shapes come last."""
        own = tuple(self.shapes.values())
        if not own or not own[0]:
            return [own]
        return [*(tuple((rows, *shape[1:]) for shape in own) for rows in range(self.least_rows, own[0][0])), own]


def plan_graphs(
    config: ModelConfig, inputs: Mapping[str, Shape], profiles: Sequence[Profile]
) -> tuple[tuple[GraphPlan, ...], str]:
    """The graphs to record, smaller ones first, and a note for the log, "" if there is none.

    `inputs` are the engine's shapes by input, -1 for any size. INVALID_ARG or UNSUPPORTED for a `graph_spec` that
    cannot be recorded.
    """
    cuda = config.optimization.cuda if config.optimization is not None else None
    if cuda is None or not cuda.graphs:
        return (), ""
    given = cuda.graph_spec
    specs = given or tuple(CudaGraphSpec(rows) for rows in _usual_batches(config))
    if len(specs) > MOST_GRAPHS:
        raise _wrong(config, f"{len(specs)} CUDA graphs are requested, at most {MOST_GRAPHS} are allowed")
    plans: list[GraphPlan] = []
    for number, spec in enumerate(specs):
        where = f"optimization.cuda.graph_spec[{number}]"
        shapes = {name: _shape(config, name, shape, spec) for name, shape in inputs.items()}
        if unknown := [name for name in spec.input if name not in inputs]:
            raise _wrong(config, f"{where} names input '{clip(unknown[0])}', the engine has {clip(', '.join(inputs))}")
        open_input = next((name for name, shape in shapes.items() if -1 in shape), None)
        if open_input is not None and not given:
            text = f"input '{clip(open_input)}' has a variable shape, and no graph_spec is given"
            return (), f"no CUDA graph is recorded: {text}"
        if open_input is not None:
            raise _wrong(config, f"{where} does not give the shape of input '{clip(open_input)}', which is variable")
        least_rows = _least_rows(config, spec, where)
        profile = choose(profiles, shapes, {})
        if profile is None and not given:
            continue
        if profile is None:
            raise _wrong(config, f"{where} does not fit the engine: {explain(profiles, shapes, {})}")
        plans.append(GraphPlan(profile, shapes, least_rows))
    if sum(len(plan.batches()) for plan in plans) > MOST_BATCHES:
        raise _wrong(config, f"optimization.cuda.graph_spec covers more than {MOST_BATCHES} batches")
    return tuple(sorted(plans, key=lambda plan: [shape[:1] for shape in plan.shapes.values()])), ""


def _usual_batches(config: ModelConfig) -> Sequence[int]:
    if config.max_batch_size == 0:
        return (0,)
    preferred: tuple[int, ...] = ()
    if config.dynamic_batching is not None:
        preferred = config.dynamic_batching.preferred_batch_size
    elif config.sequence_batching is not None and config.sequence_batching.oldest is not None:
        preferred = config.sequence_batching.oldest.preferred_batch_size
    return sorted({1, *preferred})


def _shape(config: ModelConfig, name: str, shape: Shape, spec: CudaGraphSpec) -> Shape:
    """The input's shape in the graph; -1 where neither the graph nor the engine determines it."""
    if config.max_batch_size == 0:
        return tuple(spec.input[name].dim) if name in spec.input else shape
    return (spec.batch_size, *(spec.input[name].dim if name in spec.input else shape[1:]))


def _least_rows(config: ModelConfig, spec: CudaGraphSpec, where: str) -> int:
    if config.max_batch_size == 0:
        if spec.batch_size or spec.graph_lower_bound is not None:
            raise _wrong(config, f"{where} has a batch size or a lower bound, and the model does not batch")
        return 0
    if not 0 < spec.batch_size <= config.max_batch_size:
        text = f"batch_size is {spec.batch_size}, it must be from 1 to {config.max_batch_size}"
        raise _wrong(config, f"{where}.{text}")
    bound = spec.graph_lower_bound
    if bound is None:
        return spec.batch_size
    if not 0 < bound.batch_size <= spec.batch_size:
        text = f"batch_size is {bound.batch_size}, it must be from 1 to {spec.batch_size}"
        raise _wrong(config, f"{where}.graph_lower_bound.{text}")
    if any(name not in spec.input or spec.input[name].dim != each.dim for name, each in bound.input.items()):
        raise unsupported(
            f"model '{clip(config.name)}': {where}.graph_lower_bound.input differs from its graph_spec, which is not "
            "supported: only the batch may be smaller; add a graph_spec for each shape"
        )
    return bound.batch_size


def _wrong(config: ModelConfig, what: str) -> InferenceError:
    return invalid(f"model '{clip(config.name)}': {what}")
