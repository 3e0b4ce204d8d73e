"""The fuzz target of model files: any bytes have a kind, and little of them is read."""

from halimede.core.repository.file_kinds import DIRECTORY_BYTES, END_BYTES, HEAD_BYTES, MOST_FIELDS, look_at_file

MOST_BYTES = HEAD_BYTES + 2 * END_BYTES + DIRECTORY_BYTES + 20 * MOST_FIELDS


class Content:
    """The bytes as a file, and how many of them were asked for."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self.asked = 0
        self._data = data

    def at(self, offset: int, length: int) -> bytes:
        assert offset >= 0
        assert length >= 0
        self.asked += length
        return self._data[offset : offset + length]


def model_file(data: bytes) -> None:
    """Recognize the kind of a file."""
    content = Content(data)
    look_at_file("model.bin", content)
    assert content.asked <= MOST_BYTES
