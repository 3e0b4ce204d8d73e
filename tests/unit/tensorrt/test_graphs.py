from typing import Any

import pytest

from halimede.backends.tensorrt.graphs import plan_graphs
from halimede.backends.tensorrt.profiles import Profile, Range
from halimede.core.config.model_config import (
    CudaGraphLowerBound,
    CudaGraphShape,
    CudaGraphSpec,
    ModelConfig,
    ModelDynamicBatching,
    ModelOptimizationPolicy,
    ModelSequenceBatching,
    OptimizationCuda,
    StrategyOldest,
)
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of

FIXED = {"x": (-1, 4)}
OPEN = {"x": (-1, -1)}
PROFILE = Profile(0, {"x": Range((1, 1), (4, 4), (8, 16))})


def config(*specs: CudaGraphSpec, max_batch_size: int = 8, graphs: bool = True, **fields: Any) -> ModelConfig:
    cuda = OptimizationCuda(graphs=graphs, graph_spec=specs)
    return ModelConfig("m", max_batch_size=max_batch_size, optimization=ModelOptimizationPolicy(cuda=cuda), **fields)


def spec(rows: int, *dims: int, least: int | None = None, least_dims: tuple[int, ...] = ()) -> CudaGraphSpec:
    shapes = {"x": CudaGraphShape(dims)} if dims else {}
    lower = {"x": CudaGraphShape(least_dims)} if least_dims else {}
    bound = None if least is None else CudaGraphLowerBound(least, lower)
    return CudaGraphSpec(rows, shapes, bound)


def planned(settings: ModelConfig, inputs=FIXED, profiles=(PROFILE,)) -> list[tuple[tuple[int, ...], int]]:
    plans, note = plan_graphs(settings, inputs, profiles)
    assert note == ""
    return [(plan.shapes["x"], plan.least_rows) for plan in plans]


def refused(settings: ModelConfig, inputs=FIXED) -> InferenceError:
    return error_of(plan_graphs, settings, inputs, [PROFILE])


def test_no_graphs_unless_they_are_asked_for():
    assert plan_graphs(ModelConfig("m"), FIXED, [PROFILE]) == ((), "")
    assert plan_graphs(config(spec(2), graphs=False), FIXED, [PROFILE]) == ((), "")


def test_the_usual_graphs_are_for_one_row_and_preferred_batches():
    assert planned(config()) == [((1, 4), 1)]
    assert planned(config(dynamic_batching=ModelDynamicBatching((4, 2)))) == [((1, 4), 1), ((2, 4), 2), ((4, 4), 4)]
    oldest = ModelSequenceBatching(oldest=StrategyOldest(preferred_batch_size=(8,)))
    assert planned(config(sequence_batching=oldest)) == [((1, 4), 1), ((8, 4), 8)]
    whole = Profile(0, {"x": Range((2, 4), (2, 4), (2, 4))})
    assert planned(config(max_batch_size=0), {"x": (2, 4)}, [whole]) == [((2, 4), 0)]


def test_a_usual_graph_that_fits_no_profile_is_left_out():
    large = Profile(0, {"x": Range((2, 4), (4, 4), (8, 4))})
    assert planned(config(dynamic_batching=ModelDynamicBatching((4,))), profiles=[large]) == [((4, 4), 4)]


def test_variable_shapes_need_a_graph_spec():
    assert plan_graphs(config(), OPEN, [PROFILE]) == (
        (),
        "no CUDA graph is recorded: input 'x' has a variable shape, and no graph_spec is given",
    )
    assert planned(config(spec(2, 7)), OPEN) == [((2, 7), 2)]
    assert "does not give the shape of input 'x'" in refused(config(spec(2)), OPEN).message


def test_graphs_are_sorted_and_use_the_nearest_profile():
    far = Profile(1, {"x": Range((1, 1), (8, 16), (8, 16))})
    plans, _ = plan_graphs(config(spec(8, 16), spec(2, 4)), OPEN, [PROFILE, far])
    assert [(plan.shapes["x"], plan.profile.index) for plan in plans] == [((2, 4), 0), ((8, 16), 1)]


def test_a_lower_bound_lets_smaller_batches_use_the_graph():
    (plan,), _ = plan_graphs(config(spec(4, 4, least=2, least_dims=(4,))), FIXED, [PROFILE])
    assert plan.batches() == [((2, 4),), ((3, 4),), ((4, 4),)]
    (alone,), _ = plan_graphs(config(spec(4)), FIXED, [PROFILE])
    assert alone.batches() == [((4, 4),)]


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (spec(9), "graph_spec[0].batch_size is 9, it must be from 1 to 8"),
        (spec(0), "graph_spec[0].batch_size is 0, it must be from 1 to 8"),
        (spec(4, least=5), "graph_spec[0].graph_lower_bound.batch_size is 5, it must be from 1 to 4"),
        (spec(4, least=0), "graph_spec[0].graph_lower_bound.batch_size is 0, it must be from 1 to 4"),
        (spec(4, 17), "graph_spec[0] does not fit the engine: profile 0: input 'x' has shape [4,17]"),
        (CudaGraphSpec(1, {"z": CudaGraphShape((1,))}), "graph_spec[0] names input 'z', the engine has x"),
    ],
    ids=str,
)
def test_a_wrong_graph_spec_is_named(wrong, part):
    error = refused(config(wrong))
    assert error.code is ErrorCode.INVALID_ARG
    assert part in error.message


def test_a_batch_in_the_graph_of_a_model_without_batches_is_refused():
    settings = config(spec(2), max_batch_size=0)
    assert "graph_spec[0] has a batch size or a lower bound" in refused(settings, {"x": (4, 4)}).message


def test_a_lower_bound_within_the_rows_is_refused_by_name():
    error = refused(config(spec(4, 4, least=2, least_dims=(3,))))
    assert error.code is ErrorCode.UNSUPPORTED
    assert "graph_spec[0].graph_lower_bound.input differs from its graph_spec" in error.message


def test_graphs_and_their_batches_are_bounded():
    assert "1025 CUDA graphs are requested" in refused(config(*[spec(1)] * 1025)).message
    many = Profile(0, {"x": Range((1, 4), (4, 4), (100_000, 4))})
    with pytest.raises(InferenceError, match="covers more than 65536 batches"):
        plan_graphs(config(spec(100_000, least=1), max_batch_size=100_000), FIXED, [many])
