"""What the first bytes of a plan file tell without TensorRT. Pure.

A plan begins with a tag, the version of the layout (0), 16 bytes without meaning here, and the four numbers of the
TensorRT version that made it. It does not say for which GPU it was built.
"""

from dataclasses import dataclass

from halimede.core.types.error import clip

HEADER_BYTES = 28
_TAG = b"ftrt"
_LAYOUT = bytes(4)

_OTHERS = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"PK\x03\x04", "a ZIP archive, as PyTorch writes it"),
    (b"version https://git-lfs", "a pointer of Git LFS, and the file itself was not downloaded"),
    (b"<?xml", "an XML file"),
    (b"\x08", "an ONNX file or another protobuf message"),
)


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """`problem` is why the file is no plan, "" for a plan. `version` is (10, 3, 0, 26), () if the layout is unknown."""

    problem: str = ""
    version: tuple[int, ...] = ()


def read_header(head: bytes) -> PlanHeader:
    """The header of a file that begins with `head`, its first HEADER_BYTES or all of a shorter file."""
    if not head:
        return PlanHeader("it is empty")
    if not head.startswith(_TAG):
        what = next((text for start, text in _OTHERS if head.startswith(start)), "")
        return PlanHeader(f"it begins with {clip(repr(head[:8]))}, not with a plan's tag{what and f': it is {what}'}")
    if len(head) < HEADER_BYTES:
        return PlanHeader(f"it ends after {len(head)} bytes, within its header")
    return PlanHeader(version=tuple(head[24:HEADER_BYTES]) if head[4:8] == _LAYOUT else ())


def version_hint(made_by: tuple[int, ...], installed: str) -> str:
    """What to do about a plan that TensorRT refuses, as far as the versions tell; begins with "; "."""
    if not made_by:
        return f"; TensorRT {installed} is installed, and the file does not say which version made it"
    made = ".".join(map(str, made_by))
    if installed.split(".")[:3] != [str(part) for part in made_by[:3]]:
        return (
            f"; TensorRT {made} made the file, and {installed} is installed: build the engine with the installed "
            "version, or build it version compatible and start the server with "
            "--backend-config tensorrt,version-compatible=true"
        )
    return f"; the file was made by TensorRT {made}, which is installed, so it may be damaged or built for another GPU"
