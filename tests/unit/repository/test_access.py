"""The text for a file that the server's user may not read: the bits that apply to it, and the command that is right."""

import pytest

from halimede.core.repository.access import denial

SERVER = 65532


def denial_text(
    path: str = "/models/m", *, is_directory: bool = False, owner: int = 1000, group: int = 1000, mode: int
) -> str:
    return denial(
        path, is_directory=is_directory, owner=owner, group=group, mode=mode, user=SERVER, groups={SERVER, 2000}
    )


def test_it_names_file_owner_mode_and_server() -> None:
    assert denial_text("/models/m/1/model.onnx", mode=0o600) == (
        "permission denied: '/models/m/1/model.onnx' belongs to user 1000 and group 1000 and has mode 600; "
        "the server runs as user 65532, groups 2000, 65532; "
        "run `chmod o+r /models/m/1/model.onnx`, or run the server as user 1000"
    )


@pytest.mark.parametrize(
    ("file", "right"),
    [
        ({"mode": 0o700, "is_directory": True}, "`chmod o+rx /models/m`, or run the server as user 1000"),
        ({"mode": 0o744, "is_directory": True}, "`chmod o+rx /models/m`, or run the server as user 1000"),
        ({"mode": 0o600, "group": 2000}, "`chmod g+r /models/m`, or run the server as user 1000"),
        ({"mode": 0o606, "group": 2000}, "`chmod g+r /models/m`, or run the server as user 1000"),
        ({"mode": 0o200, "owner": SERVER}, "`chmod u+r /models/m`"),
        ({"mode": 0o600, "path": "/my models/m"}, "`chmod o+r '/my models/m'`, or run the server as user 1000"),
    ],
    ids=["folder", "folder without x", "group", "group before others", "owner", "quoted"],
)
def test_the_command_is_for_the_bits_that_apply(file: dict[str, object], right: str) -> None:
    assert denial_text(**file).rpartition("; run ")[2] == right  # type: ignore[arg-type]


def test_mode_that_allows_reading_is_not_given_as_the_cause() -> None:
    text = denial_text(mode=0o644)
    assert "its mode allows it" in text
    assert "SELinux" in text
    assert "chmod" not in text
