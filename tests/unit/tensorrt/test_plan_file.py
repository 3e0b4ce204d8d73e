import pytest

from halimede.backends.tensorrt.plan_file import HEADER_BYTES, PlanHeader, read_header, version_hint

HEAD = b"ftrt" + bytes(20) + bytes([10, 3, 0, 26])


def test_the_version_is_read_from_a_known_layout_only():
    assert len(HEAD) == HEADER_BYTES
    assert read_header(HEAD) == PlanHeader(version=(10, 3, 0, 26))
    assert read_header(HEAD[:4] + b"\1" + HEAD[5:]) == PlanHeader()


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"", "it is empty"),
        (HEAD[:27], "it ends after 27 bytes, within its header"),
        (b"PK\3\4" + bytes(24), "a ZIP archive, as PyTorch writes it"),
        (b"\x08\x08\x12\x07pytorch" + bytes(20), "an ONNX file or another protobuf message"),
        (b"version https://git-lfs.gith", "a pointer of Git LFS"),
        (b"<?xml version", "an XML file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(20), "an HDF5 file"),
        (b"garbage" * 4, "it begins with b'garbageg', not with a plan's tag"),
    ],
)
def test_other_files_are_described(head, part):
    header = read_header(head)
    assert part in header.problem
    assert header.version == ()


def test_the_hint_compares_the_versions():
    assert "TensorRT 10.3.0.26 made the file, and 11.4.0.106 is installed: build" in version_hint(
        (10, 3, 0, 26), "11.4.0.106"
    )
    # A build number alone is no difference.
    assert "the file was made by TensorRT 10.3.0.26, which is installed" in version_hint((10, 3, 0, 26), "10.3.0.27")
    assert "does not say which version" in version_hint((), "11.4.0.106")
