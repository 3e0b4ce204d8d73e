"""What a file with a model of PyTorch is, read without PyTorch and without unpickling it.

TorchScript files, programs of torch.export, AOTInductor packages and the files of torch.save are ZIP archives; their
entries say which. Of a pickle only the names in it are read, for the error that says what it is.
"""

import io
import pickle
import pickletools
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halimede.backends.pytorch.form import Form
from halimede.core.repository.file_kinds import FileKind, archive_kinds
from halimede.core.types import InferenceError, invalid, unavailable

MOST_PICKLE_BYTES = 64 << 20
MOST_DOCUMENT_BYTES = 256 << 20
MOST_TRACED_BYTES = 1 << 20
MODEL = "model"
"""The name of a `.pt2` archive's main model; torch.export uses no other."""

HOW_TO_EXPORT = (
    "export the model: torch.export.save(torch.export.export(model, (example,)), 'model.pt2'), or "
    "torch.jit.trace(model, example).save('model.pt')"
)
HOW_TO_USE_CODE = (
    "or serve the weights, saved by torch.save(model.state_dict(), 'model.pt'), with their code: write "
    'runtime: "model.py" in config.pbtxt, and put the class of the model into model.py beside it'
)

_NO_MODULES = ("torch.", "torch._", "collections.", "builtins.", "__builtin__.", "numpy.")
"""Prefixes of what a pickle of weights or of a module of PyTorch names besides classes of the user."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A model file. `root` is the folder of all entries in it.

    `program` is the entry with the JSON document of an exported program, "" without; `package` is the name of the
    AOTInductor model, "" without. `traced` is the entry with the example of torch.jit.trace, "" without.
    """

    form: Form
    root: str
    program: str = ""
    package: str = ""
    traced: str = ""


def read_archive(path: Path, model: str) -> Archive:
    """What the file is; INVALID_ARG with what it is instead, and how to export the model."""
    try:
        with zipfile.ZipFile(path) as file:
            return _archive(file, path, model)
    except zipfile.BadZipFile as error:
        raise _wrong(path, model, _not_an_archive(path)) from error
    except (NotImplementedError, ValueError) as error:
        raise _wrong(path, model, f"is an archive that cannot be read: {error}") from error
    except OSError as error:
        raise unavailable(f"model '{model}': {path.name} cannot be read: {error.strerror or error}") from error


def read_entry(path: Path, entry: str, most: int) -> bytes:
    """The bytes of an entry; INVALID_ARG if it is damaged or has more than `most` bytes."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.getinfo(entry).file_size > most:
                text = f"{path.name} has {file.getinfo(entry).file_size} bytes in {entry}, at most {most} are read"
                raise invalid(text)
            return file.read(entry)
    except (zipfile.BadZipFile, KeyError, OSError, EOFError, NotImplementedError) as error:
        raise invalid(f"{path.name} is damaged: {entry}: {error}") from error


def _archive(file: zipfile.ZipFile, path: Path, model: str) -> Archive:
    names = file.namelist()
    root = names[0].partition("/")[0] if names else ""
    entries = {name.removeprefix(f"{root}/") for name in names}
    programs = sorted(name for name in entries if name.startswith("models/") and name.endswith(".json"))
    packages = sorted({name.split("/")[2] for name in entries if name.startswith("data/aotinductor/")})
    match next(iter(archive_kinds(names)), FileKind.ZIP):
        case FileKind.AOTI | FileKind.TORCH_EXPORT if programs or packages:
            program = f"{root}/{_main(programs, 'models/model.json', path, model)}" if programs else ""
            package = _main(packages, MODEL, path, model) if packages else ""
            return Archive(Form.PACKAGE if package else Form.EXPORTED, root, program, package)
        case FileKind.TORCH_EXPORT if "serialized_exported_program.json" in entries:
            # The layout before PyTorch 2.8, which PyTorch still loads.
            return Archive(Form.EXPORTED, root, f"{root}/serialized_exported_program.json")
        case FileKind.TORCHSCRIPT:
            traced = f"{root}/traced_inputs.pkl" if "traced_inputs.pkl" in entries else ""
            return Archive(Form.SCRIPT, root, traced=traced)
        case FileKind.TORCH_SAVE if "data.pkl" in entries:
            raise _wrong(path, model, _saved(file, f"{root}/data.pkl"), HOW_TO_USE_CODE)
    raise _wrong(path, model, "is a ZIP archive, but has no model of PyTorch in it")


def _main(names: list[str], wanted: str, path: Path, model: str) -> str:
    if wanted in names:
        return wanted
    if len(names) > 1:
        raise _wrong(path, model, f"has {len(names)} models ({', '.join(names[:5])}), and none is '{wanted}'")
    return names[0]


def _saved(file: zipfile.ZipFile, entry: str) -> str:
    """What a file of torch.save holds."""
    if file.getinfo(entry).file_size > MOST_PICKLE_BYTES:
        return "was written by torch.save, without the model's code"
    return describe_pickle(file.read(entry))


def describe_pickle(data: bytes) -> str:
    """What a pickle of torch.save holds, by the classes that it names. Nothing of it is executed."""
    classes = [name for name in _globals(data) if not name.startswith(_NO_MODULES)]
    modules = [name for name in _globals(data) if name.startswith("torch.nn.modules.")]
    found = [*classes, *modules]
    if found:
        return (
            f"is a pickle of a whole module (class {found[0]}), written by torch.save(model), without the class's code"
        )
    return "has weights alone (a state_dict), written by torch.save, without the model's code"


def _globals(data: bytes) -> list[str]:
    """The classes and functions that a pickle names, as `module.name`."""
    found: list[str] = []
    texts: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "GLOBAL":
                found.append(str(argument).replace(" ", ".", 1))
            elif opcode.name == "STACK_GLOBAL" and len(texts) > 1:
                found.append(f"{texts[-2]}.{texts[-1]}")
            elif isinstance(argument, str):
                texts = [*texts[-1:], argument]
    except (ValueError, UnicodeDecodeError):
        # The names before the damage.
        pass
    return found


def _not_an_archive(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        return "is empty"
    if head.startswith(b"PK\x03\x04"):
        return "is truncated: it begins as an archive of PyTorch and has no end"
    if head[:1] == b"\x80":
        with path.open("rb") as file:
            return describe_pickle(file.read(MOST_PICKLE_BYTES))
    if head[8:9] == b"{" and head[4:8] == b"\0\0\0\0":
        return "has weights alone (safetensors), without the model's code"
    if head.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS and not the file itself; run 'git lfs pull'"
    return "is not a file of PyTorch"


def _wrong(path: Path, model: str, what: str, more: str = "") -> InferenceError:
    hint = f"; {HOW_TO_EXPORT}" + (f"; {more}" if more else "")
    return invalid(f"model '{model}': {path.name} {what}{hint}")


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """An example that torch.jit.trace was called with: PyTorch's name of its storage (`FloatStorage`) and its shape."""

    storage: str
    shape: tuple[int, ...]


def traced_inputs(data: bytes) -> tuple[TracedTensor, ...] | None:
    """The examples of `traced_inputs.pkl`; None if they are not all tensors. Nothing that it names is called."""
    try:
        found = _TracedUnpickler(io.BytesIO(data)).load()
        examples = found["forward"]
    except Exception:  # noqa: BLE001  # a file of another format: there is no example
        return None
    if not isinstance(examples, list) or not all(isinstance(each, TracedTensor) for each in examples):
        return None
    return tuple(examples)


class _Name(str):
    """Stands for a class that the pickle names."""

    __slots__ = ()


class _TracedUnpickler(pickle.Unpickler):
    """Reads tensors as TracedTensor, and refuses any name but those that such a file needs."""

    def find_class(self, module: str, name: str) -> Any:  # Any: whatever a pickle may name
        match module, name:
            case "torch.jit._pickle", "restore_type_tag":
                return lambda value, _type: value
            case "torch._utils", "_rebuild_tensor_v2":
                return lambda storage, _offset, shape, *_rest: TracedTensor(str(storage), tuple(map(int, shape)))
            case "collections", "OrderedDict":
                return dict
            case "torch", _ if name.endswith("Storage"):
                return _Name(name)
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:  # Any: as the pickle has it
        return pid[1]
