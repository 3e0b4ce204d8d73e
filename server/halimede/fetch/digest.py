"""Names of a model's content: the digest that users can compute themselves, and the name of a listing. Pure."""

import hashlib
from collections.abc import Iterable, Mapping

from halimede.fetch.tree import RemoteFile

PREFIX = "sha256:"


def folder_digest(hashes: Mapping[str, str]) -> str:
    """The digest of a directory, from the sha256 of each file by its path: the sha256 of `sha256sum`'s output for them.

    `cd model && find . -type f | sed 's,^\\./,,' | LC_ALL=C sort | xargs sha256sum | sha256sum` gives the same.
    """
    whole = hashlib.sha256()
    for path in sorted(hashes, key=str.encode):
        whole.update(f"{hashes[path]}  {path}\n".encode())
    return PREFIX + whole.hexdigest()


def listing_name(location: str, files: Iterable[RemoteFile]) -> str:
    """A name for what a store lists at a location: if any file's size or validator differs, so does the name."""
    whole = hashlib.sha256(location.encode())
    for file in sorted(files, key=lambda each: each.path.encode()):
        # No path or validator contains a zero byte, so different listings cannot give the same text.
        whole.update(f"\0{file.path}\0{file.size}\0{file.validator}".encode())
    return whole.hexdigest()
