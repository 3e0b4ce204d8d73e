"""The process that holds a cluster's namespaces and removes the cluster: `python -m cluster.keeper STATE OWNER FIRST`.

The whole cluster runs in one process namespace, whose first process, the program FIRST, ends with this one. When it
ends, for any cause, the kernel kills all processes in the namespace and removes its mounts and network. This process
removes control groups and files, which the kernel keeps: at SIGTERM, or when the process OWNER (0: none) has ended.
"""

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # the package has no types

PATIENCE_S = 60.0
NS_GET_PARENT = 0xB702
"""The ioctl of a namespace that opens the one around it."""
NAMESPACES = ("--fork", "--kill-child", "--pid", "--mount", "--net", "--uts", "--mount-proc", "--propagation=private")


def clean_up(state: Path) -> None:
    """Remove what a cluster without processes has left."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            for group in control_groups(state.name):
                for folder, _, _ in os.walk(group, topdown=False):
                    os.rmdir(folder)
            if state.exists():
                shutil.rmtree(state)
        except OSError:
            # Busy, until the kernel is done with the last process; or somebody else cleans up too.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def control_groups(name: str) -> list[Path]:
    """The control groups by this name, in whichever hierarchies this machine has."""
    root = Path("/sys/fs/cgroup")
    return [*root.glob(f"*/{name}"), *root.glob(name)]


def wake_waiting(outer: int) -> None:
    """Continue stopped processes that wait for a child in the process namespace that `outer` made, or in one below it.

    The kernel ends a process namespace when each of its dead processes has been collected. `nsenter`, which collects the
    program that it started, stops itself when that program is stopped, so it never does. It lives outside the namespace:
    the kernel does not kill it.
    """
    try:
        space = os.stat(f"/proc/{outer}/ns/pid_for_children").st_ino
    except OSError:
        return  # it has ended
    if space == os.stat("/proc/self/ns/pid").st_ino:
        return  # it was killed before it made one
    for process in psutil.process_iter(["status"]):
        if process.info["status"] == psutil.STATUS_STOPPED and _starts_children_in(process.pid, space):
            with suppress(psutil.Error):
                process.resume()


def _starts_children_in(pid: int, space: int) -> bool:
    try:
        namespace = os.open(f"/proc/{pid}/ns/pid_for_children", os.O_RDONLY)
        while os.fstat(namespace).st_ino != space:
            inner = namespace
            try:
                namespace = fcntl.ioctl(inner, NS_GET_PARENT)
            finally:
                os.close(inner)
        os.close(namespace)
    except OSError:
        return False  # the process has ended, or there is no namespace around this one
    return True


def main() -> None:
    state, owner, first = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    outer = subprocess.Popen(["setpriv", "--pdeathsig=KILL", "unshare", *NAMESPACES, first])
    try:
        watched = [os.pidfd_open(outer.pid)]
        if owner:
            watched.append(os.pidfd_open(owner))
            if os.getppid() != owner:
                return
        # A process that sees the file can read all of it.
        (state / "keeper.early").write_text(f"{os.getpid()} {outer.pid}")
        (state / "keeper.early").rename(state / "keeper")
        select.select(watched, [], [])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # When the first process is gone, all others are: the kernel waits for them.
        for process in psutil.Process(outer.pid).children() or [outer]:
            process.kill()
        while outer.poll() is None:
            wake_waiting(outer.pid)
            time.sleep(0.1)
        clean_up(state)


if __name__ == "__main__":
    main()
