import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.repository.file_kinds import (
    DIRECTORY_BYTES,
    END_BYTES,
    HEAD_BYTES,
    MOST_FIELDS,
    FileKind,
    Look,
    is_served_alone,
    look_at_directory,
    look_at_file,
)
from support.examples import examples
from support.model_files import SAMPLES, TORCHSCRIPT, Bytes, archive, field, zip64


@pytest.mark.parametrize("name", SAMPLES)
def test_each_kind_is_recognized_by_its_content(name: str) -> None:
    kind, content = SAMPLES[name]
    assert look_at_file("model.bin", Bytes(content)) == Look(kind)


@pytest.mark.parametrize(
    ("name", "kind", "lacks"),
    [
        ("onnx", FileKind.ONNX, "bytes that its fields announce"),
        ("torchscript", FileKind.ZIP, "the directory at the end of every zip archive"),
        ("openvino", FileKind.OPENVINO, "its end, '</net>'"),
        ("graphdef", FileKind.GRAPHDEF, "bytes that its fields announce"),
        ("xgboost json", FileKind.XGBOOST_JSON, "its last '}'"),
        ("xgboost ubj", FileKind.XGBOOST_UBJ, "its last '}'"),
        ("lightgbm", FileKind.LIGHTGBM, "its line 'end of trees'"),
    ],
)
def test_a_file_that_is_cut_is_incomplete(name: str, kind: FileKind, lacks: str) -> None:
    content = SAMPLES[name][1]
    cut = content[: content.index(b"end of trees")] if name == "lightgbm" else content[:-1]
    cut = content[: len(content) * 2 // 3] if name in ("torchscript", "openvino") else cut
    assert look_at_file("model.bin", Bytes(cut)) == Look(kind, f"it lacks {lacks}: it is incomplete")


def test_an_archive_without_a_part_of_its_directory_is_incomplete() -> None:
    content = archive(TORCHSCRIPT)
    at = content.index(b"PK\x01\x02")
    fault = "it lacks a part of the archive's directory: it is incomplete"
    # The first file is missing, as in the last part of a split archive.
    assert look_at_file("m.pt", Bytes(b"PK\x03\x04" + content[at + 100 :])) == Look(FileKind.ZIP, fault)


EXPORTED = ("m/archive_format", "m/models/model.json", "m/data/weights/weight_0")


@pytest.mark.parametrize(
    ("names", "kind", "doubt"),
    [
        ((*EXPORTED, "m/code/x", "m/constants.pkl"), FileKind.TORCH_EXPORT, "it is a TorchScript archive, too"),
        ((*EXPORTED, "m/code/x"), FileKind.TORCH_EXPORT, ""),
        ((*EXPORTED, "m/constants.pkl"), FileKind.TORCH_EXPORT, ""),
        ((*EXPORTED, "m/xaotinductor/y"), FileKind.TORCH_EXPORT, ""),
        ((*EXPORTED, "m/data/aotinductor/y/z"), FileKind.AOTI, "it is an archive of torch.export, too"),
        ((*EXPORTED, "m/data.pkl"), FileKind.TORCH_EXPORT, "it is a checkpoint of torch.save, which is a pickle, too"),
        # The folder of another name is one that a reader may take.
        ((*TORCHSCRIPT, "serialized_exported_program.json"), FileKind.TORCH_EXPORT, "it is a TorchScript archive, too"),
    ],
)
def test_an_archive_of_more_than_one_kind_is_in_doubt(names: tuple[str, ...], kind: FileKind, doubt: str) -> None:
    assert look_at_file("m.pt", Bytes(archive(names))) == Look(kind, doubt=doubt)


def _with_end(content: bytes, length: int, offset: int) -> bytes:
    """The archive, with another place of its directory in the record at its end."""
    at = content.rindex(b"PK\x05\x06")
    return content[: at + 12] + struct.pack("<2I", length, offset) + content[at + 20 :]


def _two_directories(seen: bytes, used: bytes) -> bytes:
    """An archive whose record points to the directory of `seen`, and whose last directory, which Python uses, is another."""
    start, end = seen.index(b"PK\x01\x02"), seen.rindex(b"PK\x05\x06")
    length = len(used[used.index(b"PK\x01\x02") : used.rindex(b"PK\x05\x06")])
    # Both directories have one length, so that Python takes the first archive for bytes before the second.
    assert length == end - start
    return _with_end(seen[:end] + used, length, start)


@pytest.mark.parametrize(
    "content",
    [
        _two_directories(archive(["m/code/x", "m/constants.pkl"]), archive(["m/code/y", "m/models/m.json"])),
        _with_end(archive(TORCHSCRIPT), 50, archive(TORCHSCRIPT).index(b"PK\x01\x02")),
        zip64(TORCHSCRIPT, short=(0, 0)),
        zip64(TORCHSCRIPT, announced=0),
        zip64(TORCHSCRIPT).replace(b"PK\x06\x07", b"PK\x06\x08"),
        archive(TORCHSCRIPT).replace(b"PK\x05\x06", b"PK\x06\x07" + bytes(16) + b"PK\x05\x06"),
        archive([*TORCHSCRIPT, "m/models/model.json_cut"]).replace(b"_cut", b"\0cut"),
        archive([*TORCHSCRIPT, "m/last"])[::-1].replace(b"\x02\x01KP", b"\x02\x01KQ", 1)[::-1],
    ],
    ids=[
        "bytes before",
        "shorter",
        "two lengths",
        "elsewhere",
        "no locator",
        "locator alone",
        "name with zero",
        "damaged",
    ],
)
def test_an_archive_that_readers_may_read_in_different_ways_is_in_doubt(content: bytes) -> None:
    look = look_at_file("m.pt", Bytes(content))
    assert look.doubt or look.fault, look


def test_an_archive_with_more_members_than_are_read_is_in_doubt() -> None:
    look = look_at_file("m.pt", Bytes(archive([*TORCHSCRIPT, *(f"m/{at}" for at in range(25_000))])))
    assert (look.kind, look.doubt[:22]) == (FileKind.TORCHSCRIPT, "its directory has 1314")


def test_a_program_is_recognized_by_its_name() -> None:
    assert look_at_file("model.py", Bytes(b"import os\n")) == Look(FileKind.PYTHON)
    assert look_at_file("model.txt", Bytes(b"import os\n")) == Look(FileKind.UNKNOWN)


def test_directories_are_recognized_by_their_names() -> None:
    assert look_at_directory([]) == Look(FileKind.EMPTY_DIRECTORY)
    assert look_at_directory(["saved_model.pb", "variables"]) == Look(FileKind.SAVED_MODEL)
    assert look_at_directory(["model.onnx", "weights.bin"]) == Look(FileKind.ONNX_DIRECTORY)
    assert look_at_directory(["1", "config.pbtxt"]) == Look(FileKind.UNKNOWN)
    assert [is_served_alone(names) for names in (["saved_model.pb"], ["model.onnx"], [], ["1"])] == [
        *(True, True, False, False)
    ]


def test_little_of_a_large_file_is_read() -> None:
    most = HEAD_BYTES + END_BYTES + DIRECTORY_BYTES
    large = archive([f"m/{at}" for at in range(40_000)])
    assert len(large) > 3 * most
    content = Bytes(large)
    look_at_file("m.pt", content)
    assert content.most <= most


def test_fields_of_a_graph_are_read_up_to_a_limit() -> None:
    content = Bytes(field(1, field(1, b"n")) * (2 * MOST_FIELDS))
    assert look_at_file("m.pb", content) == Look(FileKind.GRAPHDEF)
    assert MOST_FIELDS <= content.reads <= MOST_FIELDS + 2


@given(st.sampled_from(sorted(SAMPLES)), st.integers(0), st.binary(max_size=8), st.integers(0))
@settings(max_examples=examples(300))
def test_no_content_is_an_error(name: str, at: int, new: bytes, cut: int) -> None:
    content = SAMPLES[name][1]
    at %= len(content) + 1
    changed = content[:at] + new + content[at + len(new) :]
    look = look_at_file("model.bin", Bytes(changed[: cut % (len(changed) + 1)]))
    assert isinstance(look, Look)


@given(st.binary(max_size=200))
@settings(max_examples=examples(300))
def test_random_bytes_are_no_error(content: bytes) -> None:
    assert isinstance(look_at_file("model.bin", Bytes(content)), Look)
