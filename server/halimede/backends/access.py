"""Whether this process may read a file, and if not, what denies it."""

import os
import stat
from pathlib import Path

from halimede.core.repository.access import denial


def denied(path: Path) -> str | None:
    """Why a file cannot be read, or a directory cannot be listed or entered. None if it can be, or does not exist.

    The check tries to read, because a mode does not show capabilities, access control lists and SELinux rules. If
    several directories on the path deny access, the outermost is named.
    """
    path = Path(os.path.realpath(path))
    outermost, info = Path("/"), os.stat("/")
    for each in (*reversed(path.parents), path):
        try:
            found = os.stat(each)
        except PermissionError:
            return _denial(outermost, info)
        except OSError:
            return None
        outermost, info = each, found
    try:
        if stat.S_ISDIR(info.st_mode):
            with os.scandir(path):
                os.stat(f"{path}/.")
        elif stat.S_ISREG(info.st_mode):
            with open(path, "rb"):
                pass
    except PermissionError:
        return _denial(path, info)
    except OSError:
        return None
    return None


def _denial(path: Path, info: os.stat_result) -> str:
    return denial(
        str(path),
        is_directory=stat.S_ISDIR(info.st_mode),
        owner=info.st_uid,
        group=info.st_gid,
        mode=stat.S_IMODE(info.st_mode),
        user=os.geteuid(),
        groups={os.getegid(), *os.getgroups()},
    )


def repository_problem(root: Path) -> str | None:
    """Why a repository directory cannot be read, or None if it can."""
    if problem := denied(root):
        return f"repository '{root}' cannot be read: {problem}"
    return None if os.path.isdir(root) else f"repository path is not a valid directory: {root}"
