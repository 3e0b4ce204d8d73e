"""The files with initial states of sequences."""

import os
from pathlib import Path

import pytest

from halimede.backends.state_files import MAX_STRINGS_BYTES, read_state_files
from halimede.core.types import ErrorCode
from support.refusals import error_of
from support.sequences import config_of, plan_of

STATE = """state {
  input_name: "s" output_name: "t" data_type: TYPE_%s dims: [ -1 ]
  initial_state { name: "i" data_type: TYPE_%s dims: [ 3 ] data_file: "%s" }
}"""


def read(folder: Path, content: bytes | None, kind: str = "INT16", name: str = "f") -> dict[str, bytes]:
    if content is not None:
        (folder / "initial_state").mkdir(exist_ok=True)
        (folder / "initial_state" / name).write_bytes(content)
    return read_state_files(plan_of(config_of(STATE % (kind, kind, name))), str(folder))


def refused(folder: Path, content: bytes | None, kind: str = "INT16") -> str:
    error = error_of(read, folder, content, kind)
    assert error.code is ErrorCode.INVALID_ARG
    return error.message.replace(str(folder), "")


def test_a_file_has_the_bytes_of_its_dims(tmp_path: Path) -> None:
    assert read(tmp_path, b"abcdef") == {"s": b"abcdef"}
    text = b"\1\0\0\0a\0\0\0\0\2\0\0\0bc"
    assert read(tmp_path, text, "STRING") == {"s": text}


@pytest.mark.parametrize("content", [b"abcde", b"abcdefg", b""])
def test_a_file_of_another_size_is_refused(tmp_path: Path, content: bytes) -> None:
    assert refused(tmp_path, content) == (
        f"the initial state of 's': /initial_state/f has {len(content)} bytes, INT16 of shape [1,3] has 6"
    )


@pytest.mark.parametrize("content", [b"", b"\1\0\0\0a\0\0\0\0", b"\1\0\0\0a\0\0\0\0\2\0\0\0b"])
def test_a_file_with_other_strings_is_refused(tmp_path: Path, content: bytes) -> None:
    assert refused(tmp_path, content, "STRING") == (
        "the initial state of 's': /initial_state/f must have 3 strings for shape [1,3], each after its 4-byte length"
    )


def test_a_huge_file_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    read_from = tmp_path / "initial_state" / "f"
    read_from.parent.mkdir()
    with open(read_from, "wb") as file:
        file.truncate(MAX_STRINGS_BYTES + 1)
    assert f"has {MAX_STRINGS_BYTES + 1} bytes, at most {MAX_STRINGS_BYTES} are allowed" in refused(
        tmp_path, None, "STRING"
    )
    with open(read_from, "wb") as file:
        file.truncate(1 << 40)
    assert f"has {1 << 40} bytes, INT16 of shape [1,3] has 6" in refused(tmp_path, None)


def test_a_file_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    assert "the initial state of 's' cannot be read: [Errno 2] No such file" in refused(tmp_path, None)
    (tmp_path / "initial_state").mkdir()
    os.mkfifo(tmp_path / "initial_state" / "f")
    assert refused(tmp_path, None) == "the initial state of 's': /initial_state/f is not a regular file"


def test_a_link_out_of_the_models_directory_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "m"
    (model / "initial_state").mkdir(parents=True)
    (model / "data").mkdir()
    for folder in (tmp_path, model / "data"):
        (folder / "f").write_bytes(b"abcdef")
    link = model / "initial_state" / "f"
    link.symlink_to("../data/f")
    assert read(model, None) == {"s": b"abcdef"}
    link.unlink()
    link.symlink_to("../../f")
    assert refused(model, None) == (
        "the initial state of 's': /initial_state/f is a link that leads out of the model's directory; copy the file "
        "there"
    )
