"""A folder of containerd's with images unpacked, of which nodes get copies.

To unpack the server's and the operator's image takes a node twenty seconds of a processor. A copy of the folder takes
less than one, since its files are hard links where both are on one disk: containerd never changes a layer.
"""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.programs import cache
from cluster.spaces import LIMIT_S, eventually, run
from support.phases import only_one, phase

COPY_LIMIT_S = 600.0
CONFIG = """version = 2
root = "{root}"
state = "{scratch}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{scratch}/socket"
[plugins."io.containerd.gc.v1.scheduler"]
  startup_delay = "24h"
"""
"""Garbage is collected only when asked for. A collection during an import takes away what the new image has in common
with the image that it replaces."""


def copy_unpacked(archives: Sequence[Path], folder: Path) -> None:
    """Let the folder, which does not exist yet, be containerd's with the images of these archives."""
    whole = cache() / "unpacked"
    with only_one(cache() / "unpacked.lock", "unpacked images"):
        listed = whole / "archives"
        wanted = "\n".join(archive.name for archive in archives)
        if not listed.exists() or listed.read_text() != wanted:
            with phase("Unpacking images"):
                _unpack(archives, whole)
            listed.write_text(wanted)
        _copy(whole, folder)
    (folder / listed.name).unlink()


def _unpack(archives: Sequence[Path], whole: Path) -> None:
    """Into the folder; what other images have in common with these need not be unpacked again."""
    partial = whole.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    if whole.exists():
        _copy(whole, partial)
    with TemporaryDirectory() as scratch:
        config = Path(scratch) / "config.toml"
        config.write_text(CONFIG.format(root=partial, scratch=scratch))
        # In a namespace of mounts, so that none is left.
        with subprocess.Popen(
            ["unshare", "--mount", "containerd", "--config", config], stderr=subprocess.DEVNULL
        ) as server:
            try:
                client = ("ctr", "--namespace=k8s.io", f"--address={scratch}/socket")
                eventually(lambda: _serves(server, *client), "containerd")
                for archive in archives:
                    run(*client, "images", "import", archive, limit_s=COPY_LIMIT_S)
                # Collects garbage, which is images that were replaced.
                run(*client, "leases", "create", "--id=garbage")
                run(*client, "leases", "delete", "--sync", "garbage", limit_s=COPY_LIMIT_S)
            finally:
                server.terminate()
                server.wait(LIMIT_S)
    shutil.rmtree(whole, ignore_errors=True)
    partial.rename(whole)


def _serves(server: subprocess.Popen[bytes], *client: str) -> bool:
    assert server.poll() is None, f"containerd ended with {server.returncode}"
    return subprocess.run([*client, "version"], capture_output=True, check=False).returncode == 0


def _copy(whole: Path, folder: Path) -> None:
    is_one_disk = whole.stat().st_dev == folder.parent.stat().st_dev
    run("cp", "--archive", *(("--link",) if is_one_disk else ()), whole, folder, limit_s=COPY_LIMIT_S)
    for database in folder.glob("*/*.db"):
        copied = database.with_suffix(".copied")
        shutil.copyfile(database, copied)
        copied.replace(database)
