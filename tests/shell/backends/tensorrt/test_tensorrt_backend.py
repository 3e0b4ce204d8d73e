"""The TensorRT backend on a played TensorRT and CUDA, which check every call."""

from dataclasses import replace

import numpy as np
import pytest

from halimede.backends.api import LostInstanceError, RunContext
from halimede.backends.tensorrt.buffers import MOST_PINNED_BYTES
from halimede.core.config.model_config import (
    CudaGraphLowerBound,
    CudaGraphSpec,
    ModelConfig,
    ModelDynamicBatching,
    ModelOutput,
    ModelParameter,
    ModelPriority,
    ModelTensorReshape,
    OptimizationCuda,
    PinnedMemoryBuffer,
)
from halimede.core.types import DataType, Device, DeviceKind, ErrorCode, InferenceError, InferenceRequest
from halimede.workers.worker import BatchItem
from support.plans import (
    BACKEND,
    BATCH,
    CONTEXT,
    DOUBLE,
    DOUBLES,
    FP32,
    GPU,
    INT32,
    INT64,
    NAMES,
    ON_GPU,
    OPEN_ROWS,
    compute,
    computed,
    config,
    floats,
    given,
    instance,
    optimized,
    plan,
    refused,
    source,
)
from support.played_gpu import cudart, trt
from support.played_gpu.cudart import MACHINE


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("datatype", NAMES.keys(), ids=lambda each: each.name)
def test_every_datatype_goes_through_unchanged(tmp_path, datatype, pinned):
    raw = (np.arange(12 * datatype.itemsize) * 37 % 251).astype(np.uint8)
    raw = raw % 2 if datatype is DataType.BOOL else raw
    array = np.frombuffer(raw.tobytes(), datatype.dtype).reshape(3, 4)
    name = NAMES[datatype]
    settings = optimized(
        config({"x": (datatype, 4)}, {"y": (datatype, 4)}),
        input_pinned_memory=PinnedMemoryBuffer(enable=pinned),
        output_pinned_memory=PinnedMemoryBuffer(enable=pinned),
    )
    content = plan(given("x", [-1, 4], BATCH, dtype=name), computed("y", [-1, 4], "x", dtype=name))
    result = compute(tmp_path, content, settings, {"x": array})["y"]
    assert (result.dtype, result.shape, result.tobytes()) == (datatype.dtype, (3, 4), array.tobytes())


def test_batches_of_all_sizes_give_the_same_numbers_as_numpy(tmp_path):
    content = plan(
        given("x", [-1, -1], OPEN_ROWS),
        given("w", [-1, 1], ([1, 1], [2, 1], [8, 1])),
        computed("y", [-1, -1], "np.sin(x) * w"),
        computed("s", [-1], "x.sum(axis=1)"),
    )
    settings = config({"x": (FP32, -1), "w": (FP32, 1)}, {"y": (FP32, -1)})
    settings = replace(
        settings, output=(*settings.output, ModelOutput("s", FP32, dims=(1,), reshape=ModelTensorReshape()))
    )
    model, made = instance(tmp_path, content, settings)
    random = np.random.default_rng(1)
    results = []
    for rows, width in ((1, 1), (8, 64), (3, 5), (8, 1), (1, 64), (3, 5)):
        x, w = (random.standard_normal(shape).astype(np.float32) for shape in ((rows, width), (rows, 1)))
        result = made.run({"x": x, "w": w}, ["y", "s"], CONTEXT)
        results.append((result, np.sin(x) * w, x.sum(axis=1)))
    made.close()
    model.close()
    # Compared at the end: an answer must not change with later batches.
    for result, y, s in results:
        assert (result["y"].tobytes(), result["y"].shape) == (y.tobytes(), y.shape)
        assert result["s"].tobytes() == s.tobytes()


def test_only_requested_outputs_are_copied(tmp_path):
    content = plan(*DOUBLE, computed("z", [-1, 4], "x + 1"))
    settings = config({"x": (FP32, 4)}, {"y": (FP32, 4), "z": (FP32, 4)})
    result = compute(tmp_path, content, settings, {"x": floats([1, 2, 3, 4])}, ["z"])
    assert {name: array.tolist() for name, array in result.items()} == {"z": [[2, 3, 4, 5]]}


def test_unaligned_and_read_only_inputs_are_read_correctly(tmp_path):
    body = b"\0" + floats([1, 2, 3, 4]).tobytes()
    array = np.frombuffer(memoryview(body)[1:], np.float32).reshape(1, 4)
    for enable in (True, False):
        settings = optimized(DOUBLES, input_pinned_memory=PinnedMemoryBuffer(enable=enable))
        assert compute(tmp_path, plan(*DOUBLE), settings, {"x": array})["y"].tolist() == [[2, 4, 6, 8]]


def test_an_empty_tensor_and_a_scalar(tmp_path):
    content = plan(
        given("x", [-1, 2], ([0, 2], [1, 2], [4, 2])),
        given("k", [], ([], [], [])),
        computed("y", [-1, 2], "x * k"),
    )
    settings = config({"x": (FP32, -1, 2), "k": (FP32, 1)}, {"y": (FP32, -1, 2)}, max_batch_size=0)
    k = floats(3)
    assert compute(tmp_path, content, settings, {"x": np.zeros((0, 2), np.float32), "k": k})["y"].shape == (0, 2)
    assert compute(tmp_path, content, settings, {"x": floats([1, 2]), "k": k})["y"].tolist() == [[3, 6]]


def test_the_nearest_profile_of_the_instance_runs_the_batch(tmp_path):
    ranges = (([1, 1], [1, 1], [8, 4]), ([1, 1], [8, 8], [8, 8]), ([1, 1], [4, 2], [8, 2]))
    content = plan(given("x", [-1, -1], *ranges), computed("y", [-1, -1], "x"))
    settings = config({"x": (FP32, -1)}, {"y": (FP32, -1)})
    model, made = instance(tmp_path, content, settings, replace(ON_GPU, profile=("0", "1")))
    for width in (1, 4, 8):
        assert made.run({"x": np.ones((2, width), np.float32)}, ["y"], CONTEXT)["y"].shape == (2, width)
    error = refused(lambda: made.run({"x": np.ones((2, 9), np.float32)}, ["y"], CONTEXT))
    made.close()
    model.close()
    assert error == InferenceError(
        ErrorCode.INVALID_ARG,
        "the request does not fit instance 'm_0': profile 0: input 'x' has shape [2,9], expected [1,1] to [8,4]; "
        "profile 1: input 'x' has shape [2,9], expected [1,1] to [8,8]",
    )


def test_a_profile_that_does_not_exist_and_one_that_is_too_small_are_named(tmp_path):
    content = plan(given("x", [-1, 4], BATCH, ([1, 4], [2, 4], [4, 4])), computed("y", [-1, 4], "x"))
    model = BACKEND.load(DOUBLES, source(tmp_path, content))
    create = lambda *texts: refused(lambda: model.create_instance(replace(ON_GPU, profile=texts))).message  # noqa: E731
    assert create("2") == ("instance 'm_0': profile '2' does not exist, the engine has 2 optimization profiles: 0 to 1")
    assert create("1") == (
        "model 'm': max_batch_size is 8, but no profile of the instance takes a batch of 5 rows (profile 1: 1 to 4)"
    )
    model.create_instance(replace(ON_GPU, profile=("1", "0"))).close()
    model.close()


def test_shape_tensors_are_read_on_the_cpu_with_the_values_of_each_batch(tmp_path):
    content = plan(
        given("x", [-1], ([1], [6], [16])),
        given("to", [2], ([2], [2], [2]), dtype="INT64", values=[([1, 1], [2, 3], [16, 16])]),
        computed("y", [-1, -1], "np.resize(x, to)"),
        computed("shape", [2], "np.array(to)", dtype="INT64", host=True),
    )
    settings = config({"x": (FP32, -1), "to": (INT64, 2)}, {"y": (FP32, -1, -1), "shape": (INT64, 2)}, max_batch_size=0)
    shapes = replace(settings.input[1], is_shape_tensor=True), replace(settings.output[1], is_shape_tensor=True)
    settings = replace(settings, input=(settings.input[0], shapes[0]), output=(settings.output[0], shapes[1]))
    model, made = instance(tmp_path, content, settings)
    found = []
    for to in ([2, 3], [3, 2], [1, 6], [2, 3]):
        inputs = {"x": np.arange(6, dtype=np.float32), "to": np.array(to, np.int64)}
        found.append(made.run(inputs, ["y", "shape"], CONTEXT))
    wrong = {"x": np.arange(6, dtype=np.float32), "to": np.array([17, 1], np.int64)}
    error = refused(lambda: made.run(wrong, ["y"], CONTEXT))
    made.close()
    model.close()
    assert [each["y"].tolist() for each in found] == [
        [[0, 1, 2], [3, 4, 5]],
        [[0, 1], [2, 3], [4, 5]],
        [[0, 1, 2, 3, 4, 5]],
        [[0, 1, 2], [3, 4, 5]],
    ]
    assert [each["shape"].tolist() for each in found] == [[2, 3], [3, 2], [1, 6], [2, 3]]
    assert "input 'to' has values [17,1], expected [1,1] to [16,16]" in error.message


def test_a_batch_with_a_shape_tensor_uses_the_profile_of_its_values(tmp_path):
    content = plan(
        given("x", [-1, 4], ([1, 4], [2, 4], [8, 4]), ([1, 4], [2, 4], [8, 4])),
        given(
            "to",
            [2],
            dtype="INT32",
            values=[([1, 1], [4, 2], [8, 2]), ([1, 2], [4, 4], [8, 4])],
            ranges=[[[2]] * 3] * 2,
        ),
        computed("y", [-1, -1], "np.resize(x, to)"),
    )
    settings = config({"x": (FP32, 4), "to": (INT32, 1)}, {"y": (FP32, -1)})
    settings = replace(settings, input=(settings.input[0], replace(settings.input[1], is_shape_tensor=True)))
    model, made = instance(tmp_path, content, settings, replace(ON_GPU, profile=("0", "1")))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for width in (1, 2, 4):
        result = made.run({"x": x, "to": np.array([3, width], np.int32)}, ["y"], CONTEXT)["y"]
        assert result.tolist() == np.resize(x, (3, width)).tolist()
    error = refused(lambda: made.run({"x": x, "to": np.array([3, 5], np.int32)}, ["y"], CONTEXT))
    made.close()
    model.close()
    assert "profile 1: input 'to' has values [3,5], expected [1,2] to [8,4]" in error.message
    # Only the author of an engine knows whether the first value is the number of rows.
    assert BACKEND.autocomplete(ModelConfig(), source(tmp_path, None)).max_batch_size == 0
    unmarked = replace(
        settings, input=(settings.input[0], replace(settings.input[1], dims=(2,), is_shape_tensor=False))
    )
    error = refused(lambda: BACKEND.check(unmarked, source(tmp_path, None)))
    assert "tensor 'to': it is a shape tensor of the engine: set is_shape_tensor" in error.message


def test_a_tensor_that_is_no_shape_tensor_is_refused(tmp_path):
    wrong = replace(DOUBLES, max_batch_size=8, input=(replace(DOUBLES.input[0], is_shape_tensor=True),))
    model = BACKEND.load(wrong, source(tmp_path, plan(*DOUBLE)))
    error = refused(lambda: model.create_instance(ON_GPU))
    assert (
        "tensor 'x': the model configuration says is_shape_tensor, and the engine has no shape tensor" in error.message
    )


def test_outputs_of_open_size_grow_with_the_results(tmp_path):
    content = plan(given("x", [-1], ([1], [4], [400])), computed("y", [-1], "x[x > 0]", open=True))
    settings = config({"x": (FP32, -1)}, {"y": (FP32, -1)}, max_batch_size=0)
    model, made = instance(tmp_path, content, settings)
    for x in ([1, -1, 2], [-1], [*range(400)], [3]):
        array = np.array(x, np.float32)
        assert made.run({"x": array}, ["y"], CONTEXT)["y"].tolist() == [each for each in x if each > 0]
    made.close()
    model.close()
    # Without memory for 400 numbers the error names the output, and the next batch runs.
    model, made = instance(tmp_path, content, settings)
    MACHINE.limit_bytes = sum(len(block) for _, block in MACHINE.memory.values()) + 1000
    error = refused(lambda: made.run({"x": np.ones(400, np.float32)}, ["y"], CONTEXT))
    assert made.run({"x": np.ones(3, np.float32)}, ["y"], CONTEXT)["y"].tolist() == [1, 1, 1]
    made.close()
    model.close()
    assert (error.code, error.message) == (
        ErrorCode.UNAVAILABLE,
        "CUDA: 1600 bytes of device memory for output 'y': played cudaErrorMemoryAllocation "
        "(cudaErrorMemoryAllocation)",
    )


def test_largest_inputs_that_do_not_fit_each_other_are_a_warning(tmp_path, caplog):
    content = plan(given("a", [-1], ([1], [2], [8])), given("b", [-1], ([1], [2], [9])), computed("y", [-1], "a + b"))
    settings = config({"a": (FP32, -1), "b": (FP32, -1)}, {"y": (FP32, -1)}, max_batch_size=0)
    both = np.ones(9, np.float32)
    model, made = instance(tmp_path, content, settings)
    assert made.run({"a": both[:7], "b": both[:7]}, ["y"], CONTEXT)["y"].tolist() == [2] * 7
    error = refused(lambda: made.run({"a": both[:7], "b": both}, ["y"], CONTEXT))
    made.close()
    model.close()
    assert error.message.startswith("TensorRT: output 'y' has no shape for these inputs: ")
    assert "instance 'm_0': no memory is reserved for the largest inputs of profile 0: TensorRT: output" in caplog.text


def test_memory_for_the_largest_batch_is_taken_at_load(tmp_path):
    MACHINE.limit_bytes = 600
    settings = config({"x": (FP32, 64)}, {"y": (FP32, 64)})
    content = plan(given("x", [-1, 64], ([1, 64], [1, 64], [8, 64])), computed("y", [-1, 64], "x"))
    model = BACKEND.load(settings, source(tmp_path, content))
    error = refused(lambda: model.create_instance(ON_GPU))
    assert (error.code, error.message.split(":")[1]) == (
        ErrorCode.UNAVAILABLE,
        " 2048 bytes of device memory for input 'x'",
    )
    MACHINE.limit_bytes = 1 << 30
    model, made = instance(tmp_path, content, settings)
    before = dict(MACHINE.memory)
    made.run({"x": np.ones((8, 64), np.float32)}, ["y"], CONTEXT)
    assert MACHINE.memory.keys() == before.keys()
    made.close()
    model.close()


def test_very_large_tensors_take_no_pinned_memory(tmp_path):
    width = MOST_PINNED_BYTES // 4 // 2 + 1
    content = plan(given("x", [-1, width], ([1, width], [1, width], [2, width])), computed("y", [-1], "x[:, -1]"))
    settings = config({"x": (FP32, width)}, {})
    settings = replace(settings, max_batch_size=2, output=(ModelOutput("y", FP32, (1,), ModelTensorReshape()),))
    model, made = instance(tmp_path, content, settings)
    assert made.run({"x": np.full((2, width), 7, np.float32)}, ["y"], CONTEXT)["y"].tolist() == [7, 7]
    assert max(len(block) for block in MACHINE.pinned.values()) <= MOST_PINNED_BYTES
    made.close()
    model.close()


GRAPHS = OptimizationCuda(
    graphs=True, graph_spec=(CudaGraphSpec(2), CudaGraphSpec(6, graph_lower_bound=CudaGraphLowerBound(4)))
)


def test_recorded_batches_are_launched_as_graphs_with_the_same_results(tmp_path):
    content = plan(given("x", [-1, 4], BATCH), computed("y", [-1, 4], "x * 2 + x.sum() * 0"))
    model, made = instance(tmp_path, content, optimized(DOUBLES, cuda=GRAPHS))
    assert len(MACHINE.graphs) == 2
    launched = []
    for rows in (1, 2, 3, 6, 8, 4, 2, 5):
        x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
        before = len(cudart.launches)
        assert made.run({"x": x}, ["y"], CONTEXT)["y"].tolist() == (x * 2).tolist()
        launched.append((rows, len(cudart.launches) - before))
    made.close()
    model.close()
    assert launched == [(1, 0), (2, 1), (3, 0), (6, 1), (8, 0), (4, 1), (2, 1), (5, 1)]


def test_a_smaller_batch_in_a_graph_is_filled_up_with_zeros(tmp_path):
    """The sum over the batch would show rows of the batch before."""
    content = plan(given("x", [-1, 4], BATCH), computed("y", [-1, 4], "x * 0 + x.sum()"))
    model, made = instance(tmp_path, content, optimized(DOUBLES, cuda=GRAPHS))
    sums = [made.run({"x": np.ones((rows, 4), np.float32)}, ["y"], CONTEXT)["y"] for rows in (6, 4, 5)]
    made.close()
    model.close()
    assert [each.tolist() for each in sums] == [[[24] * 4] * 6, [[16] * 4] * 4, [[20] * 4] * 5]


def test_usual_graphs_are_those_of_the_preferred_batches(tmp_path):
    settings = replace(DOUBLES, dynamic_batching=ModelDynamicBatching((4,)))
    model, made = instance(tmp_path, plan(*DOUBLE), optimized(settings, cuda=OptimizationCuda(graphs=True)))
    for rows in (1, 2, 4):
        made.run({"x": np.ones((rows, 4), np.float32)}, ["y"], CONTEXT)
    assert (len(MACHINE.graphs), len(cudart.launches)) == (2, 2)
    made.close()
    model.close()


def test_no_graph_is_recorded_of_outputs_of_open_size(tmp_path, caplog):
    content = plan(given("x", [4]), computed("y", [-1], "x[x > 0]", open=True))
    settings = config({"x": (FP32, 4)}, {"y": (FP32, -1)}, max_batch_size=0)
    settings = optimized(settings, cuda=OptimizationCuda(graphs=True))
    compute(tmp_path, content, settings, {"x": np.ones(4, np.float32)})
    assert "no CUDA graph is recorded: the engine has shape tensors or outputs of open size" in caplog.text


@pytest.mark.parametrize(
    ("priority", "level"),
    [(ModelPriority.PRIORITY_DEFAULT, 0), (ModelPriority.PRIORITY_MAX, -5), (ModelPriority.PRIORITY_MIN, 0)],
)
@pytest.mark.parametrize(("spins", "flags"), [(False, 3), (True, 2)])
def test_priority_busy_waiting_and_allocation_strategy_are_passed_on(tmp_path, priority, level, spins, flags):
    settings = optimized(DOUBLES, priority=priority, cuda=OptimizationCuda(busy_wait_events=spins))
    settings = replace(
        settings, parameters={"execution_context_allocation_strategy": ModelParameter("ON_PROFILE_CHANGE")}
    )
    model, made = instance(tmp_path, plan(*DOUBLE), settings)
    assert [each.priority for each in MACHINE.streams.values()] == [level]
    assert (MACHINE.event_flags, trt.strategies) == ([flags], ["ON_PROFILE_CHANGE"])
    made.close()
    model.close()


def test_instances_of_a_device_share_one_engine(tmp_path):
    model = BACKEND.load(DOUBLES, source(tmp_path, plan(*DOUBLE)))
    second = Device(DeviceKind.GPU, 1, "GPU-1", compute_capability=(9, 0))
    made = [model.create_instance(replace(ON_GPU, device=each)) for each in (GPU, GPU, second)]
    engines = [each._engine.engine for each in made]
    assert (engines[0] is engines[1], engines[0] is engines[2]) == (True, False)
    assert sorted(each.device for each in MACHINE.streams.values()) == [0, 0, 1]
    for each, device in zip(made, (0, 0, 1), strict=True):
        cudart.cudaSetDevice(device)
        assert each.run({"x": floats([1, 2, 3, 4])}, ["y"], CONTEXT)["y"].tolist() == [[2, 4, 6, 8]]
        each.close()
    model.close()
    cudart.cudaSetDevice(0)


def test_a_slice_is_cudas_device_zero(tmp_path):
    model = BACKEND.load(DOUBLES, source(tmp_path, plan(*DOUBLE, device=0)))
    model.create_instance(replace(ON_GPU, device=Device(DeviceKind.MIG, 5, "MIG-5"))).close()
    model.close()


def test_the_file_of_the_compute_capability_is_loaded(tmp_path):
    where = source(tmp_path, plan(*DOUBLE), {"8.9": "ada.plan"})
    (tmp_path / "1" / "ada.plan").write_bytes(plan(given("x", [-1, 4], BATCH), computed("y", [-1, 4], "x * 3")))
    found = []
    for capability in ((8, 9), (9, 0), (0, 0)):
        model = BACKEND.load(DOUBLES, where)
        made = model.create_instance(replace(ON_GPU, device=replace(GPU, compute_capability=capability)))
        found.append(made.run({"x": floats([1, 1, 1, 1])}, ["y"], CONTEXT)["y"][0, 0])
        made.close()
        model.close()
    assert found == [3, 2, 2]


def test_loads_in_cycles_leave_nothing(tmp_path):
    settings = optimized(DOUBLES, cuda=GRAPHS)
    for _ in range(20):
        compute(tmp_path, plan(*DOUBLE), settings, {"x": floats([1, 2, 3, 4])})


def test_a_failed_start_frees_everything(tmp_path):
    broken = optimized(DOUBLES, cuda=OptimizationCuda(graphs=True, graph_spec=(CudaGraphSpec(9),)))
    model = BACKEND.load(broken, source(tmp_path, plan(*DOUBLE)))
    assert "graph_spec[0].batch_size is 9" in refused(lambda: model.create_instance(ON_GPU)).message
    model = BACKEND.load(DOUBLES, source(tmp_path, plan(*DOUBLE, no_context=True)))
    error = refused(lambda: model.create_instance(ON_GPU))
    assert error.message == "no execution context for profile 0: Cannot allocate device memory for the context"


def test_a_refused_execution_fails_its_batch_alone(tmp_path):
    model, made = instance(tmp_path, plan(*DOUBLE, fault="refuse", fault_size=12), DOUBLES)
    error = refused(lambda: made.run({"x": np.ones((3, 4), np.float32)}, ["y"], CONTEXT))
    assert error == InferenceError(ErrorCode.INTERNAL, "TensorRT: the execution failed: the tactic failed")
    assert made.run({"x": floats([1, 2, 3, 4])}, ["y"], CONTEXT)["y"].tolist() == [[2, 4, 6, 8]]
    made.close()
    model.close()


def test_after_an_illegal_access_the_instance_says_why_it_cannot_run(tmp_path):
    model, made = instance(tmp_path, plan(*DOUBLE, fault="illegal", fault_size=12), DOUBLES)
    error = refused(lambda: made.run({"x": np.ones((3, 4), np.float32)}, ["y"], CONTEXT))
    assert (error.code, "cudaErrorIllegalAddress" in error.message) == (ErrorCode.INTERNAL, True)
    assert isinstance(error, LostInstanceError)
    again = refused(lambda: made.run({"x": floats([1, 2, 3, 4])}, ["y"], CONTEXT))
    assert again.code is ErrorCode.UNAVAILABLE
    assert again.message.startswith("instance 'm_0' cannot run until its process is restarted: an earlier batch failed")
    made.close()
    model.close()


def test_a_missing_input_is_named(tmp_path):
    model, made = instance(tmp_path, plan(*DOUBLE), DOUBLES)
    assert refused(lambda: made.run({}, ["y"], CONTEXT)) == InferenceError(
        ErrorCode.INVALID_ARG, "input 'x' is missing: a TensorRT engine needs all of its inputs"
    )
    made.close()
    model.close()


def test_an_input_that_the_server_makes_gets_the_engines_datatype(tmp_path):
    made_input = np.ones((1, 4), np.int64)
    assert compute(tmp_path, plan(*DOUBLE), DOUBLES, {"x": made_input})["y"].tolist() == [[2, 2, 2, 2]]


def test_a_batch_of_cancelled_requests_is_not_executed(tmp_path):
    model, made = instance(tmp_path, plan(*DOUBLE), DOUBLES)
    flags = [BatchItem(key, InferenceRequest("m"), 1, cancelled=key > 0) for key in range(2)]
    x = {"x": floats([1, 2, 3, 4])}
    assert made.run(x, ["y"], RunContext(["", ""], [1, 1], flags))["y"].tolist() == [[2, 4, 6, 8]]
    error = refused(lambda: made.run(x, ["y"], RunContext([""], [1], flags[1:])))
    assert error.code is ErrorCode.CANCELLED
    made.close()
    model.close()
