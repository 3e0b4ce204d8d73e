"""A model's directory in the repository: it is made under a temporary name and appears complete, by one rename."""

import errno
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from halimede.fetch.cache import sync
from halimede.fetch.download import check_space, full_disk_reported

HIDDEN = ".fetch"
"""A directory in the repository, ignored when models are listed: unfinished models, and records of finished ones."""

CONFIG = "config.pbtxt"


class FetchedRepository:
    """A repository directory that only this fetch writes to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hidden = root / HIDDEN
        (self.hidden / "records").mkdir(parents=True, exist_ok=True)
        for name in ("new", "old", "noting"):
            shutil.rmtree(self.hidden / name, ignore_errors=True)
            (self.hidden / name).mkdir()

    def make(
        self,
        name: str,
        files: Mapping[str, Path],
        *,
        config: bytes | None,
        versions: Collection[int] = (),
        link: bool = False,
    ) -> None:
        """Make a directory with these files by path, the configuration, and a directory for each version.

        `link` makes symbolic links to mounted files; else the files become the directory's own. NO_SPACE, OSError.
        """
        made = self.hidden / "new" / name
        with full_disk_reported(f"model '{name}'"):
            made.mkdir(parents=True)
            for version in versions:
                (made / str(version)).mkdir()
            if link:
                for path, source in files.items():
                    (made / path).parent.mkdir(parents=True, exist_ok=True)
                    (made / path).symlink_to(source)
            else:
                _own(made, files, name)
            if config is not None:
                (made / CONFIG).write_bytes(config)
                sync(made / CONFIG)
            for folder, _, _ in os.walk(made):
                sync(Path(folder))
            self._put(made, name)

    def _put(self, made: Path, name: str) -> None:
        target = self.root / name
        old = self.hidden / "old" / name
        if os.path.lexists(target):
            target.rename(old)
        made.rename(target)
        sync(self.root)
        shutil.rmtree(old, ignore_errors=True)

    def remove(self, name: str) -> None:
        """Remove a model from the repository, if it exists."""
        target = self.root / name
        self.forget(name)
        if os.path.lexists(target):
            old = self.hidden / "old" / name
            target.rename(old)
            shutil.rmtree(old, ignore_errors=True)

    def record(self, name: str) -> bytes | None:
        """The record of the model's directory; None if the directory does not exist or was not finished."""
        path = self.hidden / "records" / name
        return path.read_bytes() if path.is_file() and (self.root / name).is_dir() else None

    def note(self, name: str, record: bytes) -> None:
        path = self.hidden / "records" / name
        made = self.hidden / "noting" / name
        made.write_bytes(record)
        made.rename(path)

    def forget(self, name: str) -> None:
        """Delete the record, before the directory is changed: a record must never outlive the state it describes."""
        (self.hidden / "records" / name).unlink(missing_ok=True)


def _own(made: Path, files: Mapping[str, Path], name: str) -> None:
    to_copy: dict[str, Path] = {}
    for path, source in files.items():
        target = made / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError as error:
            # Another file system or mount, a file system without hard links, or a file of another user.
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            to_copy[path] = source
    check_space(made, sum(source.stat().st_size for source in to_copy.values()), f"a copy of model '{name}'")
    for path, source in to_copy.items():
        _copy(source, made / path)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as reading, target.open("xb") as writing:
        left = os.fstat(reading.fileno()).st_size
        try:
            # Shares blocks if the file system supports it.
            while left and (copied := os.copy_file_range(reading.fileno(), writing.fileno(), min(left, 1 << 30))):
                left -= copied
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                raise
            reading.seek(0)
            writing.seek(0)
            shutil.copyfileobj(reading, writing, 1 << 20)
        os.fsync(writing.fileno())
