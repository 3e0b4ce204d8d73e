"""Small files whose reading needs much memory are refused, with the setting that allows more."""

import zipfile
from pathlib import Path

import pytest

from halimede.backends.api import ModelSource
from halimede.backends.read_memory import limited_memory, read_memory
from halimede.core.types import ErrorCode, InferenceError
from support.forked import run_python

MIB = 1 << 20
READER = """
import resource, sys
from pathlib import Path
from halimede.backends.api import ModelSource
from halimede.backends.pytorch.files import find_files
from halimede.core.config.model_config import ModelConfig

path = Path(sys.argv[1])
before = resource.getrlimit(resource.RLIMIT_DATA)
where = ModelSource("m", 1, path.parent, path, {"read-memory-mb": sys.argv[2]})
try:
    find_files(ModelConfig(), where)
    print("read")
except Exception as error:
    print(error.code.name, error.message)
# What the process does afterwards has no limit.
assert resource.getrlimit(resource.RLIMIT_DATA) == before
"""


def exported(path: Path) -> Path:
    """A program of torch.export, of empty arrays: 6 MB that are compressed to 6 KB, and take 130 MB when they are parsed."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr("m/models/model.json", f'{{"graph_module":[{"[]," * 2_000_000}1]}}')
    return path


def reading(path: Path, base: str) -> str:
    done = run_python("-c", READER, path, base)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_small_archive_of_a_large_document_is_refused(tmp_path: Path) -> None:
    path = exported(tmp_path / "model.pt2")
    assert path.stat().st_size < 16 << 10
    assert reading(path, "50") == (
        "INVALID_ARG model 'm': reading model.pt2 takes more than 50 MiB of memory. "
        "If you trust the file, allow more with --backend-config pytorch,read-memory-mb=N, which is 1024 by default; 32 "
        "times the size of the file come on top of it"
    )
    # With more memory the error is that of the document.
    assert "the signature of the exported program cannot be read" in reading(path, "1024")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "9" * 30, "²"])
def test_a_wrong_setting_is_an_error(tmp_path: Path, text: str) -> None:
    where = ModelSource("m", 1, tmp_path, tmp_path, {"read-memory-mb": text})
    with pytest.raises(InferenceError) as caught, limited_memory("pytorch", where, tmp_path):
        pass
    assert caught.value == InferenceError(
        ErrorCode.INVALID_ARG, f"--backend-config pytorch,read-memory-mb={text}: it must be a number, at least 1"
    )


def test_a_larger_file_may_take_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    assert read_memory("fil", ModelSource("m", 1, tmp_path, path), path) == 1024 * MIB + 32_000
