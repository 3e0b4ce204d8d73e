"""The error text for a file or folder that the server's user may not read."""

import shlex
from collections.abc import Collection


def denial(
    path: str, *, is_directory: bool, owner: int, group: int, mode: int, user: int, groups: Collection[int]
) -> str:
    """The error for a path that the server may not read: owner and mode, the server's user, and the command that helps.

    `user` and `groups` are the server's. The caller has tried to read the path.
    """
    if user == owner:
        who, bits = "u", mode >> 6
    elif group in groups:
        who, bits = "g", mode >> 3
    else:
        who, bits = "o", mode
    wanted = {"r": 4, "x": 1} if is_directory else {"r": 4}
    if any(not bits & bit for bit in wanted.values()):
        right = f"run `chmod {who}+{''.join(wanted)} {shlex.quote(path)}`"
        if who != "u":
            right += f", or run the server as user {owner}"
    else:
        right = (
            "its mode allows it, so an access control list, SELinux (mount the volume of a container with the option "
            "`:z`) or the file system forbids it"
        )
    listed = ", ".join(map(str, sorted(groups))) or "none"
    return (
        f"permission denied: '{path}' belongs to user {owner} and group {group} and has mode {mode & 0o7777:03o}; "
        f"the server runs as user {user}, groups {listed}; {right}"
    )
