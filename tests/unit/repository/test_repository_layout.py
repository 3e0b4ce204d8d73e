from pathlib import PurePath

import pytest

from halimede.core.config.model_config import ModelConfig, ModelEnsembling
from halimede.core.repository.layout import (
    detect_backend,
    duplicate_problem,
    is_model_directory,
    load_name_problem,
    model_filename,
    no_model_warnings,
    no_name_problem,
    version_directories,
)
from halimede.core.types import Device, DeviceKind, ErrorCode, InferenceError
from support.refusals import error_of


def test_versions_are_the_directories_with_plain_positive_numbers():
    assert version_directories(["10", "9", "1", "9223372036854775807"]) == ((1, 9, 10, 9223372036854775807), ())


def test_other_directories_of_the_layout_give_no_warning():
    assert version_directories(["configs", "warmup", "initial_state", "__pycache__", ".git", "..data", "1"]) == (
        (1,),
        (),
    )


def test_everything_else_is_ignored_with_one_warning_each():
    names = ["02", "-1", "99999999999999999999", "x", "0", "00", "1.5", "٣", "1 ", "9223372036854775808", "9" * 10_000]

    versions, warnings = version_directories(names)

    assert versions == ()
    assert sorted(warnings) == sorted(
        [
            "ignoring version directory '02': a version has no leading zeros",
            "ignoring version directory '-1': a version is a decimal number, at least 1",
            "ignoring version directory '99999999999999999999': a version is at most 9223372036854775807",
            "ignoring version directory 'x': a version is a decimal number, at least 1",
            "ignoring version directory '0': a version is at least 1",
            "ignoring version directory '00': a version is at least 1",
            "ignoring version directory '1.5': a version is a decimal number, at least 1",
            "ignoring version directory '\\u0663': a version is a decimal number, at least 1",
            "ignoring version directory '1 ': a version is a decimal number, at least 1",
            "ignoring version directory '9223372036854775808': a version is at most 9223372036854775807",
            f"ignoring version directory '{'9' * 256}...': a version is at most 9223372036854775807",
        ]
    )


def found(config: ModelConfig, name: str = "m", files: tuple[str, ...] = ()) -> tuple[str, str]:
    detected = detect_backend(config, name, files)
    return detected.backend, detected.platform


@pytest.mark.parametrize(
    ("files", "backend", "platform"),
    [
        (("model.onnx",), "onnxruntime", "onnxruntime_onnx"),
        (("model.plan",), "tensorrt", "tensorrt_plan"),
        (("model.pt",), "pytorch", "pytorch_libtorch"),
        (("model.pt2",), "pytorch", "torch_aoti"),
        (("model.savedmodel",), "tensorflow", "tensorflow_savedmodel"),
        (("model.graphdef",), "tensorflow", "tensorflow_graphdef"),
        (("model.bin", "model.xml"), "openvino", ""),
        (("helpers.py", "model.py"), "python", ""),
        (("model.dali",), "dali", ""),
        (("dali.py",), "dali", ""),
        (("xgboost.json",), "fil", ""),
        (("labels.txt", "xgboost.ubj"), "fil", ""),
        (("xgboost.model",), "fil", ""),
        (("checkpoint.tl",), "fil", ""),
        (("model.txt",), "fil", ""),
        (("model.joblib",), "sklearn", ""),
        (("model.pkl",), "sklearn", ""),
        (("xgboost.ubj",), "fil", ""),
        (("model.py", "model.pkl"), "python", ""),
        (("model.py", "model.onnx"), "onnxruntime", "onnxruntime_onnx"),
    ],
)
def test_well_known_file_determines_the_backend(files: tuple[str, ...], backend: str, platform: str):
    assert found(ModelConfig(), "m.identity", files) == (backend, platform)


@pytest.mark.parametrize(
    ("config", "files", "filename"),
    [
        # The backend's first well-known name is its own default.
        (ModelConfig(), ("model.pt",), ""),
        (ModelConfig(), ("model.pt2",), "model.pt2"),
        (ModelConfig(backend="pytorch"), ("model.pt2",), "model.pt2"),
        (ModelConfig(backend="pytorch"), ("model.pt", "model.pt2"), ""),
        (ModelConfig(platform="torch_aoti"), ("model.pt", "model.pt2"), "model.pt2"),
        (ModelConfig(platform="tensorflow_graphdef"), ("model.graphdef",), "model.graphdef"),
        (ModelConfig(platform="tensorflow_graphdef"), ("model.savedmodel",), ""),
        (ModelConfig(backend="fil"), ("model.txt",), "model.txt"),
        (ModelConfig(backend="fil", default_model_filename="mine"), ("model.txt",), "mine"),
        (ModelConfig(backend="pytorch", runtime="model.py"), ("model.pt2",), ""),
        (ModelConfig(backend="mine"), ("model.pt2",), ""),
    ],
)
def test_file_name_follows_from_the_files_unless_it_is_the_default(
    config: ModelConfig, files: tuple[str, ...], filename: str
) -> None:
    assert detect_backend(config, "m", files).default_model_filename == filename


def test_directory_suffix_determines_the_backend_without_a_known_file():
    assert found(ModelConfig(), "my.model.identity") == ("identity", "")
    assert found(ModelConfig(), "resnet.onnxruntime", ("weights.bin",)) == ("onnxruntime", "onnxruntime_onnx")


@pytest.mark.parametrize("name", ["resnet", "resnet.", ".onnxruntime"])
def test_undetermined_backend_is_an_error(name: str):
    assert error_of(detect_backend, ModelConfig(), name, ("weights.bin",)) == InferenceError(
        ErrorCode.INVALID_ARG,
        f"Invalid model name: Could not determine backend for model '{name}' with no backend in model configuration. "
        "Expected model name of the form 'model.<backend_name>'.",
    )


def test_error_names_a_model_file_under_another_name_and_the_expected_name():
    assert error_of(detect_backend, ModelConfig(), "resnet", ("notes.txt", "resnet50.onnx")).message.endswith(
        "'model.<backend_name>'. The first version has 'resnet50.onnx' instead of 'model.onnx': rename it, or "
        'write backend: "onnxruntime" and default_model_filename: "resnet50.onnx" in config.pbtxt.'
    )
    assert found(ModelConfig(), "resnet.identity", ("resnet50.onnx",)) == ("identity", "")


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (
            ("saved_model.pb", "variables"),
            "The first version itself is a SavedModel: move its files into 'model.savedmodel' in it.",
        ),
        (
            ("resnet.keras",),
            "The first version has the Keras model 'resnet.keras', which is not served: export a SavedModel.",
        ),
        (("a.h5",), "The first version has the Keras model 'a.h5', which is not served: export a SavedModel."),
    ],
)
def test_error_says_what_to_do_with_other_files_of_tensorflow(files: tuple[str, ...], hint: str):
    assert error_of(detect_backend, ModelConfig(), "resnet", files).message.endswith(f"'model.<backend_name>'. {hint}")


def test_file_is_the_configured_one_or_that_of_the_platform():
    assert model_filename(ModelConfig(platform="tensorflow_graphdef"), "model.savedmodel") == "model.graphdef"
    assert model_filename(ModelConfig(platform="torch_aoti"), "model.pt") == "model.pt2"
    assert model_filename(ModelConfig(platform="torch_aoti", default_model_filename="m"), "model.pt") == "m"
    assert model_filename(ModelConfig(backend="mine"), "model.mine") == "model.mine"


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        (ModelConfig(backend="onnxruntime"), (), ("onnxruntime", "onnxruntime_onnx")),
        (ModelConfig(platform="onnxruntime_onnx"), (), ("onnxruntime", "onnxruntime_onnx")),
        (ModelConfig(platform="torch_aoti", backend="pytorch"), (), ("pytorch", "torch_aoti")),
        (ModelConfig(backend="pytorch"), (), ("pytorch", "pytorch_libtorch")),
        (ModelConfig(backend="pytorch"), ("model.pt2",), ("pytorch", "torch_aoti")),
        (ModelConfig(backend="pytorch", default_model_filename="net.pt2"), (), ("pytorch", "torch_aoti")),
        (ModelConfig(backend="pytorch", runtime="model.py"), ("model.pt",), ("pytorch", "")),
        (ModelConfig(backend="tensorflow"), ("model.graphdef",), ("tensorflow", "tensorflow_graphdef")),
        (ModelConfig(backend="openvino"), ("model.onnx",), ("openvino", "")),
        (ModelConfig(backend="python"), ("model.onnx", "model.py"), ("python", "")),
        (ModelConfig(backend="mine", platform="anything"), (), ("mine", "anything")),
        (ModelConfig(platform="ensemble"), (), ("", "ensemble")),
        (ModelConfig(ensemble_scheduling=ModelEnsembling(), backend="ensemble"), (), ("", "ensemble")),
    ],
)
def test_configuration_takes_precedence_over_files_and_suffix(
    config: ModelConfig, files: tuple[str, ...], expected: tuple[str, str]
):
    assert found(config, "m.identity", files) == expected


@pytest.mark.parametrize(
    ("platform", "backend"),
    [
        ("onnxruntime_onnx", "tensorrt"),
        ("tensorrt_plan", "onnxruntime"),
        ("nonsense", "pytorch"),
    ],
)
def test_platform_and_backend_may_not_contradict_each_other(platform: str, backend: str):
    assert error_of(detect_backend, ModelConfig(platform=platform, backend=backend), "m", ()) == InferenceError(
        ErrorCode.INVALID_ARG, f"unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            ModelConfig(platform="ensemble", backend="python"),
            "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
        ),
        (
            ModelConfig("e", platform="ensemble", backend="ensemble", ensemble_scheduling=ModelEnsembling()),
            "Ensemble model 'e' must have platform type 'ensemble' and empty backend type",
        ),
        (
            ModelConfig(backend="python", ensemble_scheduling=ModelEnsembling()),
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
        (
            ModelConfig(platform="onnxruntime_onnx", ensemble_scheduling=ModelEnsembling()),
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
    ],
)
def test_an_ensemble_has_no_backend_and_no_other_platform(config: ModelConfig, text: str):
    assert error_of(detect_backend, config, "m", ()) == InferenceError(ErrorCode.INVALID_ARG, text)


def test_an_unknown_platform_alone_is_an_error():
    assert error_of(detect_backend, ModelConfig(platform="caffe2_netdef"), "m", ("model.onnx",)) == InferenceError(
        ErrorCode.INVALID_ARG,
        "unexpected platform type 'caffe2_netdef' for m; expected one of tensorflow_savedmodel, "
        "tensorflow_graphdef, tensorrt_plan, onnxruntime_onnx, pytorch_libtorch, torch_aoti, ensemble, or a 'backend'",
    )


def test_detecting_twice_changes_nothing():
    once = detect_backend(ModelConfig(), "m", ("model.onnx",))

    assert detect_backend(once, "m", ("model.onnx",)) == once


def test_duplicate_model_names_its_repositories() -> None:
    assert duplicate_problem(["/a/x", "/b/x"]) == "model appears in two or more repositories: /a/x, /b/x"


def test_names_in_load_and_unload_calls():
    empty = "Model name cannot be empty. Please enter a valid name to deploy."
    for problem in (load_name_problem, no_name_problem):
        assert {name: problem(name) for name in ("m", "a..1", "..data", "", " \t")} == {
            **dict.fromkeys(("m", "a..1", "..data")),
            **dict.fromkeys(("", " \t"), empty),
        }
    for name in ("a/b", "/", "..", " ..\t"):
        text = f"invalid model name '{name}', model name must not contain path traversal characters"
        assert (load_name_problem(name), no_name_problem(name)) == (text, None)
    assert load_name_problem("a\0b") == "model name 'a\\x00b' must be valid UTF-8 without control characters"


def test_warnings_of_a_repository_without_a_model():
    assert no_model_warnings(PurePath("/models"), [], ()) == [
        "there is no model in repository '/models': a model is a folder with a version in it, such as "
        "'/models/MODEL/1/model.onnx'"
    ]
    assert len(no_model_warnings(PurePath("/models"), ["x", "config.json"], ["ignoring 'x'"])) == 2
    assert no_model_warnings(PurePath("/models/resnet"), ["1", "config.pbtxt", "x"], ["ignoring '1'"]) == [
        "there is no model in repository '/models/resnet': it contains '1', 'config.pbtxt' and looks like a model "
        "itself; give the folder above as the repository: '/models'"
    ]
    assert no_model_warnings(PurePath("/models/resnet/1"), ["model.py"], ["ignoring 'model.py'"]) == [
        "there is no model in repository '/models/resnet/1': it contains 'model.py' and looks like a version of a "
        "model; give the folder of all models as the repository: '/models'"
    ]
    assert no_model_warnings(PurePath("/resnet"), ["model.py"], ["ignoring 'model.py'"])[-1].endswith(
        "such as '/resnet/MODEL/1/model.py'"
    )


def test_a_model_directory_has_a_configuration_or_a_version() -> None:
    assert all(
        is_model_directory([name, "notes.txt"]) for name in ("config.pbtxt", "config.yaml", "configs", "1", "12")
    )
    assert not is_model_directory(["model.onnx", "02", "x", "config", "config.json", "warmup", ".git"])
    assert not is_model_directory([])


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ModelConfig(backend="pytorch", platform="torch_aoti"), "model.pt2"),
        (ModelConfig(backend="pytorch", platform="pytorch_libtorch"), "model.pt"),
        (ModelConfig(backend="pytorch"), "model.pt"),
        (ModelConfig(backend="other", platform="torch_aoti"), "model.pt"),
        (ModelConfig(backend="pytorch", platform="torch_aoti", default_model_filename="net.pt2"), "net.pt2"),
    ],
)
def test_the_model_file_is_named_by_the_configuration_or_the_platform(config, name):
    assert model_filename(config, "model.pt") == name


@pytest.mark.parametrize(
    ("named", "capability", "expected"),
    [
        ("", (8, 9), "ada.plan"),
        ("own.plan", (8, 9), "ada.plan"),
        ("", (9, 0), "model.plan"),
        ("own.plan", (9, 0), "own.plan"),
        ("", (0, 0), "model.plan"),
        ("", None, "model.plan"),
        ("own.plan", None, "own.plan"),
    ],
)
def test_the_model_file_is_that_of_the_devices_compute_capability(named, capability, expected):
    config = ModelConfig(default_model_filename=named, cc_model_filenames={"8.9": "ada.plan", "8.90": "no.plan"})
    device = None if capability is None else Device(DeviceKind.MIG, 0, "MIG-0", compute_capability=capability)
    assert model_filename(config, "model.plan", device) == expected
