"""What to say of a file or folder that the server's user may not read."""

import shlex
from collections.abc import Collection


def denial(
    path: str, *, is_directory: bool, owner: int, group: int, mode: int, user: int, groups: Collection[int]
) -> str:
    """Whose it is, who asked, and the command that lets the server in.

    `user` and `groups` are those of the server, who is known to have been refused.
    """
    if user == owner:
        who, bits = "u", mode >> 6
    elif group in groups:
        who, bits = "g", mode >> 3
    else:
        who, bits = "o", mode
    wanted = {"r": 4, "x": 1} if is_directory else {"r": 4}
    if any(not bits & bit for bit in wanted.values()):
        right = f"right is `chmod {who}+{''.join(wanted)} {shlex.quote(path)}`"
        if who != "u":
            right += f", or a server that runs as user {owner}"
    else:
        right = (
            "its mode allows it, so an access control list, SELinux (a volume of a container wants the option `:z`) "
            "or the file system forbids it"
        )
    listed = ", ".join(map(str, sorted(groups))) or "none"
    return (
        f"permission denied: '{path}' belongs to user {owner} and group {group} and has mode {mode & 0o7777:03o}; "
        f"the server runs as user {user}, groups {listed}; {right}"
    )
