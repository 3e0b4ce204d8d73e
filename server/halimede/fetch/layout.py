"""Recognize the files at a URI: a model's directory, the files of one version, or a single file. Pure.

Each is converted to the layout of a model repository: configuration, labels and similar files, and numbered versions.
"""

import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from halimede.core.config.files import config_file
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.versions import select_versions
from halimede.core.repository.file_kinds import FileKind, Look, look_at_directory
from halimede.core.repository.layout import (
    DEFAULT_ARTIFACTS,
    ENSEMBLE_PLATFORM,
    SHARED_SUFFIXES,
    detect_backend,
    is_version,
)
from halimede.core.repository.model_files import well_known_name
from halimede.core.types import InferenceError
from halimede.fetch.errors import FetchError
from halimede.fetch.tree import RemoteFile, named
from halimede_spec.fetch_exit import FetchExit
from halimede_spec.fetch_plan import FORMATS

UNSEEN = Look(FileKind.UNKNOWN)
"""A file that is not there yet."""

ARCHIVES = (".tar.gz", ".tgz", ".zip")

_ARTIFACTS = {artifact.filename for artifact in DEFAULT_ARTIFACTS}
_SAVED_MODEL = "model.savedmodel"
_OPENVINO = "model.xml"
_BACKEND_OF_FILE = {
    artifact.filename: artifact.backend
    for artifact in DEFAULT_ARTIFACTS
    if artifact.backend in FORMATS.values() and artifact.filename != _SAVED_MODEL
}
"""The well-known names that a single file can have."""
_OWN_SUFFIXES = sorted({PurePath(name).suffix for name in _BACKEND_OF_FILE if name != _OPENVINO} - SHARED_SUFFIXES)
_ACCEPTED = (
    "use a model's folder (config.pbtxt or numbered versions), a folder with a model file such as model.onnx or "
    f"model.py, a SavedModel's folder, or one file that ends in {', '.join(_OWN_SUFFIXES)}; a file of another name "
    "needs a format"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """`config` is the configuration's path; "" for a model without one. `versions` are the existing versions. A layout
    without versions is an ensemble's or invalid. `into` is where the files of a flat layout belong, which are all of
    version 1; "" if the files have their places. `root` is the folder, with a slash, that has them; "" for the one of
    the URI."""

    versions: tuple[int, ...]
    config: str = ""
    into: str = ""
    root: str = ""

    def target(self, path: str) -> str | None:
        """The path in the model's directory; None for a file that is not of the model."""
        return f"{self.into}{path.removeprefix(self.root)}" if path.startswith(self.root) else None

    @property
    def is_flat(self) -> bool:
        return bool(self.into)


FILES_OF_VERSION = Layout((1,), into="1/")


def is_archive(name: str) -> bool:
    return name.lower().endswith(ARCHIVES)


def how_to_pack(archive: str, folder: str = "MODEL_FOLDER") -> str:
    """How to make this archive of a model's folder."""
    name, source = shlex.quote(archive.rpartition("/")[2]), shlex.quote(folder)
    if name.lower().endswith(".zip"):
        return f'pack the folder of one model by: (cd {source} && zip -r "$OLDPWD"/{name} .)'
    return f"pack the folder of one model by: tar -czf {name} -C {source} ."


def folder_layout(paths: Collection[str], where: str) -> Layout:
    """The layout of a directory with these files; NOT_A_MODEL if it is not a model, or contains several.

    If it is no model, and only one folder in it has the files of a version, such as `onnx/` in a folder of Hugging
    Face, these are the model. A whole model's folder in it is refused: the directory looks like a repository, to which
    models may be added.
    """
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
        return FILES_OF_VERSION
    if _is_saved_model(tops):
        return Layout((1,), into=f"1/{_SAVED_MODEL}/")
    models = models_in(paths)
    if len(models) == 1 and not _is_model(_tops(tops[models[0]])):
        return replace(folder_layout(tops[models[0]], where), root=f"{models[0]}/")
    is_packed = is_archive(where)
    if models:
        found = "the folder of a model" if len(models) == 1 else f"several models: {named(models)}"
        of_one = how_to_pack(where, models[0]) if is_packed else f"use the URI of one: {where.rstrip('/')}/{models[0]}/"
        raise FetchError(FetchExit.NOT_A_MODEL, f"{where} holds {found}; {of_one}")
    found = named(sorted(tops)) if tops else "nothing"
    accepted = how_to_pack(where) if is_packed else _ACCEPTED
    raise FetchError(FetchExit.NOT_A_MODEL, f"{where} is not a model: it holds {found}; {accepted}")


def models_in(paths: Iterable[str]) -> tuple[str, ...]:
    """The names of the direct subdirectories that are models."""
    return tuple(sorted(top for top, inside in _tops(paths).items() if inside and _is_recognized(_tops(inside))))


def single_file(name: str, form: str | None, where: str, look: Look = UNSEEN) -> str:
    """The name of a single file in its version; NOT_A_MODEL if neither its own name nor `form` shows its format.

    `look` decides between the files of a format whose name the file does not have, such as `booster.json` or
    `traced.pth`. Without a format the content does not count, so that nothing is downloaded in vain.
    """
    shown = name if name in _BACKEND_OF_FILE else well_known_name(name, UNSEEN)
    backend = FORMATS[form] if form else _BACKEND_OF_FILE.get(shown)
    files = [file for file, loader in _BACKEND_OF_FILE.items() if loader == backend]
    if _OPENVINO in files:
        text = (
            f"{where}: the weights of an OpenVINO model are in a second file; use a folder with model.xml and model.bin"
        )
        raise FetchError(FetchExit.NOT_A_MODEL, text)
    if shown in files:
        return shown
    if files and not shown:
        by_suffix = (file for file in files if PurePath(file).suffix == PurePath(name).suffix.lower())
        by_content = well_known_name("", look)
        return by_content if by_content in files else next(by_suffix, files[0])
    fault = (
        f"is not a file of a model of format {form}"
        if form
        else f"is not a model; {_ACCEPTED}, or an archive of a folder"
    )
    raise FetchError(FetchExit.NOT_A_MODEL, f"{where} {fault}")


def archive_root(paths: Collection[str]) -> str:
    """The only top-level directory of an archive, with a slash; "" if there are others, or the root is the model."""
    tops = _tops(paths)
    if len(tops) != 1 or _is_recognized(tops):
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
        version: _tops(path.partition("/")[2] for path in targets if path.startswith(f"{version}/"))
        for version in versions
    }
    try:
        found = detect_backend(config, name, inside[min(versions)].keys())
    except InferenceError as error:
        raise FetchError(FetchExit.NOT_A_MODEL, f"model '{name}': {error.message}") from None
    wanted = _wanted(found)
    if not wanted or config.cc_model_filenames or config.runtime:
        return
    for version in sorted(inside):
        if not any(file.partition("/")[0] in inside[version] for file in wanted):
            there = named(sorted(inside[version])) or "nothing"
            listed = " or ".join(wanted)
            text = f"version {version} has no {listed}, which backend {found.backend} loads; it has {there}"
            raise FetchError(FetchExit.NOT_A_MODEL, f"model '{name}': {text}")


def _wanted(config: ModelConfig) -> list[str]:
    """The names of which a version needs one; none for backends whose files are not known here."""
    if config.default_model_filename:
        return [config.default_model_filename]
    return [
        artifact.filename
        for artifact in DEFAULT_ARTIFACTS
        if artifact.backend == config.backend
        and artifact.backend in FORMATS.values()
        and config.platform in ("", artifact.platform)
    ]


def _tops(paths: Iterable[str]) -> Mapping[str, list[str]]:
    """The top-level names, each with the paths inside it, none for a file."""
    tops: dict[str, list[str]] = {}
    for path in paths:
        top, _, inside = path.partition("/")
        below = tops.setdefault(top, [])
        if inside:
            below.append(inside)
    return tops


def _is_recognized(tops: Mapping[str, list[str]]) -> bool:
    return _is_model(tops) or not _ARTIFACTS.isdisjoint(tops) or _is_saved_model(tops)


def _is_saved_model(tops: Mapping[str, list[str]]) -> bool:
    return look_at_directory(tops.keys()).kind is FileKind.SAVED_MODEL


def _is_model(tops: Mapping[str, list[str]]) -> bool:
    """Whether a directory with these names is a model. Stricter than `is_model_directory`, which accepts a
    configuration of any name alone."""
    return any(
        (top in ("config.pbtxt", "config.yaml") and not inside) or (inside and is_version(top))
        for top, inside in tops.items()
    )
