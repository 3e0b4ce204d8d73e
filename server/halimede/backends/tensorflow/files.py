"""Find a model's file and say what is wrong with a wrong one. Reads names and first bytes only."""

import zipfile
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from halimede.backends.api import ModelSource
from halimede.backends.tensorflow.model_file import FrozenGraph, MetaGraph, read_frozen_graph, read_saved_model
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import InferenceError
from halimede.core.types.error import clip, internal, invalid, unavailable

GRAPHDEF = "tensorflow_graphdef"

_HDF5 = b"\x89HDF\r\n\x1a\n"
_LISTED = 5

_T = TypeVar("_T")


def is_frozen(config: ModelConfig, source: ModelSource) -> bool:
    """Whether the model is a GraphDef: its platform says it, or without a platform the file."""
    return config.platform == GRAPHDEF if config.platform else source.artifact.is_file()


def saved_model(source: ModelSource) -> tuple[MetaGraph, ...]:
    """The graphs of the SavedModel. UNAVAILABLE if there is none, INVALID_ARG if it is something else."""
    path = source.artifact
    if not path.exists():
        raise _absent(source)
    if path.is_file():
        raise _wrong(
            source,
            _keras_text(path)
            or f"'{path}' is a file, and a SavedModel is a directory; a frozen graph needs platform: \"{GRAPHDEF}\"",
        )
    if not (path / "saved_model.pb").is_file():
        hint = "tf.saved_model.save writes it; text files (saved_model.pbtxt) and split ones (.cpb) are not served"
        raise _wrong(source, f"'{path}' has no saved_model.pb, it has {_listing(path)}: {hint}")
    return _read(source, path / "saved_model.pb", read_saved_model, "SavedModel")


def frozen_graph(source: ModelSource) -> FrozenGraph:
    """The nodes of the GraphDef. UNAVAILABLE if there is none, INVALID_ARG if it is something else."""
    path = source.artifact
    if not path.exists():
        raise _absent(source)
    if path.is_dir():
        raise _wrong(source, f"'{path}' is a directory, and a frozen graph (platform {GRAPHDEF}) is a file")
    if text := _keras_text(path):
        raise _wrong(source, text)
    return _read(source, path, read_frozen_graph, "GraphDef")


def _read(source: ModelSource, path: Path, read: Callable[[Path], _T], what: str) -> _T:
    try:
        found = read(path)
    except ValueError as error:
        raise _wrong(source, f"'{path}' is not a {what}, or is cut off: {error}") from error
    except OSError as error:
        raise internal(f"'{path}' cannot be read: {error.strerror or error}") from error
    if not (found.nodes if isinstance(found, FrozenGraph) else found):
        raise _wrong(source, f"'{path}' is not a {what}: it has no graph")
    return found


def _absent(source: ModelSource) -> InferenceError:
    path = source.artifact
    text = f"unable to find '{path}' for model '{clip(source.name)}'"
    folder = path.parent
    if (folder / "saved_model.pb").is_file():
        text += f": '{folder}' itself is a SavedModel; move its files into '{path.name}' in it"
    else:
        with suppress(OSError):
            keras = next(
                (each for each in sorted(islice(folder.iterdir(), 100)) if each.suffix in (".keras", ".h5")), None
            )
            text += f": {_keras_text(keras) if keras and _keras_text(keras) else f'there is {_listing(folder)}'}"
    return unavailable(text)


def _keras_text(path: Path) -> str:
    """What to do with a Keras file; "" for any other file."""
    try:
        with path.open("rb") as file:
            is_keras = file.read(len(_HDF5)) == _HDF5
        if not is_keras and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                is_keras = {"config.json", "metadata.json"} <= set(archive.namelist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return ""
    if not is_keras:
        return ""
    export = f"keras.saving.load_model('{path.name}').export('model.savedmodel')"
    return f"'{path}' is a Keras model, which is not served: write a SavedModel with {export}"


def _listing(folder: Path) -> str:
    names = sorted(each.name for each in islice(folder.iterdir(), 100))
    listed = ", ".join(f"'{clip(name)}'" for name in names[:_LISTED])
    return f"{listed}{' and more' if len(names) > _LISTED else ''}" or "nothing"


def _wrong(source: ModelSource, text: str) -> InferenceError:
    return invalid(f"model '{clip(source.name)}': {text}")
