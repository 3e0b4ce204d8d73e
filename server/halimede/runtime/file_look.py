"""Look at a model file: a bounded number of small reads, whatever its size. Nothing of it is parsed or executed."""

import errno
import os
import stat
from pathlib import Path

from halimede.core.repository.file_kinds import Look, look_at_directory, look_at_file

MOST_NAMES = 1000


class FileContent:
    """The bytes of an open file."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._descriptor = descriptor

    def at(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)


def look_at(path: Path) -> Look | None:
    """What the file or directory looks like; None if it does not exist, or is neither. Raises OSError."""
    try:
        # Without O_NONBLOCK the open of a FIFO waits for a writer that may never come.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO):
            return None
        raise
    try:
        info = os.fstat(descriptor)
        if stat.S_ISDIR(info.st_mode):
            with os.scandir(descriptor) as found:
                return look_at_directory([entry.name for entry, _ in zip(found, range(MOST_NAMES), strict=False)])
        if not stat.S_ISREG(info.st_mode):
            return None
        return look_at_file(path.name, FileContent(descriptor, info.st_size))
    finally:
        os.close(descriptor)
