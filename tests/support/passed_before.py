"""Which tests passed before with the same inputs: all files of the project but those of other tests."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def record_of(root: Path, nodeid: str, others: Sequence[str] = ()) -> Path:
    """The file that says that the test passed with the files that git knows or would add, but those in `others`."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "."]
    done = subprocess.run(
        [*listed, *(f":!{other}" for other in others)], cwd=root, stdout=subprocess.PIPE, check=True, text=True
    )
    digest = hashlib.sha256(f"{sys.version} {nodeid}".encode())
    for name in sorted(set(done.stdout.split("\0"))):
        if (root / name).is_file():
            digest.update(f"\0{name} {hashlib.sha256((root / name).read_bytes()).hexdigest()}".encode())
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "halimede" / "passed" / digest.hexdigest()[:16]
