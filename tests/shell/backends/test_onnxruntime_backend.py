import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from halimede.backends.api import ModelSource, RefusedRequestsError, RunContext
from halimede.backends.onnxruntime import OnnxRuntimeBackend
from halimede.backends.onnxruntime.signature import tensors_without_rank
from halimede.backends.onnxruntime.threads import ThreadPlan, plan_threads, quota_cores
from halimede.core.config.model_config import (
    Accelerator,
    ExecutionAccelerators,
    InstanceKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelParameter,
    ModelTensorReshape,
)
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, Placement
from halimede.workers.worker import BatchItem

FP32, BYTES, BF16 = DataType.FP32, DataType.BYTES, DataType.BF16
BACKEND = OnnxRuntimeBackend()
CONTEXT = RunContext([""], [1], [BatchItem(1, InferenceRequest("m"), 1, cancelled=False)])
CPU = Placement("m_0", 0, "CPU")

ONNX_TYPES = {
    DataType.BOOL: TensorProto.BOOL,
    DataType.UINT8: TensorProto.UINT8,
    DataType.UINT16: TensorProto.UINT16,
    DataType.UINT32: TensorProto.UINT32,
    DataType.UINT64: TensorProto.UINT64,
    DataType.INT8: TensorProto.INT8,
    DataType.INT16: TensorProto.INT16,
    DataType.INT32: TensorProto.INT32,
    DataType.INT64: TensorProto.INT64,
    DataType.FP16: TensorProto.FLOAT16,
    DataType.FP32: TensorProto.FLOAT,
    DataType.FP64: TensorProto.DOUBLE,
    DataType.BYTES: TensorProto.STRING,
    DataType.BF16: TensorProto.BFLOAT16,
}


def tensor(name: str, datatype: DataType, shape: Sequence[int | str | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_TYPES[datatype], shape)


def model(nodes, inputs, outputs, initializers=(), opset=17) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def identity(datatype: DataType, shape: Sequence[int | str | None]) -> onnx.ModelProto:
    return model(
        [helper.make_node("Identity", ["x"], ["y"])], [tensor("x", datatype, shape)], [tensor("y", datatype, shape)]
    )


def add_sub(shape: Sequence[int | str | None] = ("n", 2)) -> onnx.ModelProto:
    return model(
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])],
        [tensor("a", FP32, shape), tensor("b", FP32, shape)],
        [tensor("sum", FP32, shape), tensor("difference", FP32, shape)],
    )


def config(inputs: dict[str, tuple], outputs: dict[str, tuple], **fields) -> ModelConfig:
    """A complete configuration; a tensor is (datatype, *dims)."""
    return ModelConfig(
        name="m",
        backend="onnxruntime",
        input=tuple(ModelInput(name, datatype, dims=tuple(dims)) for name, (datatype, *dims) in inputs.items()),
        output=tuple(ModelOutput(name, datatype, dims=tuple(dims)) for name, (datatype, *dims) in outputs.items()),
        **{"max_batch_size": 8} | fields,
    )


ADD_SUB = config({"a": (FP32, 2), "b": (FP32, 2)}, {"sum": (FP32, 2), "difference": (FP32, 2)})


def source(directory: Path, proto: onnx.ModelProto | None, **options: str) -> ModelSource:
    version = directory / "1"
    version.mkdir(exist_ok=True)
    if proto is not None:
        onnx.save(proto, version / "model.onnx")
    return ModelSource("m", 1, directory, version / "model.onnx", {k.replace("_", "-"): v for k, v in options.items()})


def run(directory, proto, config: ModelConfig, inputs: dict, outputs: Sequence[str] | None = None, **options: str):
    loaded = BACKEND.load(config, source(directory, proto, **options))
    instance = loaded.create_instance(CPU)
    result = instance.run(inputs, outputs or [each.name for each in config.output], CONTEXT)
    instance.close()
    loaded.close()
    return result


def floats(*rows) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def refused(work) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        work()
    return caught.value


def test_only_requested_outputs_are_computed(tmp_path):
    inputs = {"a": floats([1, 2], [3, 4]), "b": floats([5, 6], [7, 8])}
    result = run(tmp_path, add_sub(), ADD_SUB, inputs, ["difference", "sum"])
    assert {k: v.tolist() for k, v in result.items()} == {"difference": [[-4, -4], [-4, -4]], "sum": [[6, 8], [10, 12]]}
    assert list(run(tmp_path, None, ADD_SUB, inputs, ["sum"])) == ["sum"]


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()], ids=str)
@pytest.mark.parametrize("datatype", ONNX_TYPES, ids=lambda each: each.name)
def test_every_datatype_goes_through_unchanged(tmp_path, datatype, shape):
    if datatype is BYTES:
        array = np.empty(shape, dtype=object)
        array.reshape(-1)[:] = [f"ü{i}\0".encode() for i in range(array.size)]
        expected = np.array([each.decode() for each in array.reshape(-1)], dtype=object).reshape(shape)
    else:
        # All bits of the element in use; 1 for BOOL, which has but two values.
        raw = (np.arange(int(np.prod(shape)) * datatype.itemsize) * 37 % 251).astype(np.uint8)
        raw = raw % 2 if datatype is DataType.BOOL else raw
        expected = array = np.frombuffer(raw.tobytes(), datatype.dtype).reshape(shape)
    settings = config({"x": (datatype, *shape)}, {"y": (datatype, *shape)}, max_batch_size=0)
    if not shape:
        settings = replace(
            settings,
            input=(ModelInput("x", datatype, dims=(1,), reshape=ModelTensorReshape()),),
            output=(ModelOutput("y", datatype, dims=(1,), reshape=ModelTensorReshape()),),
        )
    elif shape[0] == 0:
        settings = config({"x": (datatype, -1, 3)}, {"y": (datatype, -1, 3)}, max_batch_size=0)
    proto = identity(datatype, ("n", 3) if shape and shape[0] == 0 else shape)
    array.flags.writeable = False
    (result,) = run(tmp_path, proto, settings, {"x": array}).values()
    assert (result.shape, result.dtype) == (shape, datatype.dtype)
    if datatype is BYTES:
        assert result.tolist() == expected.tolist()
    else:
        assert result.tobytes() == expected.tobytes()


def test_bfloat16_goes_in_beside_strings_and_comes_out_beside_floats(tmp_path):
    bits = np.array([[0x3F80], [0xC000]], dtype=np.uint16)
    cast = helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT)
    same = helper.make_node("Identity", ["x"], ["x2"])
    proto = model(
        [cast, same], [tensor("x", BF16, ("n", 1))], [tensor("f", FP32, ("n", 1)), tensor("x2", BF16, ("n", 1))]
    )
    both = config({"x": (BF16, 1)}, {"f": (FP32, 1), "x2": (BF16, 1)})
    result = run(tmp_path, proto, both, {"x": bits})
    assert (result["f"].tolist(), result["x2"].tolist()) == ([[1], [-2]], bits.tolist())

    text = helper.make_node("Identity", ["t"], ["t2"])
    proto = model(
        [cast, text],
        [tensor("x", BF16, ("n", 1)), tensor("t", BYTES, ("n", 1))],
        [tensor("f", FP32, ("n", 1)), tensor("t2", BYTES, ("n", 1))],
    )
    settings = config({"x": (BF16, 1), "t": (BYTES, 1)}, {"f": (FP32, 1), "t2": (BYTES, 1)})
    result = run(tmp_path, proto, settings, {"x": bits, "t": np.array([[b"a"], [b"b"]], object)})
    assert (result["f"].tolist(), result["t2"].tolist()) == ([[1], [-2]], [["a"], ["b"]])


def test_strings_in_and_bfloat16_out_is_refused_at_load(tmp_path):
    proto = model(
        [helper.make_node("Identity", ["t"], ["t2"]), helper.make_node("Identity", ["x"], ["x2"])],
        [tensor("t", BYTES, ("n", 1)), tensor("x", BF16, ("n", 1))],
        [tensor("t2", BYTES, ("n", 1)), tensor("x2", BF16, ("n", 1))],
    )
    settings = config({"t": (BYTES, 1), "x": (BF16, 1)}, {"t2": (BYTES, 1), "x2": (BF16, 1)})
    error = refused(lambda: BACKEND.load(settings, source(tmp_path, proto)))
    assert (error.code, "input 't' is TYPE_STRING and output 'x2' is TYPE_BF16" in error.message) == (
        ErrorCode.UNSUPPORTED,
        True,
    )


def test_a_string_that_is_not_text_is_the_clients_mistake(tmp_path):
    settings = config({"x": (BYTES, 1)}, {"y": (BYTES, 1)})
    array = np.array([[b"fine"], [b"a\xff"]], dtype=object)
    assert refused(lambda: run(tmp_path, identity(BYTES, ("n", 1)), settings, {"x": array})) == InferenceError(
        ErrorCode.INVALID_ARG,
        "input 'x': an element is not UTF-8 text (invalid start byte at its byte 1), "
        "and ONNX Runtime takes no other strings",
    )


def test_a_string_that_is_not_text_fails_its_own_request_alone(tmp_path):
    settings = config({"x": (BYTES, 1)}, {"y": (BYTES, 1)})
    instance = BACKEND.load(settings, source(tmp_path, identity(BYTES, ("n", 1)))).create_instance(CPU)
    array = np.array([[b"fine"], [b"also fine"], [b"a\xff"], [b"fine"]], dtype=object)
    items = [BatchItem(key, InferenceRequest("m"), rows, cancelled=False) for key, rows in enumerate((2, 1, 1))]
    with pytest.raises(RefusedRequestsError) as caught:
        instance.run({"x": array}, ["y"], RunContext([""] * 3, [2, 1, 1], items))
    assert {position: error.code for position, error in caught.value.errors.items()} == {1: ErrorCode.INVALID_ARG}


def test_unaligned_inputs_are_read_correctly(tmp_path):
    body = b"\0" + floats([1, 2]).tobytes()
    a = np.frombuffer(memoryview(body)[1:], dtype=np.float32).reshape(1, 2)
    assert run(tmp_path, add_sub(), ADD_SUB, {"a": a, "b": a})["sum"].tolist() == [[2, 4]]


def test_outputs_outlive_inputs_session_and_later_batches(tmp_path):
    loaded = BACKEND.load(ADD_SUB, source(tmp_path, add_sub()))
    instance = loaded.create_instance(CPU)
    first = instance.run({"a": floats([1, 2]), "b": floats([3, 4])}, ["sum"], CONTEXT)["sum"]
    second = instance.run({"a": floats([5, 6]), "b": floats([7, 8])}, ["sum"], CONTEXT)["sum"]
    instance.close()
    loaded.close()
    del instance, loaded
    assert (first.tolist(), second.tolist()) == ([[4, 6]], [[12, 14]])


def test_an_output_that_is_an_input_does_not_share_its_memory(tmp_path):
    proto = model(
        [helper.make_node("Neg", ["x"], ["y"])],
        [tensor("x", FP32, ("n", 1))],
        [tensor("y", FP32, ("n", 1)), tensor("x", FP32, ("n", 1))],
    )
    array = floats([1])
    result = run(tmp_path, proto, config({"x": (FP32, 1)}, {"y": (FP32, 1), "x": (FP32, 1)}), {"x": array})
    array[:] = 9
    assert {k: v.tolist() for k, v in result.items()} == {"y": [[-1]], "x": [[1]]}


def test_an_optional_input_stands_for_an_initializer(tmp_path):
    proto = model(
        [helper.make_node("Add", ["x", "bias"], ["y"])],
        [tensor("x", FP32, ("n", 1)), tensor("bias", FP32, ("n", 1))],
        [tensor("y", FP32, ("n", 1))],
        [numpy_helper.from_array(floats([10]), "bias")],
    )
    settings = config({"x": (FP32, 1)}, {"y": (FP32, 1)})
    with_bias = replace(settings, input=(*settings.input, ModelInput("bias", FP32, dims=(1,), optional=True)))
    assert run(tmp_path, proto, settings, {"x": floats([1])})["y"].tolist() == [[11]]
    assert run(tmp_path, None, with_bias, {"x": floats([1])})["y"].tolist() == [[11]]
    assert run(tmp_path, None, with_bias, {"x": floats([1]), "bias": floats([2])})["y"].tolist() == [[3]]


def test_a_model_is_a_directory_when_its_weights_lie_beside_it(tmp_path):
    weights = np.arange(1024, dtype=np.float32).reshape(1, 1024)
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [tensor("x", FP32, ("n", 1024))],
        [tensor("y", FP32, ("n", 1024))],
        [numpy_helper.from_array(weights, "w")],
    )
    where = source(tmp_path, None)
    where.artifact.mkdir()
    onnx.save(proto, where.artifact / "model.onnx", save_as_external_data=True, location="weights.bin")
    assert sorted(os.listdir(where.artifact)) == ["model.onnx", "weights.bin"]
    result = run(tmp_path, None, config({"x": (FP32, 1024)}, {"y": (FP32, 1024)}), {"x": np.zeros_like(weights)})
    assert result["y"].tolist() == weights.tolist()


def test_missing_or_invalid_model_file_is_named(tmp_path):
    where = source(tmp_path, None)
    assert refused(lambda: BACKEND.load(ADD_SUB, where)) == InferenceError(
        ErrorCode.UNAVAILABLE, f"unable to find '{where.artifact}' for model 'm'"
    )
    where.artifact.write_bytes(b"no protobuf")
    assert refused(lambda: BACKEND.load(ADD_SUB, where)) == InferenceError(
        ErrorCode.INTERNAL,
        f"onnx runtime error 7: Load model from {where.artifact} failed:Protobuf parsing failed.",
    )


def test_all_disagreements_with_the_model_are_reported(tmp_path):
    wrong = config({"a": (BYTES, 2), "b": (FP32, 3)}, {"sum": (FP32, 2), "product": (FP32, 2)})
    error = refused(lambda: BACKEND.load(wrong, source(tmp_path, add_sub())))
    assert error.code is ErrorCode.INVALID_ARG
    found = [part in error.message for part in ("TYPE_STRING for input 'a'", "tensor 'b'", "'product'")]
    assert found == [True, True, True]


def test_a_failing_node_is_an_internal_error_that_logs_nothing_itself(tmp_path, capfd):
    proto = model(
        [helper.make_node("Squeeze", ["s", "one"], ["size"]), helper.make_node("Reshape", ["x", "size"], ["y"])],
        [tensor("x", FP32, ("n", 2)), tensor("s", DataType.INT64, ("n", 1))],
        [tensor("y", FP32, ("n",))],
        [numpy_helper.from_array(np.array([1]), "one")],
    )
    settings = config({"x": (FP32, 2), "s": (DataType.INT64, 1)}, {})
    settings = replace(settings, output=(ModelOutput("y", FP32, dims=(1,), reshape=ModelTensorReshape()),))
    inputs = {"x": floats([1, 2]), "s": np.array([[5]], np.int64)}
    error = refused(lambda: run(tmp_path, proto, settings, inputs))
    assert error.code is ErrorCode.INTERNAL
    assert error.message.startswith("onnx runtime error 1: Non-zero status code returned while running Reshape node")
    assert capfd.readouterr() == ("", "")


def test_autocomplete_fills_in_what_the_file_says(tmp_path):
    shape = ("batch", 3, None)
    completed = BACKEND.autocomplete(ModelConfig(), source(tmp_path, identity(FP32, shape), default_max_batch_size="6"))
    assert completed == ModelConfig(
        name="m",
        max_batch_size=6,
        input=(ModelInput("x", FP32, dims=(3, -1)),),
        output=(ModelOutput("y", FP32, dims=(3, -1)),),
        dynamic_batching=ModelDynamicBatching(),
    )


def test_autocomplete_does_not_open_a_fully_configured_model(tmp_path):
    assert BACKEND.autocomplete(ADD_SUB, source(tmp_path, None)) is ADD_SUB


def test_a_scalar_becomes_one_element_and_an_unknown_rank_stays_open(tmp_path):
    proto = model(
        [helper.make_node("Add", ["x", "s"], ["y"])],
        [tensor("x", FP32, None), tensor("s", FP32, ())],
        [tensor("y", FP32, None)],
    )
    where = source(tmp_path, proto)
    assert tensors_without_rank(where.artifact) == {"x", "y"}
    completed = BACKEND.autocomplete(ModelConfig(), where)
    assert completed.input == (ModelInput("x", FP32), ModelInput("s", FP32, dims=(1,), reshape=ModelTensorReshape()))
    assert completed.output == (ModelOutput("y", FP32),)

    settings = config({"x": (FP32, -1, 2), "s": (FP32, 1)}, {"y": (FP32, -1, 2)}, max_batch_size=0)
    settings = replace(settings, input=(settings.input[0], completed.input[1]))
    result = run(tmp_path, None, settings, {"x": floats([1, 2]), "s": np.array(3, np.float32)})
    assert result["y"].tolist() == [[4, 5]]


def test_non_tensor_output_is_skipped_unless_it_is_configured(tmp_path):
    proto = model(
        [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("SequenceConstruct", ["x"], ["list"])],
        [tensor("x", FP32, ("n", 1))],
        [tensor("y", FP32, ("n", 1)), helper.make_tensor_sequence_value_info("list", TensorProto.FLOAT, ("n", 1))],
    )
    where = source(tmp_path, proto)
    completed = BACKEND.autocomplete(ModelConfig(), where)
    assert [each.name for each in completed.output] == ["y"]
    assert run(tmp_path, None, completed, {"x": floats([1])})["y"].tolist() == [[1]]
    asked = config({"x": (FP32, 1)}, {"list": (FP32, 1)})
    assert refused(lambda: BACKEND.load(asked, where)) == InferenceError(
        ErrorCode.INVALID_ARG,
        "model 'm': unsupported ONNX type 'seq(tensor(float))' for I/O 'list', expected a tensor of a datatype that "
        "the protocol has",
    )


def group(kind: InstanceKind, count: int, gpus: tuple[int, ...] = ()) -> tuple[ModelInstanceGroup, ...]:
    return (ModelInstanceGroup("m", kind, count, gpus=gpus),)


def instances(directory: Path, count: int, **parameters: str):
    settings = replace(
        ADD_SUB,
        instance_group=group(InstanceKind.KIND_CPU, count),
        parameters={key: ModelParameter(value) for key, value in parameters.items()},
    )
    loaded = BACKEND.load(settings, source(directory, add_sub()))
    return [loaded.create_instance(Placement(f"m_{i}", i, "CPU")) for i in range(count)]


def test_instances_run_in_parallel_on_a_shared_session(tmp_path):
    several = instances(tmp_path, 4)
    inputs = {"a": floats([1, 2]), "b": floats([3, 4])}
    begin = threading.Barrier(len(several))

    def work(instance) -> list:
        begin.wait(10)
        return [instance.run(inputs, ["sum"], CONTEXT)["sum"].tolist() for _ in range(200)]

    with ThreadPoolExecutor(len(several)) as pool:
        assert list(pool.map(work, several)) == [[[[4, 6]]] * 200] * 4


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (plan_threads(2, 2), ThreadPlan(intra=1, inter=1, spin=True, share=True)),
        (plan_threads(16, 2), ThreadPlan(intra=15, inter=1, spin=True, share=True)),
        (plan_threads(2, 4), ThreadPlan(intra=1, inter=1, spin=False, share=True)),
        (plan_threads(4, 1), ThreadPlan(intra=4, inter=1, spin=True, share=True)),
        (plan_threads(16, 2, intra=1), ThreadPlan(intra=1, inter=1, spin=True, share=True)),
        (plan_threads(16, 2, intra=4), ThreadPlan(intra=4, inter=1, spin=True, share=False)),
        (plan_threads(4, 2, intra=4), ThreadPlan(intra=4, inter=1, spin=False, share=False)),
        (plan_threads(4, 2, parallel=True), ThreadPlan(intra=2, inter=2, spin=True, share=False)),
        (plan_threads(4, 1, intra=2, inter=3, parallel=True), ThreadPlan(intra=2, inter=3, spin=True, share=True)),
        (plan_threads(16, 2, can_share=False), ThreadPlan(intra=8, inter=1, spin=True, share=False)),
    ],
)
def test_threads_are_planned_so_that_the_instances_share_the_cores(plan, expected):
    assert plan == expected


@pytest.mark.parametrize(
    ("cpu_max", "cores"), [("max 100000\n", None), ("200000 100000\n", 2), ("50000 100000", 1), ("", None)]
)
def test_a_containers_quota_counts_whole_cores(cpu_max, cores):
    assert quota_cores(cpu_max) == cores


PREAMBLE = """
import os, sys
from dataclasses import replace
from pathlib import Path
from halimede.backends.api import ModelSource
from halimede.backends.onnxruntime import OnnxRuntimeBackend
from halimede.core.config.model_config import InstanceKind, ModelConfig, ModelInstanceGroup, ModelParameter
from halimede.core.types import Placement

def threads():
    return len(os.listdir("/proc/self/task"))

def where(**options):
    directory = Path(sys.argv[1])
    return ModelSource("m", 1, directory, directory / "1" / "model.onnx", options)

backend = OnnxRuntimeBackend()
"""


def in_a_new_process(code: str, directory: Path) -> str:
    """What `code` prints in a process of its own: threads of other tests' sessions must not be counted."""
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code, str(directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_sessions_start_the_threads_of_their_plan(tmp_path):
    source(tmp_path, add_sub())
    printed = in_a_new_process(
        """
config = backend.autocomplete(ModelConfig(), where())

def started(count, **parameters):
    groups = (ModelInstanceGroup("m", InstanceKind.KIND_CPU, count),)
    parameters = {key: ModelParameter(value) for key, value in parameters.items()}
    before = threads()
    model = backend.load(replace(config, instance_group=groups, parameters=parameters), where())
    instances = [model.create_instance(Placement("m", i, "CPU")) for i in range(count)]
    return threads() - before

print(*(started(count, intra_op_thread_count=each) for count, each in ((4, "1"), (1, "4"), (2, "3"))))
""",
        tmp_path,
    )
    assert printed == "0 3 4"


def test_a_parallel_model_without_arena_and_pattern_computes_the_same(tmp_path):
    settings = replace(
        ADD_SUB,
        optimization=ModelOptimizationPolicy(execution_accelerators=ExecutionAccelerators()),
        parameters={
            "execution_mode": ModelParameter("1"),
            "inter_op_thread_count": ModelParameter("2"),
            "enable_mem_arena": ModelParameter("0"),
            "enable_mem_pattern": ModelParameter("0"),
            "memory.enable_memory_arena_shrinkage": ModelParameter("cpu:0"),
            "session.use_device_allocator_for_initializers": ModelParameter("1"),
        },
    )
    # Shrinking an arena that was switched off is the runtime's error, in the runtime's words.
    inputs = {"a": floats([1, 2]), "b": floats([3, 4])}
    error = refused(lambda: run(tmp_path, add_sub(), settings, inputs))
    assert "onnx runtime error" in error.message
    with_arena = dict(settings.parameters) | {"enable_mem_arena": ModelParameter("1")}
    result = run(tmp_path, None, replace(settings, parameters=with_arena), inputs)
    assert result["sum"].tolist() == [[4, 6]]


@pytest.mark.parametrize(
    ("settings", "provider"),
    [
        ({"instance_group": group(InstanceKind.KIND_GPU, 1, (0,))}, "CUDAExecutionProvider"),
        (
            {
                "optimization": ModelOptimizationPolicy(
                    execution_accelerators=ExecutionAccelerators(cpu_execution_accelerator=(Accelerator("openvino"),))
                )
            },
            "OpenVINOExecutionProvider",
        ),
    ],
)
def test_a_provider_that_is_not_installed_is_a_load_error(tmp_path, settings, provider):
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if provider in available:
        pytest.skip(f"{provider} is installed here")
    assert refused(lambda: BACKEND.load(replace(ADD_SUB, **settings), source(tmp_path, add_sub()))) == InferenceError(
        ErrorCode.UNSUPPORTED,
        f"model 'm' is configured for {provider}, which the installed onnxruntime does not have; "
        f"it has {', '.join(available)}",
    )


def test_a_gpu_instance_needs_a_device(tmp_path):
    loaded = BACKEND.load(ADD_SUB, source(tmp_path, add_sub()))
    assert refused(lambda: loaded.create_instance(Placement("m_0", 0, "GPU"))) == InferenceError(
        ErrorCode.INTERNAL, "instance 'm_0' is of KIND_GPU and has no device"
    )


def test_defaults():
    assert BACKEND.default_model_filename == "model.onnx"
    assert [BACKEND.default_instance_count(kind) for kind in ("CPU", "GPU", "MODEL")] == [2, 1, 1]


def test_all_models_can_share_one_pool_of_threads(tmp_path):
    source(tmp_path, add_sub())
    printed = in_a_new_process(
        """
backend.supports_gpu()
before = threads()
pool = {"enable-global-threadpool": "1", "intra-op-thread-count": "3", "inter-op-thread-count": "1"}
config = backend.autocomplete(ModelConfig(), where(**pool))
models = [backend.load(config, where(**pool)) for _ in range(3)]
print(threads() - before)
""",
        tmp_path,
    )
    assert printed == "2"


def test_invalid_numeric_backend_setting_is_named(tmp_path):
    where = source(tmp_path, add_sub(), default_max_batch_size="many")
    assert refused(lambda: BACKEND.autocomplete(ModelConfig(), where)) == InferenceError(
        ErrorCode.INVALID_ARG,
        "--backend-config onnxruntime,default-max-batch-size=many: it must be a number, at least 0",
    )
