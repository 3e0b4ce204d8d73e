"""What a load finds in the files of a model before its backend gets them, also by the commands that only look."""

import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from halimede.backends.api import ModelSource
from halimede.backends.discover import find_backend, installed_backend
from halimede.backends.onnxruntime import OnnxRuntimeBackend
from halimede.core.config.model_config import ModelConfig
from halimede.core.inventory import Inventory
from halimede.core.repository.layout import detect_backend
from halimede.core.types import InferenceError
from halimede.runtime.file_checks import MOST_CHECKED, check_artifact
from halimede.runtime.file_look import look_at
from halimede.runtime.prepare import LoadOptions, load_model, plan_model
from halimede.runtime.repository import ModelRepository, is_model_file
from halimede.workers.abandon import Abandon
from support.canaries import install_pickler
from support.forked import run_python
from support.model_files import SAMPLES, TORCHSCRIPT, archive, onnx_model
from support.models import add_identity, add_onnx_identity, write_config
from support.refusals import error_of

OPTIONS = LoadOptions(Inventory(()), {}, autocomplete=True)


@pytest.fixture(scope="module")
def pickler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    site = tmp_path_factory.mktemp("site")
    environment = install_pickler(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        installed_backend.cache_clear()
        yield environment
    installed_backend.cache_clear()


def refusal(directory: Path, options: LoadOptions = OPTIONS) -> str:
    """The error of a load."""
    entry = ModelRepository((directory.parent,)).find(directory.name)
    return error_of(load_model, entry, options, Abandon()).message


def put(directory: Path, filename: str, content: bytes) -> Path:
    file = directory / "1" / filename
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return directory


def test_a_file_of_another_framework_is_named_with_its_right_place(tmp_path: Path) -> None:
    assert refusal(put(tmp_path / "m", "model.onnx", archive(TORCHSCRIPT))) == (
        "model 'm': 'model.onnx' is a TorchScript archive, and the backend 'onnxruntime' loads an ONNX model, a directory "
        'with an ONNX model or a model in ONNX Runtime\'s own format: name it model.pt and set backend: "pytorch"'
    )


def test_a_file_that_is_cut_is_refused_as_incomplete(tmp_path: Path) -> None:
    assert refusal(put(tmp_path / "m", "model.onnx", onnx_model()[:-5])) == (
        "model 'm': 'model.onnx' is an ONNX model, but it lacks bytes that its fields announce: it is incomplete; copy it "
        "again"
    )


def test_pointers_of_git_lfs_and_empty_files_are_recognized(tmp_path: Path) -> None:
    assert "run 'git lfs pull'" in refusal(put(tmp_path / "pointer", "model.onnx", SAMPLES["lfs"][1]))
    assert "is an empty file" in refusal(put(tmp_path / "empty", "model.onnx", b""))


def test_each_version_is_checked(tmp_path: Path) -> None:
    add_onnx_identity(tmp_path, "m", "FP32", ["N", 2])
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "model.onnx").write_bytes(SAMPLES["html"][1])
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "onnxruntime"\nversion_policy { all {} }\n')
    assert "the download of the model failed" in refusal(tmp_path / "m")


def test_newer_operators_are_named_with_what_the_runtime_supports(tmp_path: Path) -> None:
    text = refusal(put(tmp_path / "m", "model.onnx", onnx_model(opset=99)))
    assert "opset 99 of the operators of ai.onnx" in text
    assert "export the model with a lower opset, or install a newer onnxruntime" in text
    text = refusal(put(tmp_path / "n", "model.onnx", onnx_model(ir_version=99)))
    assert "version 99 of the ONNX format" in text


@pytest.mark.parametrize("place", ["1", "."])
@pytest.mark.parametrize(
    ("backend", "hint"),
    [("identity", "; without the file the installed backend 'identity' runs the model"), ("own", "")],
)
def test_native_libraries_beside_a_model_are_refused(place: str, backend: str, hint: str, tmp_path: Path) -> None:
    add_identity(tmp_path, "m")
    (tmp_path / "m" / "1").mkdir(exist_ok=True)
    config = tmp_path / "m" / "config.pbtxt"
    config.write_text(config.read_text().replace('"identity"', f'"{backend}"'))
    library = tmp_path / "m" / place / f"libtriton_{backend}.so"
    library.write_bytes(b"\x7fELF")
    assert refusal(tmp_path / "m").startswith(
        f"backend '{backend}' is a native library ({library}), which cannot be run here{hint}; the backends that are "
    )


SERVED_ALONE = {
    "onnx": ("resnet.onnx", "onnxruntime", "model.onnx"),
    "torchscript": ("resnet.pt", "pytorch", "model.pt"),
    "torch.export": ("resnet.pt2", "pytorch", "model.pt2"),
    "plan": ("resnet.plan", "tensorrt", "model.plan"),
    "openvino": ("resnet.xml", "openvino", "model.xml"),
    "graphdef": ("frozen.pb", "tensorflow", "model.graphdef"),
    "xgboost json": ("trees.json", "fil", "xgboost.json"),
    "xgboost ubj": ("trees.ubj", "fil", "xgboost.ubj"),
    "lightgbm": ("trees.txt", "fil", "model.txt"),
    "treelite": ("trees.tl", "fil", "checkpoint.tl"),
    "pickle": ("forest.pkl", "sklearn", "model.pkl"),
    "compressed joblib": ("forest.joblib", "sklearn", "model.joblib"),
}


@pytest.mark.parametrize("kind", SERVED_ALONE)
def test_backend_of_a_single_file(kind: str, tmp_path: Path) -> None:
    filename, backend, well_known = SERVED_ALONE[kind]
    (tmp_path / filename).write_bytes(SAMPLES[kind][1])
    repository = ModelRepository((), tmp_path / filename)
    entry = repository.find(repository.scan().names[0])
    config = detect_backend(ModelConfig(), entry.name, entry.versions[1])
    assert (entry.name, config.backend, entry.versions) == (filename.partition(".")[0], backend, {1: (well_known,)})


def test_backend_of_a_saved_model_directory(tmp_path: Path) -> None:
    directory = tmp_path / "exported"
    directory.mkdir()
    (directory / "saved_model.pb").write_bytes(SAMPLES["saved_model.pb"][1])
    assert is_model_file(directory)
    assert not is_model_file(tmp_path)
    entry = ModelRepository((), directory).find("exported")
    config = detect_backend(ModelConfig(), entry.name, entry.versions[1])
    assert (config.backend, config.platform) == ("tensorflow", "tensorflow_savedmodel")


def test_a_file_that_no_backend_loads_is_refused_with_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "weights.h5").write_bytes(SAMPLES["h5"][1])
    entry = ModelRepository((), tmp_path / "weights.h5").find("weights")
    with pytest.raises(InferenceError, match=r"'weights\.h5' is an HDF5 file, such as Keras weights, which no backend"):
        plan_model(entry, OPTIONS, Abandon())


def test_other_files_are_not_looked_at(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert look_at(tmp_path / "pipe") is None
    assert look_at(tmp_path / "nothing") is None
    (tmp_path / "file").touch()
    assert look_at(tmp_path / "file" / "below") is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert look_at(tmp_path / "s") is None


def test_pickles_are_refused_where_they_are_not_allowed(tmp_path: Path, pickler: dict[str, str]) -> None:
    assert pickler
    options = replace(OPTIONS, allow_pickle=False)
    for name, content in {"m": SAMPLES["pickle"][1], "n": b"unknown", "o": SAMPLES["compressed joblib"][1]}.items():
        directory = put(tmp_path / name, "model.pkl", content)
        write_config(directory, 'backend: "pickler"')
        assert "The server runs with --allow-pickle=false" in refusal(directory, options)


def test_pickles_beside_the_model_file_are_refused_too(tmp_path: Path, pickler: dict[str, str]) -> None:
    assert pickler
    directory = put(put(tmp_path / "m", "model.json", b"{}"), "scaler.pkl", SAMPLES["pickle"][1])
    write_config(directory, 'backend: "pickler"\ndefault_model_filename: "model.json"')
    assert "'scaler.pkl' is a pickle" in refusal(directory, replace(OPTIONS, allow_pickle=False))


def test_a_version_directory_as_artifact_is_searched_for_pickles(tmp_path: Path, pickler: dict[str, str]) -> None:
    assert pickler
    options = replace(OPTIONS, allow_pickle=False)
    directory = put(tmp_path / "m", "scaler.pkl", SAMPLES["pickle"][1])
    write_config(directory, 'backend: "pickler"\ndefault_model_filename: "."')
    assert "'scaler.pkl' is a pickle" in refusal(directory, options)
    for number in range(MOST_CHECKED):
        (directory / "1" / f"{number}.pkl").write_bytes(b"")
    assert "has more than 100 files that may be pickles" in refusal(directory, options)


def test_other_runtimes_of_a_backend_may_have_other_files(tmp_path: Path) -> None:
    backend = OnnxRuntimeBackend()
    config = ModelConfig(backend="pytorch", runtime="model.py")
    for kind, is_refused in {"torch.save": False, "lfs": True, "html": True, "empty": True}.items():
        put(tmp_path / "m", "model.pt", SAMPLES[kind][1])
        where = ModelSource("m", 1, tmp_path / "m", tmp_path / "m" / "1" / "model.pt")
        if is_refused:
            with pytest.raises(InferenceError):
                check_artifact(backend, config, where, allow_pickle=True)
        else:
            check_artifact(backend, config, where, allow_pickle=True)


def test_well_known_files_of_a_version_directory_are_looked_at(tmp_path: Path) -> None:
    put(tmp_path / "m", "xgboost.json", SAMPLES["html"][1])
    where = ModelSource("m", 1, tmp_path / "m", tmp_path / "m" / "1")
    with pytest.raises(InferenceError, match=r"'xgboost\.json' is an HTML page"):
        check_artifact(OnnxRuntimeBackend(), ModelConfig(backend="fil"), where, allow_pickle=True)


def test_a_recognized_pickle_is_refused_for_backends_that_declare_nothing(tmp_path: Path) -> None:
    directory = put(tmp_path / "m", "model.bin", SAMPLES["pickle"][1])
    write_config(directory, 'backend: "identity"\ndefault_model_filename: "model.bin"')
    assert "'model.bin' is a pickle" in refusal(directory, replace(OPTIONS, allow_pickle=False))


@pytest.mark.parametrize("kind", SERVED_ALONE)
def test_only_files_with_pickles_need_them_to_be_allowed(kind: str, tmp_path: Path) -> None:
    _, name, filename = SERVED_ALONE[kind]
    backend = find_backend(name)
    put(tmp_path / "m", filename, SAMPLES[kind][1])
    where = ModelSource("m", 1, tmp_path / "m", tmp_path / "m" / "1" / filename)
    check_artifact(backend, ModelConfig(backend=name), where, allow_pickle=True)
    has_pickle = kind in ("torch.export", "pickle", "compressed joblib")
    with pytest.raises(InferenceError, match="allow-pickle=false") if has_pickle else nullcontext():
        check_artifact(backend, ModelConfig(backend=name), where, allow_pickle=False)


def test_models_without_pickles_load_where_none_are_allowed(tmp_path: Path) -> None:
    add_onnx_identity(tmp_path, "m", "FP32", ["N", 2])
    entry = ModelRepository((tmp_path,)).find("m")
    prepared = load_model(entry, replace(OPTIONS, allow_pickle=False), Abandon())
    for version in prepared.versions:
        version.close()


def test_commands_take_the_flag(tmp_path: Path, pickler: dict[str, str]) -> None:
    write_config(put(tmp_path / "models" / "m", "model.pkl", SAMPLES["pickle"][1]), 'backend: "pickler"')
    allowed = run_python("-m", "halimede", "explain-config", tmp_path / "models" / "m", environment=pickler)
    assert allowed.returncode == 0
    # A backend that runs in processes: its values come from the file as well, and from a worker process.
    assert [line.partition("#")[2].strip() for line in allowed.stdout.splitlines() if "TYPE_FP32" in line] == [
        *("model file", "model file")
    ]
    refused = run_python(
        "-m", "halimede", "explain-config", tmp_path / "models" / "m", "--allow-pickle=false", environment=pickler
    )
    assert (refused.returncode, "--allow-pickle=false" in refused.stderr) == (1, True)
    checked = run_python("-m", "halimede", "check", tmp_path / "models", "--allow-pickle=false", environment=pickler)
    assert (checked.returncode, "'model.pkl' is a pickle" in checked.stdout) == (1, True)
