import os
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from halimede.backends.api import LostInstanceError, RefusedRequestsError, RunContext
from halimede.backends.onnxruntime.instance import OnnxInstance
from halimede.backends.onnxruntime.signature import tensors_without_rank
from halimede.core.config.model_config import (
    Accelerator,
    ExecutionAccelerators,
    InstanceKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelParameter,
    ModelTensorReshape,
)
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, Placement
from halimede.workers.worker import BatchItem
from support.onnx_models import (
    ADD_SUB,
    BACKEND,
    CONTEXT,
    CPU,
    ONNX_TYPES,
    add_sub,
    config,
    floats,
    group,
    identity,
    model,
    refused,
    run,
    source,
    tensor,
)

FP32, BYTES, BF16 = DataType.FP32, DataType.BYTES, DataType.BF16


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
    proto = identity(datatype, ("n", 3) if shape and shape[0] == 0 else shape)
    if not shape:
        # Clients see a scalar as one element.
        shape = (1,)
        array, expected = array.reshape(shape), expected.reshape(shape)
        settings = config({"x": (datatype, 1)}, {"y": (datatype, 1)}, max_batch_size=0)
    elif shape[0] == 0:
        settings = config({"x": (datatype, -1, 3)}, {"y": (datatype, -1, 3)}, max_batch_size=0)
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


def test_a_string_that_is_not_utf8_is_invalid_arg(tmp_path):
    settings = config({"x": (BYTES, 1)}, {"y": (BYTES, 1)})
    array = np.array([[b"fine"], [b"a\xff"]], dtype=object)
    assert refused(lambda: run(tmp_path, identity(BYTES, ("n", 1)), settings, {"x": array})) == InferenceError(
        ErrorCode.INVALID_ARG,
        "input 'x': an element is not UTF-8 text (invalid start byte at its byte 1), "
        "and ONNX Runtime takes no other strings",
    )


def test_a_string_that_is_not_utf8_fails_only_its_request(tmp_path):
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


def test_a_failing_node_is_an_internal_error_without_output(tmp_path, capfd):
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


class FailingSession:
    """A session on a GPU, without inputs, whose runs fail."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_inputs(self) -> list[object]:
        return []

    def run(self, *_: object) -> list[np.ndarray]:
        raise RuntimeError(self.text)


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was encountered ; GPU=0", True),
        ("CUDA failure 700: an illegal memory access was encountered ; GPU=0", True),
        ("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 2: out of memory ; GPU=0", False),
    ],
)
def test_a_lost_device_asks_for_a_new_process(text, is_lost):
    instance = OnnxInstance(FailingSession(text), ADD_SUB, "")
    error = refused(lambda: instance.run({}, ["sum"], CONTEXT))
    assert isinstance(error, LostInstanceError) is is_lost
    assert "CUDA failure" in error.message


def test_autocomplete_completes_the_configuration_from_the_file(tmp_path):
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
    assert completed.input == (ModelInput("x", FP32), ModelInput("s", FP32, dims=(1,)))
    assert completed.output == (ModelOutput("y", FP32),)

    settings = config({"x": (FP32, -1, 2), "s": (FP32, 1)}, {"y": (FP32, -1, 2)}, max_batch_size=0)
    result = run(tmp_path, None, settings, {"x": floats([1, 2]), "s": floats(3)})
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
    ("settings", "provider", "hint"),
    [
        ({"instance_group": group(InstanceKind.KIND_GPU, 1, (0,))}, "CUDAExecutionProvider", ""),
        (
            {
                "optimization": ModelOptimizationPolicy(
                    execution_accelerators=ExecutionAccelerators(cpu_execution_accelerator=(Accelerator("openvino"),))
                )
            },
            "OpenVINOExecutionProvider",
            '; to run it with OpenVINO, set backend: "openvino" and remove the platform and this accelerator',
        ),
    ],
)
def test_a_provider_that_is_not_installed_is_a_load_error(tmp_path, settings, provider, hint):
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if provider in available:
        pytest.skip(f"{provider} is installed here")
    assert refused(lambda: BACKEND.load(replace(ADD_SUB, **settings), source(tmp_path, add_sub()))) == InferenceError(
        ErrorCode.UNSUPPORTED,
        f"model 'm' is configured for {provider}, which the installed onnxruntime does not have; "
        f"it has {', '.join(available)}{hint}",
    )


def test_a_gpu_instance_needs_a_device(tmp_path):
    loaded = BACKEND.load(ADD_SUB, source(tmp_path, add_sub()))
    assert refused(lambda: loaded.create_instance(Placement("m_0", 0, "GPU"))) == InferenceError(
        ErrorCode.INTERNAL, "instance 'm_0' is of KIND_GPU and has no device"
    )


def test_defaults():
    assert BACKEND.default_model_filename == "model.onnx"
    assert [BACKEND.default_instance_count(kind) for kind in ("CPU", "GPU", "MODEL")] == [2, 1, 1]


def test_invalid_numeric_backend_setting_is_named(tmp_path):
    where = source(tmp_path, add_sub(), default_max_batch_size="many")
    assert refused(lambda: BACKEND.autocomplete(ModelConfig(), where)) == InferenceError(
        ErrorCode.INVALID_ARG,
        "--backend-config onnxruntime,default-max-batch-size=many: it must be a number, at least 0",
    )
