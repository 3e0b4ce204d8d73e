"""Checks of the classes: the attributes and methods of a backend, loads, and the errors of loads."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path, PurePath

from halimede.backends.api import BackendModel, Checks, ModelSource, Preloads, Unpickles
from halimede.conformance_kit.subject import NotTried, Subject, Wrong, artifact_bytes, failure_of, text_of
from halimede.core.types import InferenceError

LONGEST_TEXT = 4000
METHODS = ("default_instance_count", "supports_gpu", "autocomplete", "load")


def check_interface(subject: Subject) -> str:
    """The attributes and methods of `halimede.backends.api.Backend`."""
    backend = subject.backend
    filename = getattr(backend, "default_model_filename", None)
    if not isinstance(filename, str) or PurePath(filename).name != filename:
        raise Wrong(f"default_model_filename is {filename!r}", 'set a file name, or "" if a model needs no file')
    if getattr(backend, "isolation", None) not in ("thread", "process"):
        raise Wrong(f"isolation is {getattr(backend, 'isolation', None)!r}", 'set "thread" or "process"')
    for name in METHODS:
        if not callable(getattr(backend, name, None)):
            raise Wrong(f"there is no method `{name}`", "implement the protocol Backend of halimede.backends.api")
    for kind in ("CPU", "GPU", "MODEL"):
        count = backend.default_instance_count(kind)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise Wrong(f"default_instance_count({kind!r}) is {count!r}", "return a number of at least 1")
    if not isinstance(backend.supports_gpu(), bool):
        raise Wrong("supports_gpu() is no bool", "return whether the installed runtime can use a GPU")
    patterns = backend.unpickles if isinstance(backend, Unpickles) else ()
    if not isinstance(patterns, tuple) or not all(isinstance(each, str) and each for each in patterns):
        raise Wrong(f"unpickles is {patterns!r}", 'set a tuple of file name patterns, such as ("*.pkl",)')
    if isinstance(backend, Preloads):
        check_preload(backend.preload(subject.source))
    return f"isolation is {backend.isolation}, {'a file ' + filename if filename else 'no file'} per version"


def check_preload(entry: str) -> None:
    """The entry exists. It is not called: this process has other threads and runtimes."""
    module, _, function = entry.partition(":")
    try:
        found = getattr(import_module(module), function, None)
    except (ImportError, ValueError) as error:
        raise Wrong(
            f"preload names {entry!r}: {error}", 'return "module:function", such as "my_backend.runtime:load"'
        ) from error
    if not callable(found):
        raise Wrong(f"preload names {entry!r}, which is no function", 'return "module:function"')


def check_completion(subject: Subject) -> str:
    """`autocomplete` changes nothing in a complete configuration, and gives the same result each time."""
    one, other = (subject.backend.autocomplete(subject.config, subject.source) for _ in range(2))
    if one != other:
        raise Wrong("autocomplete gives different results for the same model", "compute it from the file alone")
    for field in ("max_batch_size", "input", "output"):
        before, after = getattr(subject.config, field), getattr(one, field)
        if before != after:
            raise Wrong(
                f"autocomplete changes {field} of a complete configuration from {before} to {after}",
                "take what the configuration sets, and fill in only what it leaves out",
            )
    return "a complete configuration stays as it is"


def check_load(subject: Subject) -> str:
    """A load makes a model, the model an instance of one kind, and both can be closed."""
    model = subject.load()
    for name in ("create_instance", "close"):
        if not callable(getattr(model, name, None)):
            raise Wrong(f"the loaded model has no method `{name}`", "implement the protocol BackendModel")
    instance = model.create_instance(subject.placement())
    kinds = [name for name in ("run", "execute") if callable(getattr(instance, name, None))]
    if len(kinds) != 1 or not callable(getattr(instance, "close", None)):
        has = ", ".join(kinds) or "neither `run` nor `execute`"
        raise Wrong(f"an instance has {has}", "implement `close`, and either `run` or `execute`")
    instance.close()
    model.close()
    return f"a model loads, its instance has `{kinds[0]}`, both close"


@contextmanager
def broken_copies(subject: Subject) -> Iterator[list[tuple[str, ModelSource]]]:
    """Copies of the model whose file is missing, empty, cut or of another format, each with what is wrong."""
    original = subject.source
    if not artifact_bytes(original.artifact):
        raise NotTried("the model has no file")
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for what in ("missing", "empty", "cut in half", "of another format"):
            directory = Path(folder) / what.replace(" ", "_")
            artifact = directory / str(original.version) / original.artifact.name
            artifact.parent.mkdir(parents=True)
            # A model may have further files, such as weights.
            for beside in original.artifact.parent.iterdir():
                if beside != original.artifact:
                    (artifact.parent / beside.name).symlink_to(beside.absolute())
            _break(original.artifact, artifact, what)
            source = replace(original, model_directory=directory, artifact=artifact)
            made.append((what, source))
        yield made


def _break(original: Path, copy: Path, what: str) -> None:
    if what == "missing":
        return
    if original.is_dir():
        shutil.copytree(original, copy)
        files = [each for each in copy.rglob("*") if each.is_file()]
    else:
        shutil.copy(original, copy)
        files = [copy]
    for file in files:
        content = file.read_bytes()
        broken = {"empty": b"", "cut in half": content[: len(content) // 2]}
        file.write_bytes(broken.get(what, b"\x00\x01not a model\xff" * 64))


def check_load_errors(subject: Subject) -> str:
    """A load of a broken file is an InferenceError with a text for the author of the model."""
    kept: list[str] = []
    with broken_copies(subject) as copies:
        for what, source in copies:
            error = failure_of(lambda source=source: _load_and_close(subject, source))  # type: ignore[misc]  # its default
            if error is None and what in ("cut in half", "empty"):
                kept.append(what)
                continue
            _check_error(f"the load of a file that is {what}", error)
    if len(kept) == 2:
        raise Wrong("files that are empty or cut in half are loaded", "check that the file is complete")
    return "files that are missing, broken or of another format are refused with a text"


def _load_and_close(subject: Subject, source: ModelSource) -> None:
    model: BackendModel = subject.load(source)
    # Some backends open the file when an instance is made.
    try:
        model.create_instance(subject.placement()).close()
    finally:
        with suppress(Exception):
            model.close()


def _check_error(what: str, error: BaseException | None) -> None:
    if error is None:
        raise Wrong(f"{what} succeeds", "raise an InferenceError that names the file and what is wrong with it")
    if not isinstance(error, InferenceError):
        raise Wrong(
            f"{what} raises {text_of(error)!r}",
            "catch it, and raise an InferenceError that names the file and what is wrong with it",
        )
    if not error.message.strip() or len(error.message) > LONGEST_TEXT:
        raise Wrong(
            f"the error of {what} has {len(error.message)} characters",
            f"write a text of 1 to {LONGEST_TEXT} characters",
        )


def check_check(subject: Subject) -> str:
    """`check` accepts what `load` accepts, and refuses what it refuses, without loading."""
    backend = subject.backend
    if not isinstance(backend, Checks):
        raise NotTried("the backend has no method `check`, so `halimede check` finds less")
    if (error := failure_of(lambda: backend.check(subject.config, subject.source))) is not None:
        raise Wrong(f"check refuses a model that loads: {text_of(error)}", "raise only what `load` would raise")
    with suppress(NotTried), broken_copies(subject) as copies:
        for what, source in copies:
            loads = failure_of(lambda source=source: _load_and_close(subject, source)) is None  # type: ignore[misc]  # as above
            passes = failure_of(lambda source=source: backend.check(subject.config, source)) is None  # type: ignore[misc]  # as above
            if passes and not loads:
                raise Wrong(f"check accepts a file that is {what}, and load refuses it", "read the file in `check` too")
    return "check accepts and refuses the same files as load"
