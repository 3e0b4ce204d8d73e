"""What a model's content is called: the digest that people can compute themselves, and the name of a listing. Pure."""

import hashlib
import re
from collections.abc import Iterable, Mapping

from halimede.fetch.tree import RemoteFile

PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


def digest_problem(text: str) -> str | None:
    return None if _DIGEST.fullmatch(text) else "right is sha256: and 64 of the digits 0 to 9 and a to f"


def folder_digest(hashes: Mapping[str, str]) -> str:
    """The digest of a folder, from the sha256 of each file by its path: that of what `sha256sum` prints for them.

    `cd model && find . -type f | sed 's,^\\./,,' | LC_ALL=C sort | xargs sha256sum | sha256sum` gives the same.
    """
    whole = hashlib.sha256()
    for path in sorted(hashes, key=str.encode):
        whole.update(f"{hashes[path]}  {path}\n".encode())
    return PREFIX + whole.hexdigest()


def listing_name(place: str, files: Iterable[RemoteFile]) -> str:
    """Names what a store lists at a place: another size or validator of any file is another name."""
    whole = hashlib.sha256(place.encode())
    for file in sorted(files, key=lambda each: each.path.encode()):
        # No path or validator has a zero byte in it, so that nothing else reads the same.
        whole.update(f"\0{file.path}\0{file.size}\0{file.validator}".encode())
    return whole.hexdigest()
