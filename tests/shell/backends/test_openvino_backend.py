"""The OpenVINO backend with the real runtime, called as workers call it."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from halimede.backends.openvino.runtime import operations, runtime
from halimede.core.config.model_config import (
    InstanceKind,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelSequenceBatching,
)
from halimede.core.types import DataType, ErrorCode, InferenceError
from support.foreign_models import WRITERS, write_paddle
from support.onnx_models import add_sub as onnx_add_sub
from support.onnx_models import floats, refused
from support.openvino_models import (
    ADD_SUB,
    BACKEND,
    CONTEXT,
    CPU,
    OPENVINO_TYPES,
    PERCEPTRON,
    add_sub,
    bare,
    config,
    graph,
    identity,
    named,
    parameter,
    perceptron,
    rows,
    run,
    source,
    with_parameters,
)

FP32, BYTES, BF16, INT32 = DataType.FP32, DataType.BYTES, DataType.BF16, DataType.INT32
PAIR = {"a": floats([1, 2], [3, 4]), "b": floats([5, 6], [7, 8])}


def test_only_requested_outputs_are_returned(tmp_path):
    result = run(tmp_path, add_sub(), ADD_SUB, PAIR)
    assert {k: v.tolist() for k, v in result.items()} == {"difference": [[-4, -4], [-4, -4]], "sum": [[6, 8], [10, 12]]}
    assert list(run(tmp_path, None, ADD_SUB, PAIR, ["sum"])) == ["sum"]


@pytest.mark.parametrize("shape", [(2, 3), ()], ids=str)
@pytest.mark.parametrize("datatype", OPENVINO_TYPES, ids=lambda each: each.name)
def test_every_datatype_goes_through_unchanged(tmp_path, datatype, shape):
    if datatype is BYTES:
        array = np.empty(shape, dtype=object)
        array.reshape(-1)[:] = [b"", b"\xff\0", "ü".encode(), b"a" * 1000, b"\0\0", b"end"][: array.size]
    else:
        # All bits of the element in use; 1 for BOOL, which has but two values.
        raw = (np.arange(int(np.prod(shape)) * datatype.itemsize) * 37 % 251).astype(np.uint8)
        raw = raw % 2 if datatype is DataType.BOOL else raw
        array = np.frombuffer(raw.tobytes(), datatype.dtype).reshape(shape)
    model = identity(datatype, shape)
    shape = shape or (1,)  # clients see a scalar as one element
    array = array.reshape(shape)
    settings = config({"x": (datatype, *shape)}, {"x": (datatype, *shape)}, max_batch_size=0)
    array.flags.writeable = False
    (result,) = run(tmp_path, model, settings, {"x": array}).values()
    assert (result.shape, result.dtype) == (shape, datatype.dtype)
    assert result.tolist() == array.tolist() if datatype is BYTES else result.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    ("parameters", "precision"), [({}, "f32"), ({"HINT_BF16": "YES"}, "bf16")], ids=["f32", "bf16"]
)
def test_numbers_are_those_of_the_bare_runtime(tmp_path, parameters, precision):
    """Bit for bit, for the same batch and precision."""
    values = rows(5)
    result = run(tmp_path, perceptron(), with_parameters(PERCEPTRON, **parameters), {"x": values})
    expected = bare(tmp_path / "1" / "model.xml", {"x": values}, INFERENCE_PRECISION_HINT=precision)
    assert result["y"].tobytes() == expected["y"].tobytes()


def test_single_precision_is_computed_in_single_precision(tmp_path):
    """OpenVINO's own default would be bfloat16 where the processor has it."""
    values = rows(5)
    result = run(tmp_path, perceptron(layers=1), PERCEPTRON, {"x": values})
    weights = np.random.default_rng(7).standard_normal((64, 64)).astype(np.float32) / np.float32(8)
    np.testing.assert_allclose(result["y"], np.tanh(values @ weights), rtol=1e-4, atol=1e-5)


def test_outputs_outlive_later_batches_and_the_model(tmp_path):
    loaded = BACKEND.load(ADD_SUB, source(tmp_path, add_sub()))
    instance = loaded.create_instance(CPU)
    first = instance.run({"a": floats([1, 2]), "b": floats([3, 4])}, ["sum"], CONTEXT)["sum"]
    second = instance.run({"a": floats([5, 6]), "b": floats([7, 8])}, ["sum"], CONTEXT)["sum"]
    instance.close()
    loaded.close()
    del instance, loaded
    assert (first.tolist(), second.tolist()) == ([[4, 6]], [[12, 14]])


def test_an_output_that_is_an_input_has_its_own_memory(tmp_path):
    x = parameter("x", FP32, (-1, 1))
    settings = config({"x": (FP32, 1)}, {"y": (FP32, 1), "x": (FP32, 1)})
    loaded = BACKEND.load(settings, source(tmp_path, graph([named(operations().negative(x), "y"), x], [x])))
    instance = loaded.create_instance(CPU)
    array = floats([1])
    result = instance.run({"x": array}, ["y", "x"], CONTEXT)
    array[:] = 9
    instance.run({"x": array}, ["y", "x"], CONTEXT)
    assert {k: v.tolist() for k, v in result.items()} == {"y": [[-1]], "x": [[1]]}


def test_batches_of_changing_sizes_are_computed_alike(tmp_path):
    loaded = BACKEND.load(PERCEPTRON, source(tmp_path, perceptron()))
    instance = loaded.create_instance(CPU)
    for count in (1, 8, 3, 1, 8):
        values = rows(count)
        expected = bare(tmp_path / "1" / "model.xml", {"x": values})["y"]
        assert instance.run({"x": values}, ["y"], CONTEXT)["y"].tobytes() == expected.tobytes()


def test_instances_run_at_once_on_one_compiled_model(tmp_path):
    settings = replace(PERCEPTRON, instance_group=(ModelInstanceGroup("m", InstanceKind.KIND_CPU, 2),))
    loaded = BACKEND.load(settings, source(tmp_path, perceptron()))
    instances = [loaded.create_instance(CPU) for _ in range(2)]
    batches = [rows(3), rows(3) * 2]
    expected = [bare(tmp_path / "1" / "model.xml", {"x": each})["y"].tobytes() for each in batches]

    def repeat(number: int) -> set[bytes]:
        return {instances[number].run({"x": batches[number]}, ["y"], CONTEXT)["y"].tobytes() for _ in range(200)}

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(repeat, range(2))) == [{each} for each in expected]


def test_a_run_releases_the_interpreters_lock(tmp_path):
    """With tensors so small that no copy of them releases it."""
    ops = operations()
    value = ops.matmul(x := parameter("x", FP32, (-1, 1)), np.ones((1, 1024), np.float32), False, False)
    for _ in range(4):
        value = ops.matmul(value, np.ones((1024, 1024), np.float32), False, False)
    y = named(ops.reduce_max(value, np.array([1]), True), "y")
    settings = config({"x": (FP32, 1)}, {"y": (FP32, 1)}, max_batch_size=32)
    instance = BACKEND.load(settings, source(tmp_path, graph([y], [x]))).create_instance(CPU)
    array = np.zeros((32, 1), np.float32)
    counted, is_over = [0], [False]

    def count() -> None:
        while not is_over[0]:
            counted[0] += 1
            # Offers the lock, which the interpreter itself would not take away for a minute.
            time.sleep(0)

    def counts_during_a_run() -> int:
        before = counted[0]
        instance.run({"x": array}, ["y"], CONTEXT)
        return counted[0] - before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    counter = threading.Thread(target=count)
    counter.start()
    try:
        assert any(counts_during_a_run() > 10 for _ in range(100))
    finally:
        sys.setswitchinterval(interval)
        is_over[0] = True
        counter.join()


def test_a_batch_without_elements_is_refused(tmp_path):
    """OpenVINO would answer it with what an earlier batch left in memory."""
    x = parameter("x", FP32, (-1, -1))
    values = named(operations().unique(x), "y")
    settings = config({"x": (FP32, -1, -1)}, {"y": (FP32, -1)}, max_batch_size=0)
    instance = BACKEND.load(settings, source(tmp_path, graph([values], [x]))).create_instance(CPU)
    assert instance.run({"x": floats([3, 3])}, ["y"], CONTEXT)["y"].tolist() == [3]
    error = refused(lambda: instance.run({"x": np.zeros((0, 2), np.float32)}, ["y"], CONTEXT))
    assert error.code is ErrorCode.INVALID_ARG
    assert error.message.startswith("input 'x' has the shape [0, 2], without an element")


def test_a_batch_without_an_input_is_refused(tmp_path):
    instance = BACKEND.load(ADD_SUB, source(tmp_path, add_sub())).create_instance(CPU)
    instance.run(PAIR, ["sum"], CONTEXT)
    error = refused(lambda: instance.run({"a": PAIR["a"]}, ["sum"], CONTEXT))
    assert error == InferenceError(ErrorCode.INVALID_ARG, "the model needs all its inputs, and the batch lacks 'b'")


def test_an_optional_input_is_refused_at_load(tmp_path):
    settings = replace(ADD_SUB, input=(ADD_SUB.input[0], replace(ADD_SUB.input[1], optional=True)))
    error = refused(lambda: BACKEND.load(settings, source(tmp_path, add_sub())))
    assert error.message == "unable to load model 'm': input 'b' is optional, and OpenVINO needs every input"


def test_a_failing_run_leaves_the_instance_usable(tmp_path):
    a, b = parameter("a", FP32, (-1, -1)), parameter("b", FP32, (-1, -1))
    settings = config({"a": (FP32, -1), "b": (FP32, -1)}, {"y": (FP32, -1)})
    model = graph([named(operations().add(a, b), "y")], [a, b])
    instance = BACKEND.load(settings, source(tmp_path, model)).create_instance(CPU)
    error = refused(lambda: instance.run({"a": floats([1, 2]), "b": floats([1, 2, 3])}, ["y"], CONTEXT))
    assert error == InferenceError(
        ErrorCode.INTERNAL, "openvino error: Eltwise shape infer input shapes dim index: 1 mismatch"
    )
    assert instance.run({"a": floats([1, 2]), "b": floats([1, 2])}, ["y"], CONTEXT)["y"].tolist() == [[2, 4]]


def test_states_in_the_file_begin_anew_with_every_batch(tmp_path):
    """They would be those of another client."""
    ops = operations()
    x = parameter("x", FP32, (1, 2))
    read = runtime().opset6.read_value(ops.constant(np.zeros((1, 2), np.float32)), "v")
    total = named(ops.add(read, x), "y")
    model = runtime().Model([ops.result(total)], [runtime().opset6.assign(total, "v")], [x], "g")
    settings = config({"x": (FP32, 1, 2)}, {"y": (FP32, 1, 2)}, max_batch_size=0)
    instance = BACKEND.load(settings, source(tmp_path, model)).create_instance(CPU)
    assert [instance.run({"x": floats([1, 2])}, ["y"], CONTEXT)["y"].tolist() for _ in range(2)] == [[[1, 2]]] * 2

    sequences = replace(settings, sequence_batching=ModelSequenceBatching())
    error = refused(lambda: BACKEND.load(sequences, source(tmp_path)))
    assert "the file has states of its own (ReadValue and Assign)" in error.message


@pytest.mark.parametrize("place", ["model.onnx", "model.onnx/model.onnx"])
def test_an_onnx_file_beside_a_missing_ir_is_served(tmp_path, place):
    where = source(tmp_path)
    path = where.artifact.parent / place
    path.parent.mkdir(exist_ok=True)
    onnx.save(onnx_add_sub(), path)
    assert BACKEND.autocomplete(ModelConfig(), where).input[0] == ModelInput("a", FP32, dims=(2,))
    assert run(tmp_path, None, ADD_SUB, PAIR)["sum"].tolist() == [[6, 8], [10, 12]]


@pytest.mark.parametrize("filename", WRITERS)
def test_files_of_other_frameworks_are_served(tmp_path, filename):
    """Without `default_model_filename`: they lie beside a model.xml that does not exist."""
    where = source(tmp_path)
    WRITERS[filename](where.artifact.with_name(filename))
    completed = BACKEND.autocomplete(ModelConfig(name="m"), where)
    [given], [made] = completed.input, completed.output
    assert (given.dims, made.dims, completed.max_batch_size) == ((3,), (3,), 4)
    result = run(tmp_path, None, completed, {given.name: floats([1, 2, 3], [4, 5, 6])})
    assert result[made.name].tolist() == [[3, 5, 7], [9, 11, 13]]


def test_a_missing_file_is_named(tmp_path):
    where = source(tmp_path)
    assert refused(lambda: BACKEND.load(ADD_SUB, where)) == InferenceError(
        ErrorCode.UNAVAILABLE,
        f"unable to find '{where.artifact}' for model 'm', nor model.onnx, model.pdmodel, model.tflite, "
        "model.savedmodel beside it; name a file of another name as default_model_filename in config.pbtxt",
    )
    # A file that the configuration names is the only one.
    onnx.save(onnx_add_sub(), where.artifact.with_name("model.onnx"))
    other = replace(where, artifact=where.artifact.with_name("other.xml"))
    settings = replace(ADD_SUB, default_model_filename="other.xml")
    assert refused(lambda: BACKEND.load(settings, other)).code is ErrorCode.UNAVAILABLE


def truncate(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda xml: truncate(xml, 500), "Start-end tags mismatch at offset "),
        (lambda xml: xml.write_text("no model"), "Unable to read the model: "),
        (lambda xml: truncate(xml.with_suffix(".bin"), 100), "Incorrect weights in bin file!"),
        (lambda xml: xml.with_suffix(".bin").unlink(), "Empty weights data in bin file or bin file cannot be found!"),
        (
            lambda xml: xml.write_text(xml.read_text().replace('"opset1"', '"/tmp/library.so"')),
            "from unsupported opset: /tmp/library.so",
        ),
    ],
    ids=["truncated", "text", "short weights", "no weights", "custom operation"],
)
def test_a_file_that_cannot_be_read_is_one_error(tmp_path, spoil, text):
    where = source(tmp_path, perceptron())
    spoil(where.artifact)
    error = refused(lambda: BACKEND.load(PERCEPTRON, where))
    assert error.code is ErrorCode.INTERNAL
    assert error.message.startswith(f"openvino error in '{where.artifact}': ")
    assert text in error.message
    assert "src/" not in error.message


def test_a_name_that_is_not_text_is_one_error(tmp_path):
    where = source(tmp_path)
    path = where.artifact.with_name("model.pdmodel")
    write_paddle(path)
    path.write_bytes(path.read_bytes().replace(b"\x01x", b"\x01\xde"))
    assert refused(lambda: BACKEND.autocomplete(ModelConfig(), where)) == InferenceError(
        ErrorCode.INVALID_ARG, "unable to load model 'm': the file has a name that is not UTF-8 text"
    )


def test_an_onnx_file_reads_no_file_outside_its_folder(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(8))
    weights = helper.make_tensor("w", TensorProto.FLOAT, [1, 2], bytes(8), raw=True)
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "../secret", "length": "8", "offset": "0"}.items():
        weights.external_data.add(key=key, value=value)
    proto = onnx_add_sub()
    proto.graph.input.remove(proto.graph.input[1])
    proto.graph.node[0].input[1] = proto.graph.node[1].input[1] = "w"
    proto.graph.initializer.append(weights)
    where = source(tmp_path)
    where.artifact.with_name("model.onnx").write_bytes(proto.SerializeToString())
    error = refused(lambda: BACKEND.autocomplete(ModelConfig(), where))
    assert error.code is ErrorCode.INTERNAL
    assert "secret" in error.message


def test_weights_are_not_mapped(tmp_path):
    """A file that is cut while it is mapped would end the server with SIGBUS."""
    loaded = BACKEND.load(PERCEPTRON, source(tmp_path, perceptron()))
    with open("/proc/self/maps") as maps:
        assert str(tmp_path) not in maps.read()
    loaded.close()


def test_a_device_that_is_not_there_is_named(tmp_path):
    settings = with_parameters(ADD_SUB, TARGET_DEVICE="NPU")
    error = refused(lambda: BACKEND.load(settings, source(tmp_path, add_sub())))
    assert error.message.startswith("openvino error on device 'NPU' (available: CPU): ")


def test_a_gpu_of_nvidia_is_refused(tmp_path):
    settings = replace(ADD_SUB, instance_group=(ModelInstanceGroup("m", InstanceKind.KIND_GPU, 1, gpus=(0,)),))
    assert refused(lambda: BACKEND.load(settings, source(tmp_path, add_sub()))) == InferenceError(
        ErrorCode.INVALID_ARG,
        "unable to load model 'm': KIND_GPU is a GPU of NVIDIA, which OpenVINO cannot use; for one of Intel, use "
        "KIND_CPU and the parameter TARGET_DEVICE with the value GPU",
    )


@pytest.mark.parametrize(
    "parameters",
    [
        {"PERFORMANCE_HINT": "THROUGHPUT"},
        {"PERFORMANCE_HINT": "CUMULATIVE_THROUGHPUT"},
        {"NUM_STREAMS": "AUTO"},
        {"NUM_STREAMS": "NUMA"},
        {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": "1"},
        {"TARGET_DEVICE": "AUTO"},
        {"TARGET_DEVICE": "HETERO:CPU"},
        {"TARGET_DEVICE": "MULTI:CPU"},
    ],
    ids=str,
)
def test_openvino_takes_every_parameter(tmp_path, parameters):
    assert run(tmp_path, add_sub(), with_parameters(ADD_SUB, **parameters), PAIR)["sum"].tolist() == [[6, 8], [10, 12]]


def test_a_property_that_a_device_lacks_is_a_warning(tmp_path, caplog):
    run(tmp_path, add_sub(), with_parameters(ADD_SUB, COMPILATION_NUM_THREADS="1"), PAIR)
    assert [each.getMessage() for each in caplog.records] == [
        "model 'm': parameter 'COMPILATION_NUM_THREADS' has no effect on device 'CPU'"
    ]


def test_a_loaded_model_opens_no_other_library(tmp_path):
    """Checked in a process of its own: its libraries are the system's, numpy's and OpenVINO's, and nothing is unpickled."""
    where = source(tmp_path, perceptron())
    text = where.artifact.read_text().replace("</net>", '<rt_info><extension value="/tmp/x.so"/></rt_info></net>')
    where.artifact.write_text(text)
    onnx.save(onnx_add_sub(), where.artifact.with_name("model.onnx"))
    code = """
        import re, sys
        from pathlib import Path
        from support.openvino_models import *
        events = set()
        BACKEND.supports_gpu(), runtime(), operations()
        import numpy as np
        sys.addaudithook(lambda event, arguments: events.add(event))
        folder = Path(sys.argv[1])
        instance = BACKEND.load(config({"x": (FP32, 64)}, {"y": (FP32, 64)}), source(folder)).create_instance(CPU)
        instance.run({"x": np.ones((2, 64), np.float32)}, ["y"], CONTEXT)
        other = ModelSource("m", 1, folder, folder / "1" / "model.onnx")
        BACKEND.load(ADD_SUB, other).create_instance(CPU)
        places = set(re.findall(r"(/\\S+)/[^/\\s]+\\.so[.0-9]*$", Path("/proc/self/maps").read_text(), re.MULTILINE))
        allowed = ("/lib", "/usr/lib", *(path for path in sys.path if path.endswith(("site-packages", "lib-dynload"))))
        home = str(Path(sys.executable).resolve().parents[1])
        print(sorted(place for place in places if not place.startswith((*allowed, home))))
        print(sorted(each for each in events if each.startswith(("pickle", "ctypes", "subprocess", "socket", "exec"))))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": "tests"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["[]", "[]"]), done.stderr
