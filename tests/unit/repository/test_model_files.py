import pickle

import pytest

from halimede.core.repository.file_kinds import FileKind, Look, look_at_file
from halimede.core.repository.model_files import (
    TAKES,
    file_problem,
    no_backend_problem,
    pickle_problem,
    well_known_name,
)
from support.model_files import SAMPLES, Bytes


@pytest.mark.parametrize("backend", TAKES)
def test_a_backend_takes_its_own_kinds_and_unknown_ones(backend: str) -> None:
    for kind in (*TAKES[backend], FileKind.UNKNOWN):
        assert file_problem(backend, "m", Look(kind)) is None


@pytest.mark.parametrize("backend", TAKES)
@pytest.mark.parametrize("kind", FileKind)
def test_each_other_kind_is_a_problem_with_advice(backend: str, kind: FileKind) -> None:
    problem = file_problem(backend, "m.bin", Look(kind))
    if kind in (*TAKES[backend], FileKind.UNKNOWN):
        assert problem is None
    elif (backend, kind) == ("pytorch", FileKind.TORCH_SAVE):
        assert problem is None, "the backend says whether it has weights or a whole module"
    else:
        assert problem is not None
        assert problem.startswith(f"'m.bin' is {kind.value}, and the backend '{backend}' loads ")


def test_backends_of_others_load_what_they_like() -> None:
    assert [file_problem("affine", "m", Look(kind, "cut")) for kind in FileKind] == [None] * len(FileKind)


@pytest.mark.parametrize(
    ("backend", "filename", "look", "expected"),
    [
        (
            *("onnxruntime", "model.onnx", Look(FileKind.TORCHSCRIPT)),
            "'model.onnx' is a TorchScript archive, and the backend 'onnxruntime' loads an ONNX model, a directory with "
            'an ONNX model or a model in ONNX Runtime\'s own format: name it model.pt and set backend: "pytorch"',
        ),
        (
            *("onnxruntime", "model.onnx", Look(FileKind.ONNX, "it lacks bytes")),
            "'model.onnx' is an ONNX model, but it lacks bytes; copy it again",
        ),
        (
            *("tensorrt", "model.plan", Look(FileKind.LFS_POINTER)),
            "'model.plan' is a pointer of Git LFS, and the backend 'tensorrt' loads a TensorRT engine: run 'git lfs "
            "pull' where it was cloned, and copy the file again",
        ),
        (
            *("onnxruntime", "model.onnx", Look(FileKind.TORCH_SAVE)),
            "'model.onnx' is a checkpoint of torch.save, which is a pickle, and the backend 'onnxruntime' loads an ONNX "
            "model, a directory with an ONNX model or a model in ONNX Runtime's own format: save the model with "
            "torch.jit.save or torch.export.save",
        ),
        (
            *("pytorch", "model.pt", Look(FileKind.ZIP, "it lacks its directory")),
            "'model.pt' is a zip archive, but it lacks its directory; copy it again (the backend 'pytorch' loads a "
            "TorchScript archive, an archive of torch.export or a package of AOTInductor)",
        ),
        (
            *("tensorflow", "model.savedmodel", Look(FileKind.SAVED_MODEL_FILE)),
            "'model.savedmodel' is the saved_model.pb of a SavedModel directory, and the backend 'tensorflow' loads a "
            "SavedModel directory or a TensorFlow graph: give the whole directory, as model.savedmodel",
        ),
    ],
)
def test_the_text_says_what_the_file_is_and_what_would_be_right(
    backend: str, filename: str, look: Look, expected: str
) -> None:
    assert file_problem(backend, filename, look) == expected


def test_pickles_are_wanted_where_the_backend_unpickles_them() -> None:
    for kind in (FileKind.PICKLE, FileKind.TORCH_SAVE, FileKind.COMPRESSED):
        assert file_problem("openvino", "model.pth", Look(kind), ("*.pth",)) is None
        assert file_problem("openvino", "model.pth", Look(kind), ("*.pkl",)) is not None
    assert file_problem("pytorch", "model.pth", Look(FileKind.HTML), ("*.pth",)) is not None


@pytest.mark.parametrize("kind", FileKind)
def test_which_files_are_refused_without_pickles(kind: FileKind) -> None:
    declared = pickle_problem("b", "m.pt", Look(kind), ("*.pt",)) is not None
    undeclared = pickle_problem("b", "m.pt", Look(kind), ("*.pkl",)) is not None
    executable = {FileKind.PICKLE, FileKind.TORCH_SAVE, FileKind.TORCH_EXPORT}
    assert undeclared == (kind in executable)
    sure = {FileKind.EMPTY, FileKind.HTML, FileKind.TENSORRT, FileKind.LIGHTGBM, FileKind.TORCHSCRIPT, FileKind.KERAS}
    assert declared or kind not in {*executable, FileKind.COMPRESSED, FileKind.ZIP, FileKind.UNKNOWN, FileKind.GGUF}
    assert not declared or kind not in sure


@pytest.mark.parametrize("kind", FileKind)
def test_only_what_is_surely_no_pickle_is_loaded_by_pytorch(kind: FileKind) -> None:
    allowed = {FileKind.EMPTY, FileKind.EMPTY_DIRECTORY, FileKind.TORCHSCRIPT, FileKind.AOTI, FileKind.PYTHON}
    assert (pickle_problem("pytorch", "m.pt", Look(kind), ()) is None) == (kind in allowed)


class Code:
    """Calls a function when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return call, (1,)


called: list[int] = []


def call(number: int) -> None:
    called.append(number)


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        (b"GGUF" + bytes(5), FileKind.GGUF),
        (b"MZ\x90", FileKind.SHARED_LIBRARY),
        (b"C\x06\0\0ORTM", FileKind.ORT),
        (b"C\x06\0\0TFL3", FileKind.TFLITE),
        (b"C\x07" + bytes(6) + b"{", FileKind.SAFETENSORS),
    ],
)
def test_a_pickle_that_begins_as_another_file_is_refused(before: bytes, kind: FileKind) -> None:
    content = before + pickle.dumps(Code(), 2)[2:]
    called.clear()
    pickle.loads(content)
    assert called == [1]
    look = look_at_file("model.pkl", Bytes(content))
    assert look.kind is kind
    problem = pickle_problem("other", "model.pkl", look, ("*.pkl",))
    assert problem is not None
    assert problem.startswith(f"'model.pkl' may be a pickle, though it begins as {kind.value}, and a pickle can")


@pytest.mark.parametrize("name", SAMPLES)
def test_an_unpickler_fails_at_the_first_bytes_of_what_is_allowed(name: str) -> None:
    kind, content = SAMPLES[name]
    if pickle_problem("other", "model.pkl", Look(kind), ("*.pkl",)) is None and content:
        with pytest.raises((pickle.UnpicklingError, IndexError, EOFError)):
            pickle.loads(content[:2] + pickle.dumps(Code(), 2)[2:])


def test_an_archive_in_doubt_is_refused_with_the_reason() -> None:
    look = Look(FileKind.AOTI, doubt="it is an archive of torch.export, too")
    problem = pickle_problem("pytorch", "m.pt2", look, ())
    assert problem is not None
    assert problem.startswith(
        "'m.pt2' may contain a pickle: it is a package of AOTInductor, but it is an archive of torch.export, too, and a "
    )
    assert pickle_problem("onnxruntime", "m.pt2", look, ()) is None
    assert file_problem("pytorch", "m.pt2", look) is None


def test_the_refusal_of_a_pickle_names_the_flag_and_the_ways_out() -> None:
    assert pickle_problem("sklearn", "model.joblib", Look(FileKind.PICKLE), ()) == (
        "'model.joblib' is a pickle, and a pickle can execute any code while the backend 'sklearn' loads it. The server "
        "runs with --allow-pickle=false. Convert the model to a format without pickles, such as ONNX or TorchScript, or "
        "set --allow-pickle=true if you trust the author of the file"
    )


@pytest.mark.parametrize(
    ("filename", "kind", "expected"),
    [
        ("resnet.onnx", FileKind.ONNX, "model.onnx"),
        # The suffix of one backend decides, so that a file of another kind under it is an error.
        ("resnet.onnx", FileKind.TORCHSCRIPT, "model.onnx"),
        ("resnet.pt", FileKind.TORCHSCRIPT, "model.pt"),
        ("resnet.pth", FileKind.TORCHSCRIPT, "model.pt"),
        ("resnet.PT2", FileKind.TORCH_EXPORT, "model.pt2"),
        ("resnet.engine", FileKind.TENSORRT, "model.plan"),
        ("frozen.pb", FileKind.GRAPHDEF, "model.graphdef"),
        ("exported", FileKind.SAVED_MODEL, "model.savedmodel"),
        ("trees.json", FileKind.XGBOOST_JSON, "xgboost.json"),
        ("trees.model", FileKind.XGBOOST_UBJ, "xgboost.ubj"),
        ("trees.txt", FileKind.LIGHTGBM, "model.txt"),
        ("forest.joblib", FileKind.COMPRESSED, "model.joblib"),
        ("forest.pkl", FileKind.PICKLE, "model.pkl"),
        ("program.py", FileKind.PYTHON, "model.py"),
        ("notes.txt", FileKind.UNKNOWN, ""),
        ("notes.json", FileKind.UNKNOWN, ""),
        ("weights.h5", FileKind.HDF5, ""),
        ("noext", FileKind.UNKNOWN, ""),
    ],
)
def test_a_single_file_gets_the_name_that_its_backend_expects(filename: str, kind: FileKind, expected: str) -> None:
    assert well_known_name(filename, Look(kind)) == expected


def test_a_file_that_no_backend_loads_has_a_hint() -> None:
    assert no_backend_problem("weights.h5", Look(FileKind.HDF5)) == (
        "'weights.h5' is an HDF5 file, such as Keras weights, which no backend loads: export the model as a SavedModel, "
        "with model.export in Keras"
    )
    assert no_backend_problem("a.txt", Look(FileKind.UNKNOWN)).startswith(
        "'a.txt' is a file of an unknown format, which no backend loads; files that can be served alone end in .dali, "
    )
