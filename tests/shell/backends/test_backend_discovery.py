import subprocess
import sys
from pathlib import Path

import pytest

from halimede.backends.discover import backend_names, find_backend
from halimede.backends.identity import IdentityBackend
from halimede.backends.onnxruntime import OnnxRuntimeBackend
from halimede.core.types import ErrorCode, InferenceError


def install(directory: Path, name: str, source: str, entry_point: str) -> None:
    """A distribution with one module and one backend, laid out as pip lays it out."""
    (directory / f"{name}_backend.py").write_text(source)
    info = directory / f"{name}_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[halimede.backends]\n{name} = {entry_point}\n")


def in_a_new_process(directory: Path, code: str) -> str:
    """What `code` prints in a Python that has `directory` on its path."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(directory)!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_our_own_backends_are_found_by_name():
    assert isinstance(find_backend("identity"), IdentityBackend)
    assert isinstance(find_backend("onnxruntime"), OnnxRuntimeBackend)
    assert {"identity", "onnxruntime"} <= set(backend_names())


def test_everybody_gets_the_same_backend():
    assert find_backend("identity") is find_backend("identity")


def test_an_unknown_backend_is_named_with_those_that_exist():
    with pytest.raises(InferenceError) as caught:
        find_backend("caffe")
    assert caught.value == InferenceError(
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
    printed = in_a_new_process(
        tmp_path,
        "from halimede.backends.discover import backend_names, find_backend\n"
        "print('third' in backend_names(), find_backend('third').default_model_filename)",
    )
    assert printed == "True model.third"


def test_a_backend_that_cannot_be_imported_says_why(tmp_path):
    install(tmp_path, "broken", "import no_such_runtime\n", "broken_backend:BrokenBackend")
    printed = in_a_new_process(
        tmp_path,
        "from halimede.backends.discover import find_backend\n"
        "try:\n    find_backend('broken')\nexcept Exception as error:\n    print(repr(error))",
    )
    assert printed == (
        "<InferenceError INTERNAL \"unable to load backend 'broken' (broken_backend:BrokenBackend): "
        "ModuleNotFoundError: No module named 'no_such_runtime'\">"
    )


def test_finding_backends_imports_no_runtime(tmp_path):
    printed = in_a_new_process(
        tmp_path,
        "from halimede.backends.discover import find_backend\n"
        "find_backend('identity'), find_backend('onnxruntime').default_instance_count('CPU')\n"
        "print([name for name in ('onnxruntime', 'pynvml', 'asyncio') if name in sys.modules])",
    )
    assert printed == "[]"
