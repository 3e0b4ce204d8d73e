"""The files of a model version, and what they say without PyTorch."""

import zipfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from halimede.backends.api import ModelSource
from halimede.backends.pytorch.archive import MOST_DOCUMENT_BYTES, Archive, read_archive, read_entry
from halimede.backends.pytorch.exported import ExportedSignature, read_exported
from halimede.backends.pytorch.form import Form
from halimede.backends.pytorch.package import PackageSignature, read_package
from halimede.backends.read_memory import limited_memory
from halimede.core.config.model_config import ModelConfig
from halimede.core.repository.file_kinds import FileKind
from halimede.core.repository.model_files import pickle_refusal
from halimede.core.types import unavailable, unsupported

PYTHON_RUNTIME = "model.py"
MOST_SOURCE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is the model file or the module's code, `weights` the file with a module's weights.

    `exported` is the signature of an exported program; a package has it only if the program is packed with it.
    `package` is what the source of a package says.
    """

    form: Form
    path: Path
    archive: Archive | None = None
    weights: Path | None = None
    exported: ExportedSignature | None = None
    package: PackageSignature | None = None


def find_files(config: ModelConfig, source: ModelSource) -> ModelFiles:
    """The files; UNAVAILABLE if there are none, INVALID_ARG for a file that has no model."""
    path = source.artifact
    if config.runtime == PYTHON_RUNTIME or path.suffix == ".py":
        code = path if path.suffix == ".py" else path.with_name(PYTHON_RUNTIME)
        if code.is_file():
            weights = code.with_suffix(".pt")
            return ModelFiles(Form.MODULE, code, weights=weights if weights.is_file() else None)
    if not path.is_file():
        raise unavailable(f"unable to find '{path}' for model '{source.name}'{_files_beside(path)}")
    with limited_memory("pytorch", source, path):
        return _read_files(path, source)


def _read_files(path: Path, source: ModelSource) -> ModelFiles:
    archive = read_archive(path, source.name)
    if archive.form is Form.EXPORTED and not source.allow_pickle:
        # The server has looked at the file, but a worker that starts later may find another one in its place. The
        # readers of the other forms call no Python function, whatever the file is.
        problem = pickle_refusal("pytorch", path.name, f"contains pickles: it is {FileKind.TORCH_EXPORT.value}")
        raise unsupported(f"model '{source.name}': {problem}")
    exported = None
    if archive.program:
        exported = read_exported(read_entry(path, archive.program, MOST_DOCUMENT_BYTES), source.name)
    package = _package(path, archive) if archive.form is Form.PACKAGE else None
    return ModelFiles(archive.form, path, archive, exported=exported, package=package)


def _package(path: Path, archive: Archive) -> PackageSignature | None:
    folder = f"{archive.root}/data/aotinductor/{archive.package}/"
    with zipfile.ZipFile(path) as file:
        sources = [name for name in file.namelist() if name.startswith(folder) and name.endswith(".wrapper.cpp")]
    if len(sources) != 1:
        return None
    return read_package(read_entry(path, sources[0], MOST_SOURCE_BYTES).decode("utf-8", "replace"))


def _files_beside(path: Path) -> str:
    """A hint that names model files with other names in the directory."""
    try:
        listed = sorted(each.name for each in islice(path.parent.iterdir(), 1000))
    except OSError:
        return ""
    if PYTHON_RUNTIME in listed:
        return f": there is '{PYTHON_RUNTIME}'; write runtime: \"{PYTHON_RUNTIME}\" in config.pbtxt to serve its module"
    found = [name for name in listed if name.endswith((".pt", ".pt2", ".pth", ".ts"))]
    if not found:
        return ""
    names = ", ".join(f"'{name}'" for name in found[:3])
    return f": there is {names}; rename it to '{path.name}', or name it as default_model_filename in config.pbtxt"
