"""The temporary folder with the downloads of one server.

A server that is killed leaves its folder behind, and in a container that is started again these add up until the disk
is full. So each server holds a lock on its folder, which ends with its process, and removes at its start the folders
that no process has locked.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "halimede-models-"
FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Downloads:
    """A new folder, locked by this process."""

    def __init__(self) -> None:
        """Removes the folders of servers that were killed. OSError."""
        _remove_left()
        while True:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            # Another server may take the new folder for a left one before it is locked.
            with suppress(FileNotFoundError):
                self._descriptor = os.open(self.folder, FLAGS)
                # Where there are no locks, no server removes anything.
                with suppress(OSError):
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                if self.folder.exists():
                    return
                os.close(self._descriptor)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._descriptor)


def _remove_left() -> None:
    """Remove this user's folders that no process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # Another user's, removed meanwhile, or locked.
        with suppress(OSError):
            descriptor = os.open(folder, FLAGS)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                    log.info("removed '%s', the downloads of a server that was killed", folder)
            finally:
                os.close(descriptor)
