"""Which kinds of files each backend loads, what is wrong with a file of another kind, and which files are pickles."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from halimede.core.repository.file_kinds import FileKind, Look
from halimede.core.repository.layout import DEFAULT_ARTIFACTS, SHARED_SUFFIXES, Artifact
from halimede.core.types.error import clip

_ARCHIVES = (FileKind.TORCHSCRIPT, FileKind.TORCH_EXPORT, FileKind.AOTI)

TAKES: Mapping[str, tuple[FileKind, ...]] = {
    "onnxruntime": (FileKind.ONNX, FileKind.ONNX_DIRECTORY, FileKind.ORT),
    "pytorch": _ARCHIVES,
    "tensorrt": (FileKind.TENSORRT,),
    "openvino": (
        *(FileKind.OPENVINO, FileKind.ONNX, FileKind.ONNX_DIRECTORY, FileKind.SAVED_MODEL, FileKind.SAVED_MODEL_FILE),
        *(FileKind.GRAPHDEF, FileKind.TFLITE),
    ),
    "tensorflow": (FileKind.SAVED_MODEL, FileKind.GRAPHDEF),
    "fil": (
        *(FileKind.XGBOOST_JSON, FileKind.XGBOOST_UBJ, FileKind.XGBOOST_BINARY, FileKind.LIGHTGBM),
        FileKind.TREELITE,
    ),
    "sklearn": (FileKind.PICKLE, FileKind.COMPRESSED),
}
"""The kinds that each backend loads, besides those that it unpickles. Files of other backends are not checked."""

_NAMES: Mapping[FileKind, str] = {
    FileKind.ONNX: "model.onnx",
    FileKind.ONNX_DIRECTORY: "model.onnx",
    FileKind.TORCHSCRIPT: "model.pt",
    FileKind.TORCH_EXPORT: "model.pt2",
    FileKind.AOTI: "model.pt2",
    FileKind.TENSORRT: "model.plan",
    FileKind.OPENVINO: "model.xml",
    FileKind.SAVED_MODEL: "model.savedmodel",
    FileKind.GRAPHDEF: "model.graphdef",
    FileKind.XGBOOST_JSON: "xgboost.json",
    FileKind.XGBOOST_UBJ: "xgboost.ubj",
    FileKind.XGBOOST_BINARY: "xgboost.model",
    FileKind.LIGHTGBM: "model.txt",
    FileKind.TREELITE: "checkpoint.tl",
    FileKind.PYTHON: "model.py",
}
"""The well-known name of a file of each kind that some backend loads."""

_ADVICE: Mapping[FileKind, str] = {
    FileKind.EMPTY: "copy it again",
    FileKind.EMPTY_DIRECTORY: "copy the model into it",
    FileKind.LFS_POINTER: "run 'git lfs pull' where it was cloned, and copy the file again",
    FileKind.HTML: "the download of the model failed, and this is the page that was saved instead",
    FileKind.TORCH_SAVE: "save the model with torch.jit.save or torch.export.save",
    FileKind.SAVED_MODEL_FILE: "give the whole directory, as model.savedmodel",
    FileKind.TFLITE: "convert it to ONNX, or give it to the backend openvino",
    FileKind.KERAS: "export the model as a SavedModel, with model.export in Keras",
    FileKind.HDF5: "export the model as a SavedModel, with model.export in Keras",
    FileKind.PICKLE: "it is no file that this backend unpickles",
    FileKind.SKOPS: "write the model with joblib.dump, or convert it to ONNX",
    FileKind.PMML: "convert it to ONNX",
    FileKind.SAFETENSORS: "it has weights without a program; a python model can read it",
    FileKind.GGUF: "it has weights without a program; a python model can read it",
    FileKind.NUMPY: "it is data, not a model",
    FileKind.SHARED_LIBRARY: "native code is not run here",
    FileKind.PYTHON: 'name it model.py, for the backend "python"',
}

_EXECUTABLE = frozenset({FileKind.PICKLE, FileKind.TORCH_SAVE, FileKind.TORCH_EXPORT})
"""Kinds whose loaders unpickle: torch.export keeps weights and constants as pickles that may name any function.
TorchScript does not belong here: its reader takes only data and the archive's own classes from its pickles."""
_SAID_BY_BACKEND: Mapping[str, frozenset[FileKind]] = {"pytorch": frozenset({FileKind.TORCH_SAVE})}
"""Kinds whose load the backend itself refuses, with more detail: whether a pickle has weights or a whole module."""
NO_MODELS = frozenset({FileKind.EMPTY, FileKind.LFS_POINTER, FileKind.HTML})
"""Kinds that are no model of any backend."""
_UNCLEAR = frozenset({FileKind.COMPRESSED, FileKind.ZIP, FileKind.UNKNOWN})
"""Kinds that may contain a pickle."""
_NO_PICKLES = frozenset(
    {
        *(FileKind.EMPTY, FileKind.EMPTY_DIRECTORY, FileKind.LFS_POINTER, FileKind.HTML, FileKind.TENSORRT),
        *(FileKind.HDF5, FileKind.NUMPY, FileKind.TREELITE, FileKind.OPENVINO, FileKind.PMML, FileKind.XGBOOST_JSON),
        *(FileKind.XGBOOST_UBJ, FileKind.XGBOOST_BINARY, FileKind.LIGHTGBM, FileKind.KERAS, FileKind.SKOPS),
        *(FileKind.TORCHSCRIPT, FileKind.AOTI, FileKind.SAVED_MODEL, FileKind.ONNX_DIRECTORY),
    }
)
"""Kinds at whose first bytes an unpickler fails. Those of others, such as GGUF (the opcode of a number), or whatever is
before the signatures of ORT and TFLite, may begin a pickle."""
_ONLY: Mapping[str, frozenset[FileKind]] = {
    "pytorch": frozenset(
        {FileKind.EMPTY, FileKind.EMPTY_DIRECTORY, FileKind.TORCHSCRIPT, FileKind.AOTI, FileKind.PYTHON}
    )
}
"""What a backend loads if no pickle is allowed, where it unpickles parts of some archives: an archive may follow any
other bytes."""


def unpickled(filename: str, patterns: Collection[str]) -> bool:
    """Whether a backend with these patterns unpickles a file of this name."""
    return any(fnmatchcase(filename, pattern) for pattern in patterns)


def file_problem(backend: str, filename: str, look: Look, patterns: Collection[str] = ()) -> str | None:
    """Why the backend cannot load this file, and what would be right; None if it may be able to.

    `patterns` are those of the files that the backend unpickles. A file of an unknown format is left to its runtime.
    """
    takes = TAKES.get(backend)
    if takes is None or look.kind is FileKind.UNKNOWN or look.kind in _SAID_BY_BACKEND.get(backend, ()):
        return None
    named = f"'{clip(filename)}'"
    if look.kind is FileKind.ZIP and look.fault and (set(takes) & set(_ARCHIVES) or unpickled(filename, patterns)):
        return f"{named} is {look.kind.value}, but {look.fault}; copy it again ({_wanted(backend)})"
    if look.kind in takes:
        return f"{named} is {look.kind.value}, but {look.fault}; copy it again" if look.fault else None
    if unpickled(filename, patterns) and (look.kind in _EXECUTABLE or look.kind in _UNCLEAR):
        return None
    return f"{named} is {look.kind.value}, and {_wanted(backend)}{_advice(backend, look.kind)}"


def _wanted(backend: str) -> str:
    kinds = [kind.value for kind in TAKES[backend][:3]]
    listed = " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
    return f"the backend '{backend}' loads {listed}"


def _advice(backend: str, kind: FileKind) -> str:
    home = _home(kind)
    if home is not None and home.backend != backend:
        return f': name it {home.filename} and set backend: "{home.backend}"'
    advice = _ADVICE.get(kind)
    return f": {advice}" if advice else ""


def _home(kind: FileKind) -> Artifact | None:
    """The well-known file of this kind, and its backend."""
    name = _NAMES.get(kind)
    return next((artifact for artifact in DEFAULT_ARTIFACTS if artifact.filename == name), None)


def well_known_name(filename: str, look: Look) -> str:
    """The name in a version directory with which a single file is served as a model.

    A suffix that belongs to one backend decides, so that a file of another kind under it is an error; else the kind
    decides. "" for a file that no backend loads.
    """
    suffix = filename[filename.rindex(".") :].lower() if "." in filename else ""
    own = next((each.filename for each in DEFAULT_ARTIFACTS if suffix and each.filename.endswith(suffix)), "")
    if own and suffix not in SHARED_SUFFIXES:
        return own
    home = _home(look.kind)
    if home is not None:
        return home.filename
    return ""


def no_backend_problem(filename: str, look: Look) -> str:
    """Why a single file cannot be served."""
    suffixes = sorted({"." + artifact.filename.rpartition(".")[2] for artifact in DEFAULT_ARTIFACTS})
    advice = _ADVICE.get(look.kind)
    hint = f": {advice}" if advice else f"; files that can be served alone end in {', '.join(suffixes)}"
    return f"'{clip(filename)}' is {look.kind.value}, which no backend loads{hint}"


def pickle_problem(backend: str, filename: str, look: Look, patterns: Collection[str]) -> str | None:
    """Why the file must not be loaded by a server that allows no pickles; None if its load unpickles nothing.

    A recognized pickle is refused for every backend, because not all of them say what they unpickle.
    """
    if look.kind in _EXECUTABLE:
        what = "is" if look.kind is not FileKind.TORCH_EXPORT else "contains pickles: it is"
        what = f"{what} {look.kind.value}"
    elif backend not in _ONLY and not unpickled(filename, patterns):
        return None
    elif look.doubt:
        what = f"may contain a pickle: it is {look.kind.value}, but {look.doubt}"
    elif look.kind not in _ONLY.get(backend, _NO_PICKLES):
        what = "may be a pickle" if look.kind in _UNCLEAR else f"may be a pickle, though it begins as {look.kind.value}"
    else:
        return None
    return pickle_refusal(backend, filename, what)


def pickle_refusal(backend: str, filename: str, what: str) -> str:
    """The text for a file that is not loaded because no pickles are allowed. `what` it is, as a predicate."""
    return (
        f"'{clip(filename)}' {what}, and a pickle can execute any code while the backend '{clip(backend)}' loads it. "
        "The server runs with --allow-pickle=false. Convert the model to a format without pickles, such as ONNX or "
        "TorchScript, or set --allow-pickle=true if you trust the author of the file"
    )
