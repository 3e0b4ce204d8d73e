"""From a store's listing to file paths."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.fetch.archive import files_below
from halimede.fetch.errors import FetchError
from halimede.fetch.tree import MAX_FILES, RemoteFile, safe_tree
from halimede_spec.fetch_exit import FetchExit

PARTS = st.sampled_from(["a", "b", "..", ".", "", "\\", "1", "c\x01", "n" * 256, "\ud800", "%2e%2e", "~", "C:"])
KEYS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)


def test_files_are_sorted_and_folders_markers_are_left_out() -> None:
    listed = [RemoteFile("b", 1), RemoteFile("1", 0), RemoteFile("", 0), RemoteFile("1/x", 2), RemoteFile("B", 0)]
    listed += [RemoteFile("__MACOSX/1/x", 1), RemoteFile("1/._x", 1), RemoteFile("1/.DS_Store", 1)]

    assert safe_tree(listed, "here") == (RemoteFile("1/x", 2), RemoteFile("B", 0), RemoteFile("b", 1))


def test_mounted_files_of_macos_are_left_out(tmp_path: Path) -> None:
    for path in ("1/model.onnx", "1/._model.onnx", "__MACOSX/x", ".DS_Store"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    assert list(files_below(tmp_path)) == ["1/model.onnx"]


def test_invalid_keys_are_named_up_to_a_limit() -> None:
    listed = [RemoteFile(f"../{i}", 1) for i in range(7)]

    with pytest.raises(FetchError) as raised:
        safe_tree(listed, "here")

    assert raised.value.code is FetchExit.NOT_A_MODEL
    assert raised.value.message.endswith("'../4' has '.' or '..' in it; and 2 more")


def test_too_many_files_are_refused() -> None:
    with pytest.raises(FetchError, match=f"here holds more than {MAX_FILES} objects"):
        safe_tree((RemoteFile(str(i), 1) for i in range(MAX_FILES + 1)), "here")


@given(st.lists(st.builds(RemoteFile, KEYS, st.integers(0, 2)), max_size=8))
def test_accepted_paths_stay_below_one_folder(listed: list[RemoteFile]) -> None:
    try:
        files = safe_tree(listed, "here")
    except FetchError:
        return
    with tempfile.TemporaryDirectory() as top:
        for file in files:
            path = Path(top) / "in" / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(exist_ok=False)
        assert set(os.listdir(top)) <= {"in"}
        below = {
            os.path.relpath(os.path.join(at, name), f"{top}/in") for at, _, names in os.walk(top) for name in names
        }
        assert below == {file.path for file in files}
