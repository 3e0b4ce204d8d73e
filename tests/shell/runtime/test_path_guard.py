"""No name from a client or a configuration leads out of the repository, with any links in it.

The test records every path that Python opens or lists, by audit events. The rule: the real path of every opened file is
below the repository.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from halimede.backends.discover import find_backend
from halimede.core.inventory import Inventory
from halimede.core.types import InferenceError
from halimede.runtime.prepare import LoadOptions, plan_model, source
from halimede.runtime.repository import ModelRepository
from halimede.workers.abandon import Abandon
from support.models import add_identity

OPTIONS = LoadOptions(Inventory(()), {}, autocomplete=True)
SECRET = "secret"

watchers: list[list[str]] = []


def hook(event: str, arguments: tuple[object, ...]) -> None:
    if watchers and event in {"open", "os.scandir", "os.listdir"} and isinstance(arguments[0], str | Path):
        watchers[-1].append(str(arguments[0]))


sys.addaudithook(hook)


@contextmanager
def watched() -> Iterator[list[str]]:
    """The paths that are opened or listed meanwhile."""
    watchers.append([])
    try:
        yield watchers[-1]
    finally:
        watchers.pop()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository `models` with a model `m` that has links to many places, and files outside that must not be read."""
    top = tmp_path_factory.mktemp("guard")
    (top / "outside").mkdir()
    (top / "outside" / "labels.txt").write_text(SECRET)
    (top / "labels.txt").write_text(SECRET)
    repository = top / "models"
    add_identity(repository, "m")
    add_identity(repository, "other")
    model = repository / "m"
    (model / "labels.txt").write_text("inside")
    (model / "sub").mkdir()
    (model / "sub" / "labels.txt").write_text("inside")
    (repository / "labels.txt").write_text("inside")
    for name, target in {
        "out": top / "outside",
        "out.txt": top / "outside" / "labels.txt",
        "up": Path(".."),
        "upup": Path("../.."),
        "loop": Path("loop"),
        "nowhere": Path("nothing"),
        "chain": Path("sub/../up/m/out.txt"),
        "good.txt": Path("sub/labels.txt"),
    }.items():
        (model / name).symlink_to(target)
    os.mkfifo(model / "fifo")
    find_backend("identity")
    return top


LINKS = ["out", "out.txt", "up", "upup", "loop", "nowhere", "chain", "good.txt", "fifo"]
COMPONENTS = [
    "..",
    ".",
    "",
    "...",
    "..data",
    "m",
    "1",
    "sub",
    "models",
    "outside",
    "labels.txt",
    "~",
    "%2e%2e",
    "\\..",
    *LINKS,
]
ODD = ["\0", "\n", "\x7f", "\ud800", "\uff0e\uff0e", "\u2025", "\u202e", "a" * 300, "*", "$HOME"]

components = st.one_of(st.sampled_from(COMPONENTS), st.sampled_from(ODD), st.text(max_size=6))
paths = st.builds(
    lambda head, parts: head + "/".join(parts),
    st.sampled_from(["", "", "/", "//", "./"]),
    st.lists(components, max_size=6),
)


def quoted(text: str) -> str:
    """A string of the text format, byte for byte, as in a hostile file."""
    return '"' + "".join(f"\\{byte:03o}" for byte in text.encode("utf-8", "surrogatepass")) + '"'


def is_below(path: str, directory: Path) -> bool:
    real, top = os.path.realpath(path), os.path.realpath(directory)
    return real == top or real.startswith(top + os.sep)


@given(name=paths)
@example(name="..")
@example(name="m/../../outside")
@example(name="m/out")
@example(name="/etc")
def test_a_model_name_is_one_entry_of_the_repository(tree: Path, name: str) -> None:
    repository = tree / "models"
    with watched() as seen:
        try:
            entry = ModelRepository((repository,)).find(name)
        except (LookupError, OSError):
            entry = None
    assert all(os.path.dirname(os.path.abspath(path)).startswith(str(repository)) for path in seen), seen
    if entry is not None:
        assert (entry.directory, entry.directory.name, "/" in name) == (repository / name, name, False)


@given(filename=paths)
@example(filename="labels.txt")
@example(filename="good.txt")
@example(filename="up/labels.txt")
@example(filename="out.txt")
@example(filename="out/labels.txt")
@example(filename="chain")
@example(filename="sub/../../../labels.txt")
def test_a_label_file_is_read_from_the_repository_alone(tree: Path, filename: str) -> None:
    repository = tree / "models"
    label = f"label_filename: {quoted(filename)}"
    config = (
        'backend: "identity" input { name: "IN" data_type: TYPE_FP32 dims: 4 } '
        f'output {{ name: "OUT" data_type: TYPE_FP32 dims: 4 {label} }}'
    )
    (repository / "m" / "config.pbtxt").write_text(config)
    entry = ModelRepository((repository,)).find("m")
    with watched() as seen:
        try:
            labels = plan_model(entry, OPTIONS, Abandon()).labels
        except InferenceError:
            labels = {}
    assert [path for path in seen if not is_below(path, repository)] == []
    assert SECRET not in str(labels)


@given(filename=paths)
@example(filename="../1/model")
@example(filename="/etc/passwd")
@example(filename="sub/../../../../labels.txt")
def test_a_model_file_must_be_inside_its_version_directory(tree: Path, filename: str) -> None:
    repository = tree / "models"
    config = (
        'backend: "identity" input { name: "IN" data_type: TYPE_FP32 dims: 4 } '
        f'output {{ name: "OUT" data_type: TYPE_FP32 dims: 4 }} default_model_filename: {quoted(filename)}'
    )
    (repository / "m" / "config.pbtxt").write_text(config)
    entry = ModelRepository((repository,)).find("m")
    try:
        plan = plan_model(entry, OPTIONS, Abandon())
    except InferenceError:
        return
    artifact = source(entry, plan.config, plan.backend, 1, OPTIONS).artifact
    version = str(repository / "m" / "1")
    assert os.path.normpath(artifact) == version or os.path.normpath(artifact).startswith(version + os.sep)


def test_permitted_paths_are_read(tree: Path) -> None:
    repository = tree / "models"
    for filename in ("labels.txt", "./labels.txt", "sub/labels.txt", "good.txt", "up/labels.txt", "up/m/labels.txt"):
        config = (
            'backend: "identity" input { name: "IN" data_type: TYPE_FP32 dims: 4 } '
            f'output {{ name: "OUT" data_type: TYPE_FP32 dims: 4 label_filename: "{filename}" }}'
        )
        (repository / "m" / "config.pbtxt").write_text(config)
        entry = ModelRepository((repository,)).find("m")
        assert plan_model(entry, OPTIONS, Abandon()).labels == {"OUT": ("inside",)}, filename
