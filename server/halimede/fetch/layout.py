"""Recognize the files at a URI: a model's directory, the files of one version, or a single file. Pure.

Each is converted to the layout of a model repository: configuration, labels and similar files, and numbered versions.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from halimede.core.config.files import config_file
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.versions import select_versions
from halimede.core.repository.layout import DEFAULT_ARTIFACTS, ENSEMBLE_PLATFORM, detect_backend, is_version
from halimede.core.types import InferenceError
from halimede.fetch.errors import FetchError
from halimede.fetch.tree import RemoteFile, named
from halimede_spec.fetch_exit import FetchExit

FORMATS = {"onnx": ("onnxruntime", "model.onnx"), "python": ("python", "model.py")}
"""Backend and file name of each `format` in a plan."""

SUFFIXES = {".onnx": "onnx", ".py": "python"}

ARCHIVES = (".tar.gz", ".tgz", ".zip")

_ARTIFACTS = {artifact.filename for artifact in DEFAULT_ARTIFACTS}
_FILE_OF_BACKEND = dict(FORMATS.values())
_ACCEPTED = (
    "use a model's folder (config.pbtxt or numbered versions), a folder with model.onnx or model.py, "
    "or one .onnx or .py file"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """`config` is the configuration's path; "" for a model without one. `versions` are the existing versions. A layout
    without versions is an ensemble's or invalid. In a flat layout all files belong to version 1."""

    versions: tuple[int, ...]
    config: str = ""
    is_flat: bool = False


def is_archive(name: str) -> bool:
    return name.lower().endswith(ARCHIVES)


def folder_layout(paths: Collection[str], where: str) -> Layout:
    """The layout of a directory with these files; NOT_A_MODEL if it is not a model, or contains several."""
    tops = _tops(paths)
    if _is_model(tops):
        try:
            config = config_file("", lambda name: name in paths) or ""
        except ValueError as error:
            raise FetchError(FetchExit.NOT_A_MODEL, f"{where}: {error}") from None
        versions = tuple(sorted(int(top) for top, inside in tops.items() if inside and is_version(top)))
        misplaced = sorted(_ARTIFACTS & tops.keys())
        if not versions and misplaced:
            text = f"{where}: {misplaced[0]} is beside {config}; move it to 1/{misplaced[0]}"
            raise FetchError(FetchExit.NOT_A_MODEL, text)
        return Layout(versions, config)
    if _ARTIFACTS & tops.keys():
        return Layout((1,), is_flat=True)
    if models := models_in(paths):
        text = f"{where} holds several models: {named(models)}; use the folder of one, such as {models[0]}/"
        raise FetchError(FetchExit.NOT_A_MODEL, text)
    found = named(sorted(tops)) if tops else "nothing"
    raise FetchError(FetchExit.NOT_A_MODEL, f"{where} is not a model: it holds {found}; {_ACCEPTED}")


def models_in(paths: Iterable[str]) -> tuple[str, ...]:
    """The names of the direct subdirectories that are models."""
    return tuple(
        sorted(
            top
            for top, inside in _tops(paths).items()
            if inside and (_is_model(below := _tops(inside)) or _ARTIFACTS & below.keys())
        )
    )


def single_file(name: str, form: str | None, where: str) -> str:
    """The name of a single file in its version; NOT_A_MODEL if its own name does not show its format."""
    for suffix, form_of_suffix in SUFFIXES.items():
        if name.endswith(suffix) and form in (None, form_of_suffix):
            return FORMATS[form_of_suffix][1]
    if form is not None and not name.endswith(tuple(SUFFIXES)):
        return FORMATS[form][1]
    fault = (
        f"is not a file of a model of format {form}"
        if form
        else f"is not a model; {_ACCEPTED}, or an archive of a folder"
    )
    raise FetchError(FetchExit.NOT_A_MODEL, f"{where} {fault}")


def archive_root(paths: Collection[str]) -> str:
    """The only top-level directory of an archive, with a slash; "" if there are others, or the root is the model."""
    tops = _tops(paths)
    if len(tops) != 1 or _is_model(tops) or _ARTIFACTS & tops.keys():
        return ""
    (only,) = tops
    return f"{only}/" if tops[only] else ""


def is_empty_version(file: RemoteFile) -> bool:
    """Whether a store uses this object to represent an empty version directory, for example of an ensemble."""
    return file.size == 0 and is_version(file.path)


def is_of_other_version(path: str, layout: Layout, versions: Collection[int]) -> bool:
    """Whether the file belongs to a version that is not in `versions`."""
    top, slash, _ = path.partition("/")
    return bool(slash) and not layout.is_flat and is_version(top) and int(top) not in versions


def selected_versions(layout: Layout, config: ModelConfig, where: str) -> tuple[int, ...]:
    """The existing versions that the configuration's version policy selects."""
    if not layout.versions:
        if config.ensemble_scheduling is not None or config.platform == ENSEMBLE_PLATFORM:
            return ()
        raise FetchError(
            FetchExit.NOT_A_MODEL, f"{where} holds no version: add a numbered folder, such as 1/model.onnx"
        )
    try:
        return select_versions(config.version_policy, layout.versions, where)
    except InferenceError as error:
        there = ", ".join(map(str, layout.versions))
        raise FetchError(FetchExit.NOT_A_MODEL, f"{where}: {error.message}; it has {there}") from None


def check_files(config: ModelConfig, name: str, targets: Collection[str], versions: Collection[int]) -> None:
    """NOT_A_MODEL if one of the versions has no file that the configuration's backend could load."""
    if not versions:
        return
    inside = {
        version: _tops(path.partition("/")[2] for path in targets if _is_in(path, version)) for version in versions
    }
    try:
        found = detect_backend(config, name, inside[min(versions)].keys())
    except InferenceError as error:
        raise FetchError(FetchExit.NOT_A_MODEL, f"model '{name}': {error.message}") from None
    wanted = config.default_model_filename or _FILE_OF_BACKEND.get(found.backend, "")
    if not wanted or config.cc_model_filenames or config.runtime:
        return
    for version in sorted(inside):
        if wanted.partition("/")[0] not in inside[version]:
            there = named(sorted(inside[version])) or "nothing"
            text = f"version {version} has no {wanted}, which backend {found.backend} loads; it has {there}"
            raise FetchError(FetchExit.NOT_A_MODEL, f"model '{name}': {text}")


def _is_in(path: str, version: int) -> bool:
    return path.startswith(f"{version}/")


def _tops(paths: Iterable[str]) -> Mapping[str, list[str]]:
    """The top-level names, each with the paths inside it, none for a file."""
    tops: dict[str, list[str]] = {}
    for path in paths:
        top, _, inside = path.partition("/")
        below = tops.setdefault(top, [])
        if inside:
            below.append(inside)
    return tops


def _is_model(tops: Mapping[str, list[str]]) -> bool:
    """Whether a directory with these names is a model. Stricter than `is_model_directory`, which accepts a config.json
    alone."""
    return any(
        (top in ("config.pbtxt", "config.yaml") and not inside) or (inside and is_version(top))
        for top, inside in tops.items()
    )
