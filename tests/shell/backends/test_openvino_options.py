"""Options, names and error texts of the OpenVINO backend, without OpenVINO."""

import pytest

from halimede.backends.openvino.errors import openvino_error
from halimede.backends.openvino.options import OpenVinoOptions, compile_properties, read_options
from halimede.backends.openvino.signature import Port, choose_ports, first_batch, named_ports
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput, ModelParameter
from halimede.core.types import DataType, ErrorCode, InferenceError
from support.forked import run_python


def parameters(**values: str) -> ModelConfig:
    return ModelConfig(parameters={key: ModelParameter(value) for key, value in values.items()})


def properties(cores: int = 8, instances: int = 2, **values: str) -> dict:
    config = parameters(**values)
    return dict(compile_properties(read_options(config, "m"), config, cores=cores, instances=instances))


def port(*names: str, node: str = "", type_name: str = "f32", shape: tuple[int, ...] | None = (-1, 2)) -> Port:
    return Port(names, node, type_name, shape)


def test_unset_options_have_defaults():
    assert read_options(ModelConfig(), "m") == OpenVinoOptions()


def test_every_parameter_is_read():
    config = parameters(
        PERFORMANCE_HINT="throughput",
        CPU_EXTENSION_PATH="/opt/custom.so",
        ISOLATION="process",
        INFERENCE_NUM_THREADS="4",
        COMPILATION_NUM_THREADS="2",
        HINT_BF16="YES",
        NUM_STREAMS="auto",
        SKIP_OV_DYNAMIC_BATCHSIZE="yes",
        ENABLE_BATCH_PADDING="YES",
        RESHAPE_IO_LAYERS="YES",
        TARGET_DEVICE="auto:gpu,cpu",
        somebody_elses="x",
    )
    assert read_options(config, "m") == OpenVinoOptions(
        device="AUTO:GPU,CPU",
        precision="bf16",
        performance_hint="THROUGHPUT",
        streams="AUTO",
        inference_threads=4,
        compilation_threads=2,
        extension="/opt/custom.so",
        keeps_batch=True,
        pads_batches=True,
        reshapes=True,
    )


@pytest.mark.parametrize("isolation", [{}, {"ISOLATION": "thread"}], ids=["default", "thread"])
def test_a_library_of_operations_is_refused_in_the_server(isolation):
    with pytest.raises(InferenceError) as caught:
        read_options(parameters(CPU_EXTENSION_PATH="/opt/custom.so", **isolation), "m")
    assert caught.value == InferenceError(
        ErrorCode.INVALID_ARG,
        "model 'm': parameter 'CPU_EXTENSION_PATH' is '/opt/custom.so': the server does not load libraries of custom "
        "operations; set parameter 'ISOLATION' to 'process', so that the model's own processes load it",
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"INFERENCE_NUM_THREADS": "-1", "HINT_BF16": "maybe"},
            "parameter 'HINT_BF16' is 'maybe'; it must be one of YES, NO; "
            "parameter 'INFERENCE_NUM_THREADS' is '-1'; it must be a number from 0 to 1024",
        ),
        # More digits than int() takes, and digits that are none here.
        (
            {"COMPILATION_NUM_THREADS": "9" * 5000, "NUM_STREAMS": "\u0663"},
            "parameter 'NUM_STREAMS' is '\u0663'; it must be AUTO, NUMA or a number from 1 to 1024; "
            f"parameter 'COMPILATION_NUM_THREADS' is '{'9' * 256}...'; it must be a number from 0 to 1024",
        ),
        ({"NUM_STREAMS": "0"}, "parameter 'NUM_STREAMS' is '0'; it must be AUTO, NUMA or a number from 1 to 1024"),
        (
            {"PERFORMANCE_HINT": "FAST"},
            "parameter 'PERFORMANCE_HINT' is 'FAST'; it must be one of LATENCY, THROUGHPUT, CUMULATIVE_THROUGHPUT",
        ),
        (
            {"TARGET_DEVICE": "../libevil.so"},
            "parameter 'TARGET_DEVICE' is '../libevil.so'; it must be CPU, GPU, NPU, or AUTO, MULTI, HETERO, BATCH "
            "with or without a list of devices (AUTO:GPU,CPU)",
        ),
        (
            {"CPU_EXTENSION_PATH": "custom.so", "ISOLATION": "process"},
            "parameter 'CPU_EXTENSION_PATH' is 'custom.so'; it must be the absolute path of a library",
        ),
    ],
    ids=range(6),
)
def test_invalid_parameter_is_named_with_the_valid_values(values, text):
    with pytest.raises(InferenceError) as caught:
        read_options(parameters(**values), "m")
    assert caught.value == InferenceError(ErrorCode.INVALID_ARG, f"model 'm': {text}")


DEFAULT = {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False, "INFERENCE_NUM_THREADS": 8, "NUM_STREAMS": 2}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, DEFAULT),
        ({"HINT_BF16": "YES"}, DEFAULT | {"INFERENCE_PRECISION_HINT": "bf16"}),
        (
            {"NUM_STREAMS": "4", "INFERENCE_NUM_THREADS": "4"},
            DEFAULT | {"NUM_STREAMS": "4", "INFERENCE_NUM_THREADS": 4},
        ),
        ({"COMPILATION_NUM_THREADS": "3"}, DEFAULT | {"COMPILATION_NUM_THREADS": 3}),
        # Each instance is alone in its process.
        ({"ISOLATION": "process"}, DEFAULT | {"INFERENCE_NUM_THREADS": 4, "NUM_STREAMS": 1}),
        (
            {"ISOLATION": "process", "INTRA_OP_THREAD_COUNT": "3"},
            DEFAULT | {"INFERENCE_NUM_THREADS": 3, "NUM_STREAMS": 1},
        ),
        ({"TARGET_DEVICE": "GPU"}, {"INFERENCE_PRECISION_HINT": "f32"}),
        ({"TARGET_DEVICE": "AUTO:-CPU"}, {"INFERENCE_PRECISION_HINT": "f32"}),
        ({"TARGET_DEVICE": "HETERO:GPU,CPU"}, DEFAULT),
        ({"TARGET_DEVICE": "AUTO"}, DEFAULT),
        ({"TARGET_DEVICE": "NPU"}, {}),
        ({"TARGET_DEVICE": "NPU", "HINT_BF16": "YES"}, {"INFERENCE_PRECISION_HINT": "bf16"}),
        (
            {"TARGET_DEVICE": "GPU.1", "INFERENCE_NUM_THREADS": "2"},
            {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 2},
        ),
    ],
    ids=range(13),
)
def test_the_instances_share_the_cores(values, expected):
    assert properties(**values) == expected


def test_a_hint_chooses_the_streams():
    expected = {key: value for key, value in DEFAULT.items() if key != "NUM_STREAMS"}
    assert properties(PERFORMANCE_HINT="LATENCY") == expected | {"PERFORMANCE_HINT": "LATENCY"}
    assert properties(PERFORMANCE_HINT="LATENCY", NUM_STREAMS="3") == expected | {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "3",
    }


def test_a_port_goes_by_its_configured_name():
    ports = [port("x", "x:0"), port("mask"), port(node="Parameter_3")]
    assert [each.name for each in named_ports(ports, ())] == ["x", "mask", "Parameter_3"]
    found = named_ports(ports, {"x:0", "Parameter_3"})
    assert [(each.name, each.index) for each in found] == [("x:0", 0), ("mask", 1), ("Parameter_3", 2)]


def test_ports_of_one_tensor_get_different_names():
    """A graph may list the same tensor as several outputs."""
    same = [port("y", "y:0"), port("y", "y:0"), port("y", "y:0")]
    assert [(each.name, each.index) for each in named_ports(same, ())] == [("y", 0), ("y:0", 1)]
    both = named_ports(same, {"y", "y:0"})
    assert [(each.name, each.index) for each in both] == [("y", 0), ("y:0", 0)]


def test_an_output_of_an_unknown_type_is_left_out_unless_configured():
    outputs = [port("y"), port("packed", type_name="u4")]
    assert [each.name for each in choose_ports([port("x")], outputs, ModelConfig(name="m")).outputs] == ["y"]
    config = ModelConfig(name="m", output=(ModelOutput("packed", DataType.UINT8, dims=(2,)),))
    with pytest.raises(InferenceError) as caught:
        choose_ports([port("x")], outputs, config)
    assert caught.value == InferenceError(
        ErrorCode.INVALID_ARG,
        "model 'm': unsupported OpenVINO type 'u4' for I/O 'packed', expected a datatype that the protocol has",
    )


def test_an_input_of_an_unknown_type_is_refused():
    config = ModelConfig(name="m", input=(ModelInput("other", DataType.UINT8, dims=(2,)),))
    with pytest.raises(InferenceError, match="unsupported OpenVINO type 'f8e4m3' for I/O 'x'"):
        choose_ports([port("x", type_name="f8e4m3")], [port("y")], config)


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ([port("x"), port("t", type_name="string", shape=(-1,))], {"x": [[0, 0]], "t": [b""]}),
        ([port("x"), port("s", shape=())], {"x": [[0, 0]], "s": 0}),
        # Compiled as a whole, or for other shapes than those to come.
        ([port("x", shape=(1, 2))], {}),
        ([port("x", shape=(-1, -1))], {}),
        ([port("x"), port("z", shape=None)], {}),
    ],
    ids=range(5),
)
def test_a_graph_is_run_once_if_its_batch_alone_has_any_size(ports, expected):
    found = first_batch(choose_ports(ports, [], ModelConfig(name="m")))
    assert {name: array.tolist() for name, array in found.items()} == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "Exception from src/inference/src/cpp/core.cpp:84:\nCheck 'm_weights_provider' failed at "
            "src/core/xml.cpp:887:\nEmpty weights data in bin file or bin file cannot be found!\n\n",
            "openvino error in 'm.xml': Empty weights data in bin file or bin file cannot be found!",
        ),
        (
            "Exception from src/a.cpp:1:\nFrontEnd API failed with GeneralFailure:\n"
            "While validating node 'opset1::MatMul x' with friendly_name 'x':\nfirst\nsecond\n",
            "openvino error in 'm.xml': first second",
        ),
        ("Exception from src/a.cpp:1:\n", "openvino error in 'm.xml': Exception from src/a.cpp:1:"),
        ("", "openvino error in 'm.xml': RuntimeError"),
        ("x" * 2000, f"openvino error in 'm.xml': {'x' * 1024}..."),
    ],
    ids=range(5),
)
def test_errors_are_without_places_in_openvinos_source(text, message):
    assert openvino_error(RuntimeError(text), "in 'm.xml'") == InferenceError(ErrorCode.INTERNAL, message)


def test_a_missing_package_is_an_error_that_names_the_extra():
    code = (
        "import sys; sys.modules['openvino'] = None\n"
        "from halimede.backends.openvino.runtime import runtime\n"
        "try: runtime()\n"
        "except Exception as error: print(error.code.name, error.message)"
    )
    done = run_python("-c", code)
    assert done.stdout == (
        "UNSUPPORTED openvino cannot be imported (import of openvino halted; None in sys.modules); "
        "install the extra 'openvino': pip install 'PATH[openvino]', where PATH is the source folder or the wheel of Halimede\n"
    )


def test_nothing_of_openvino_is_imported_before_a_model_needs_it():
    code = (
        "import sys; from halimede.backends.discover import find_backend; backend = find_backend('openvino'); "
        "backend.supports_gpu(); backend.default_instance_count('CPU'); "
        "sys.exit(int('openvino' in sys.modules))"
    )
    assert run_python("-c", code).returncode == 0
