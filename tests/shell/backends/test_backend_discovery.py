import subprocess
import sys
from pathlib import Path

import pytest

from halimede.backends.api import Backend, ModelSource
from halimede.backends.discover import DEFAULT_BACKEND_DIRECTORY, backend_names, find_backend
from halimede.backends.identity import IdentityBackend
from halimede.backends.onnxruntime import OnnxRuntimeBackend
from halimede.backends.python.backend import PythonBackend
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import ErrorCode, InferenceError
from halimede.settings import Settings
from support.forked import run_python
from support.refusals import error_of


def install(directory: Path, name: str, source: str, entry_point: str) -> None:
    """A distribution with one module and one backend, laid out as pip lays it out."""
    (directory / f"{name}_backend.py").write_text(source)
    info = directory / f"{name}_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[halimede.backends]\n{name} = {entry_point}\n")


def printed_with(directory: Path, code: str) -> str:
    """What `code` prints in a Python that has `directory` on its path."""
    done = run_python("-c", f"import sys; sys.path.insert(0, {str(directory)!r})\n{code}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_included_backends_are_found_by_name():
    assert isinstance(find_backend("identity"), IdentityBackend)
    assert isinstance(find_backend("onnxruntime"), OnnxRuntimeBackend)
    assert isinstance(find_backend("python"), PythonBackend)
    assert {"identity", "onnxruntime", "python"} <= set(backend_names())


def test_all_callers_get_the_same_backend():
    assert find_backend("identity") is find_backend("identity")


def test_an_unknown_backend_is_named_with_the_installed_ones():
    assert error_of(find_backend, "caffe") == InferenceError(
        ErrorCode.INVALID_ARG,
        "unable to find backend library for backend 'caffe'; the backends that are installed: "
        + ", ".join(backend_names()),
    )


def test_a_backend_of_another_distribution_is_found(tmp_path):
    install(
        tmp_path,
        "third",
        "class ThirdBackend:\n    default_model_filename = 'model.third'\n",
        "third_backend:ThirdBackend",
    )
    printed = printed_with(
        tmp_path,
        "from halimede.backends.discover import backend_names, find_backend\n"
        "print('third' in backend_names(), find_backend('third').default_model_filename)",
    )
    assert printed == "True model.third"


def test_unimportable_backend_reports_the_reason(tmp_path):
    install(tmp_path, "broken", "import no_such_runtime\n", "broken_backend:BrokenBackend")
    printed = printed_with(
        tmp_path,
        "from halimede.backends.discover import find_backend\n"
        "try:\n    find_backend('broken')\nexcept Exception as error:\n    print(repr(error))",
    )
    assert printed == (
        "<InferenceError INTERNAL \"unable to load backend 'broken' (broken_backend:BrokenBackend): "
        "ModuleNotFoundError: No module named 'no_such_runtime'\">"
    )


def test_finding_backends_imports_no_runtime():
    code = (
        "import sys\n"
        "from halimede.backends.discover import find_backend\n"
        "find_backend('identity'), find_backend('onnxruntime').default_instance_count('CPU')\n"
        "print([name for name in ('onnxruntime', 'pynvml', 'asyncio') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "[]\n"


def add_program(directory: Path, name: str) -> Path:
    program = directory / name / "model.py"
    program.parent.mkdir(parents=True)
    program.write_text("class TritonPythonModel: pass\n")
    return program


def test_a_backend_may_be_one_program_in_the_backend_directory(tmp_path):
    program = add_program(tmp_path, "vllm")
    backend: Backend = find_backend("vllm", tmp_path)
    assert isinstance(backend, PythonBackend)
    assert (backend.program, backend.default_model_filename, backend.isolation) == (program, "", "process")
    assert (backend.default_instance_count("CPU"), backend.default_instance_count("GPU")) == (1, 1)


def test_installed_backend_takes_precedence_over_a_program(tmp_path):
    add_program(tmp_path, "identity")
    add_program(tmp_path, "python")
    assert isinstance(find_backend("identity", tmp_path), IdentityBackend)
    python = find_backend("python", tmp_path)
    assert isinstance(python, PythonBackend)
    assert (python.program, python.default_model_filename) == (None, "model.py")


def test_a_native_backend_is_refused_by_its_library(tmp_path):
    add_program(tmp_path, "repeat")
    (tmp_path / "repeat" / "libtriton_repeat.so").touch()
    assert error_of(find_backend, "repeat", tmp_path) == InferenceError(
        ErrorCode.UNSUPPORTED,
        "backend 'repeat' is a native library (libtriton_repeat.so), which cannot be run here; the backends that are "
        "installed: " + ", ".join(backend_names()),
    )


@pytest.mark.parametrize("name", ["../outside", "..", ".", "", "inside/../../outside", "a\0b", "nothing", "empty"])
def test_backend_name_cannot_escape_the_backend_directory(tmp_path, name):
    add_program(tmp_path, "outside")
    add_program(tmp_path, "backends")
    (tmp_path / "backends" / "inside").mkdir()
    (tmp_path / "backends" / "empty").mkdir()
    assert error_of(find_backend, name, tmp_path / "backends").message.startswith(
        f"unable to find backend library for backend '{name}'; the backends that"
    )


def test_the_backend_directory_is_tritons_by_default():
    assert DEFAULT_BACKEND_DIRECTORY == Settings().backend_directory == Path("/opt/tritonserver/backends")


def test_python_models_are_never_loaded_in_the_server(tmp_path):
    backend = PythonBackend()
    source = ModelSource("m", 1, tmp_path, tmp_path / "1" / "model.py")
    for step in (backend.load, backend.autocomplete):
        with pytest.raises(RuntimeError, match=r"model 'm': python models are .* by a worker process"):
            step(ModelConfig(name="m", backend="python"), source)
