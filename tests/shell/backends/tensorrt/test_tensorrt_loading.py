"""Loads, errors at load and completion of TensorRT models, on a played TensorRT and CUDA."""

from dataclasses import replace
from pathlib import Path

import pytest

from halimede.backends.tensorrt import TensorRtBackend
from halimede.backends.tensorrt.libraries import OLDEST_CUDA, check_version, join
from halimede.core.config.model_config import (
    InstanceKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)
from halimede.core.types import DataType, ErrorCode, InferenceError, Placement
from support.plans import (
    BACKEND,
    DOUBLE,
    DOUBLES,
    FP32,
    INT32,
    ON_GPU,
    compute,
    computed,
    config,
    floats,
    given,
    libraries,
    plan,
    refused,
    source,
)
from support.played_gpu import cudart, trt


@pytest.mark.parametrize("kind", [InstanceKind.KIND_CPU, InstanceKind.KIND_MODEL])
def test_only_gpus_are_supported(tmp_path, kind):
    settings = replace(DOUBLES, instance_group=(ModelInstanceGroup("m_0", kind, 1),))
    expected = InferenceError(
        ErrorCode.INVALID_ARG,
        "model 'm': TensorRT backend supports only GPU device, and 'm_0' is not on one: use instance_group { kind: "
        "KIND_GPU } on a server that has a GPU",
    )
    assert refused(lambda: BACKEND.load(settings, source(tmp_path, plan(*DOUBLE)))) == expected
    model = BACKEND.load(DOUBLES, source(tmp_path, plan(*DOUBLE)))
    assert refused(lambda: model.create_instance(Placement("m_0", 0, "CPU"))) == expected


def test_a_server_without_a_device_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PLAYED_GPUS", "0")
    error = refused(lambda: BACKEND.autocomplete(ModelConfig(), source(tmp_path, plan(*DOUBLE))))
    assert (error.code, error.message) == (
        ErrorCode.UNSUPPORTED,
        "TensorRT backend supports only GPU device; CUDA: device 0 cannot be opened: played cudaErrorNoDevice "
        "(cudaErrorNoDevice)",
    )


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "unable to find '{path}' for model 'm'"),
        (b"", "'{path}' is not a TensorRT plan: it is empty"),
        (b"\x08\x08" + bytes(60), "it is an ONNX file or another protobuf message"),
        (plan(*DOUBLE)[:-9], "TensorRT cannot load '{path}': Serialization assertion failed: the plan is damaged; the "
                             "file was made by TensorRT 11.4.0.106, which is installed, so it may be damaged or built "
                             "for another GPU"),
        (plan(*DOUBLE, version=(10, 3, 0, 26)), "expecting 11.4.0.106, got 10.3.0.26; TensorRT 10.3.0.26 made the file, "
                                                "and 11.4.0.106 is installed: build the engine with the installed"),
        (plan(*DOUBLE, device=1), "The engine was built for device 1; the file was made by TensorRT 11.4.0.106"),
        (plan(*DOUBLE, plugin="Own"), "Cannot find plugin: Own"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, content, part):
    where = source(tmp_path, content)

    def load() -> None:
        BACKEND.load(DOUBLES, where).create_instance(ON_GPU)

    for call in (load, lambda: BACKEND.autocomplete(ModelConfig(), where), lambda: BACKEND.check(DOUBLES, where)):
        assert part.replace("{path}", str(where.artifact)) in refused(call).message


def test_a_plan_of_another_name_is_pointed_at(tmp_path):
    where = source(tmp_path, None)
    (tmp_path / "1" / "net.engine").touch()
    model = BACKEND.load(DOUBLES, where)
    assert refused(lambda: model.create_instance(ON_GPU)).message.endswith(
        ": there is 'net.engine'; rename it to 'model.plan', or name it as default_model_filename in config.pbtxt"
    )


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        (given("x", [4], dtype="FP8"), "input 'x' of the engine has datatype FP8, expected one of FLOAT, HALF, BF16"),
        (given("x", [4], dtype="INT4"), "input 'x' of the engine has datatype INT4"),
        (given("x", [4], format="CHW4"), "input 'x' of the engine has the layout 'Layout CHW4', expected a linear one"),
        (computed("y", [4], "x", format="CHW32"), "output 'y' of the engine has the layout 'Layout CHW32'"),
        (computed("y", [4], "x", aliases="x"), "output 'y' of the engine shares the memory of input 'x'"),
    ],
)
def test_tensors_that_requests_cannot_have_are_refused_by_name(tmp_path, tensor, part):
    tensors = {"x": given("x", [4]), "y": computed("y", [4], "x")} | {tensor["name"]: tensor}
    error = refused(lambda: BACKEND.autocomplete(ModelConfig(), source(tmp_path, plan(*tensors.values()))))
    assert error.code is ErrorCode.UNSUPPORTED
    assert part in error.message


def test_all_disagreements_with_the_engine_are_reported(tmp_path):
    wrong = config({"x": (INT32, 5)}, {"z": (FP32, 4)})
    for call in (
        lambda: BACKEND.load(wrong, source(tmp_path, plan(*DOUBLE))).create_instance(ON_GPU),
        lambda: BACKEND.check(wrong, source(tmp_path, plan(*DOUBLE))),
    ):
        error = refused(call)
        assert error.code is ErrorCode.INVALID_ARG
        found = [part in error.message for part in ("TYPE_INT32 for input 'x'", "tensor 'x'", "'z'")]
        assert found == [True, True, True]


def test_autocomplete_takes_tensors_and_the_largest_batch_from_the_engine(tmp_path):
    content = plan(
        given("x", [-1, -1, 3], ([1, 1, 3], [4, 8, 3], [32, 16, 3]), ([1, 1, 3], [4, 8, 3], [6, 64, 3])),
        computed("y", [-1, 2], "x[:, 0, :2]", dtype="HALF"),
    )
    completed = BACKEND.autocomplete(ModelConfig(), source(tmp_path, content))
    assert completed == ModelConfig(
        name="m",
        max_batch_size=6,
        input=(ModelInput("x", FP32, dims=(-1, 3)),),
        output=(ModelOutput("y", DataType.FP16, dims=(2,)),),
        dynamic_batching=ModelDynamicBatching(),
    )
    for limit, expected in (("4", 4), ("0", 0), ("100", 6)):
        limited = BACKEND.autocomplete(ModelConfig(), source(tmp_path, None, default_max_batch_size=limit))
        assert limited.max_batch_size == expected
    assert BACKEND.autocomplete(ModelConfig(max_batch_size=2), source(tmp_path, None)).max_batch_size == 2
    error = refused(lambda: BACKEND.autocomplete(ModelConfig(name="m", max_batch_size=7), source(tmp_path, None)))
    assert error == InferenceError(
        ErrorCode.INVALID_ARG,
        "autofill failed for model 'm': configuration specified max-batch 7 but TensorRT engine only supports "
        "max-batch 6",
    )


def test_an_engine_of_fixed_shapes_does_not_batch(tmp_path):
    where = source(tmp_path, plan(given("x", [2, 4]), computed("y", [], "x.sum()")))
    completed = BACKEND.autocomplete(ModelConfig(), where)
    assert (completed.max_batch_size, completed.input, completed.output) == (
        0,
        (ModelInput("x", FP32, dims=(2, 4)),),
        (ModelOutput("y", FP32, dims=(1,)),),
    )


def test_autocomplete_does_not_open_a_fully_configured_model(tmp_path):
    assert BACKEND.autocomplete(DOUBLES, source(tmp_path, None)) is DOUBLES


def test_plugins_are_opened_once_and_host_code_only_with_permission(tmp_path):
    library = tmp_path / "own.so"
    content = plan(*DOUBLE, plugin="OwnLayer")
    error = refused(lambda: compute(tmp_path, content, DOUBLES, {}, plugins=str(library)))
    assert error.message == (
        f"--backend-config tensorrt,plugins: '{library}' cannot be opened: Unable to load library: {library}"
    )
    library.write_text("OwnLayer")
    for _ in range(2):
        compute(tmp_path, content, DOUBLES, {"x": floats([1, 2, 3, 4])}, plugins=f"{library};")
        library.unlink(missing_ok=True)

    compatible = plan(*DOUBLE, version=(10, 3, 0, 26), version_compatible=True)
    assert "host code" in refused(lambda: compute(tmp_path, compatible, DOUBLES, {})).message
    compute(tmp_path, compatible, DOUBLES, {"x": floats([1, 2, 3, 4])}, version_compatible="true")


def test_native_code_is_opened_in_processes_only(tmp_path):
    settings = ({}, {"plugins": "/a.so"}, {"version-compatible": "true"})
    assert [BACKEND.isolation_for(each) for each in settings] == ["thread", "process", "process"]
    # `check` runs in the process of a command: it looks at the file's header alone.
    BACKEND.check(DOUBLES, source(tmp_path, plan(*DOUBLE, plugin="Unknown"), plugins="/nowhere.so"))


def test_settings_without_effect_are_noted_once(tmp_path, caplog):
    options = {"coalesce_request_input": "true", "execution_policy": "DEVICE_BLOCKING"}
    compute(tmp_path, plan(*DOUBLE), DOUBLES, {"x": floats([1, 2, 3, 4])}, **options)
    assert [record.message.split(" has")[0] for record in caplog.records] == [
        "model 'm': --backend-config tensorrt,coalesce-request-input",
        "model 'm': --backend-config tensorrt,execution-policy=DEVICE_BLOCKING",
    ]


def test_an_engine_that_refuses_zeros_is_loaded_with_a_warning(tmp_path, caplog):
    content = plan(*DOUBLE, fault="refuse", fault_size=16)
    compute(tmp_path, content, DOUBLES, {"x": floats([1, 2, 3, 4])})
    assert "instance 'm_0': its first run, with zeros, failed: TensorRT: the execution failed" in caplog.text


def test_a_missing_or_old_tensorrt_names_the_extra(tmp_path):
    error = refused(lambda: TensorRtBackend().load(DOUBLES, source(tmp_path, plan(*DOUBLE))))
    assert error.code is ErrorCode.UNSUPPORTED
    assert "pip install 'PATH[tensorrt]'" in error.message

    class Old:
        __version__ = "8.6.1"

    assert refused(lambda: join(Old, cudart)) == InferenceError(
        ErrorCode.UNSUPPORTED, "TensorRT 8.6.1 is installed; 10.0 or newer is needed"
    )


@pytest.mark.parametrize(
    ("version", "is_old"), [("12.9.0", True), ("12.8.0", True), ("12.9.1", False), ("13.0.0", False), ("13.1", False)]
)
def test_a_cuda_package_that_holds_the_interpreters_lock_is_refused(version, is_old):
    if is_old:
        error = refused(lambda: check_version("cuda-bindings", version, OLDEST_CUDA))
        assert error.message == f"cuda-bindings {version} is installed; 12.9.1 or newer is needed"
    else:
        check_version("cuda-bindings", version, OLDEST_CUDA)


def test_the_log_of_tensorrt_becomes_the_servers(caplog):
    levels = trt.ILogger.Severity
    logger = libraries().logger
    with caplog.at_level("DEBUG"):
        for severity in levels:
            logger.log(severity, severity.name)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("ERROR", "TensorRT: INTERNAL_ERROR"),
        ("ERROR", "TensorRT: ERROR"),
        ("WARNING", "TensorRT: WARNING"),
        ("DEBUG", "TensorRT: INFO"),
    ]
    assert libraries().errors.text() == "INTERNAL_ERROR; ERROR"
    for _ in range(100):
        logger.log(levels.ERROR, "x" * 10_000)
    assert len(libraries().errors.text()) == 1024 + 3
    assert libraries().errors.text() == "TensorRT gives no reason"


def test_defaults():
    assert BACKEND.default_model_filename == "model.plan"
    assert [BACKEND.default_instance_count(kind) for kind in ("CPU", "GPU", "MODEL")] == [1, 1, 1]
    assert BACKEND.supports_gpu() is True
