"""The environments of python models (`EXECUTION_ENV_PATH`): their interpreter and its variables.

A path names a directory (a virtual environment, or a conda environment), the `bin/activate` in one, or a tar.gz made by
conda-pack. An archive is unpacked once into a cache with an entry per path, inode, size and modification time, which
loads and servers of the same user share. An entry is complete if it has a `ready` file. Locks on `<entry>.lock` guard
it: shared while processes run in it, exclusive to unpack or remove it; they end with their processes. When another
archive is unpacked, an entry is removed if its archive is gone or has changed and no process runs in it.

As in Triton, bash reads the environment's `bin/activate`, which in a conda environment also reads the scripts in
`etc/conda/activate.d`, and the model gets the variables that they export. Without `bin/activate`, bash reads those
scripts alone.
"""

import fcntl
import json
import logging
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from halimede.backends.access import denied
from halimede.backends.python import unpack
from halimede.core.types import InferenceError
from halimede.core.types.error import clip, internal, invalid

log = logging.getLogger(__name__)

PARAMETER = "EXECUTION_ENV_PATH"
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

OLDEST_PYTHON = (3, 10)
OLDEST_NUMPY = (1, 21)

LOCK_PAUSE_SECS = 0.02
UNPACK_SECONDS = 3600.0
PREFIX_SECONDS = 600.0
CHECK_SECONDS = 60.0
OUTPUT_BYTES = 1 << 20
"""A process that prints so much is killed."""
SHOWN_CHARACTERS = 500

READY = "ready"
# The names begin with an underscore, and there are no arguments, because a script that bash reads sees both.
ACTIVATE = """
_result=$1 _python=$2; shift 2; _scripts=("$@"); set --
for _script in "${_scripts[@]}"; do . "$_script"; done
exec "$_python" -I -c 'import json, os, sys; json.dump(dict(os.environ), os.fdopen(int(sys.argv[1]), "w"))' "$_result"
"""
OF_SHELLS = ("OLDPWD", "PS1", "PWD", "SHLVL")
CHECK = """
import sys
print('interpreter', sys.implementation.name, sys.version_info[0], sys.version_info[1])
import numpy
print('numpy', numpy.__version__)
"""
INTERPRETER = re.compile(r"^interpreter (\w{1,32}) (\d{1,3}) (\d{1,3})$", re.MULTILINE | re.ASCII)
NUMPY = re.compile(r"^numpy ((\d{1,4})\.(\d{1,4})\S{0,32})$", re.MULTILINE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Environment:
    """`environment` are variables that override the server's own. Processes in it must end before `close`."""

    python: Path
    environment: Mapping[str, str]
    entry: Path | None = None
    """Its entry in the cache, if it was unpacked."""

    def close(self) -> None:
        """Let the cache remove it. Called once; without the call it stays for the lifetime of this process."""
        if self.entry is not None:
            LEASES.give_back(self.entry)


class Leases:
    """The shared locks of this process on cache entries: one descriptor each, with a count of its users."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: dict[Path, tuple[int, int]] = {}
        """Descriptor and number of users by entry."""

    def take(self, entry: Path, descriptor: int) -> None:
        """Count one more user; takes ownership of the lock's descriptor."""
        with self._guard:
            mine, uses = self._held.get(entry, (descriptor, 0))
            self._held[entry] = (mine, uses + 1)
        if mine != descriptor:
            os.close(descriptor)

    def give_back(self, entry: Path) -> None:
        with self._guard:
            mine, uses = self._held.pop(entry)
            if uses > 1:
                self._held[entry] = (mine, uses - 1)
                return
        os.close(mine)


LEASES = Leases()


def default_cache() -> Path:
    """Where archives are unpacked: a directory of this user in TMPDIR, else in /tmp."""
    # One level, because in a world-writable sticky directory users cannot rename what they do not own.
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"halimede-environments-{os.geteuid()}"  # noqa: S108


def resolve_environment(path_text: str, model_directory: Path, cache: Path) -> Environment:
    """The environment that a model's configuration names, unpacked and tested; this may take minutes.

    INVALID_ARG if it cannot be used, INTERNAL if it cannot be unpacked here. Messages call it `path_text`.
    """
    try:
        if not path_text:
            raise ValueError("the path is empty")
        given = Path(path_text.replace(MODEL_DIRECTORY, str(model_directory)))
        if problem := denied(given):
            raise _wrong(path_text, problem)
        path = given.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise invalid(f"Failed to get the canonical path for {clip(path_text)}.") from error
    entry = None
    if path.is_dir():
        root = path
    elif path.name == "activate":
        root = path.parent.parent
    else:
        entry = _unpacked(path, path_text, cache)
        root = entry / "env"
    try:
        python = _interpreter(root, path_text)
        variables = _variables(root, _activated(root, python, path_text))
        _check(python, root, variables, path_text)
    except BaseException:
        if entry is not None:
            LEASES.give_back(entry)
        raise
    return Environment(python, variables, entry)


def _interpreter(root: Path, text: str) -> Path:
    for name in ("python3", "python"):
        path = root / "bin" / name
        if path.is_file():
            if os.access(path, os.X_OK):
                return path
            if os.statvfs(path).f_flag & os.ST_NOEXEC:
                problem = f"'{root}' is on a file system that is mounted noexec, so its interpreter cannot run"
                raise _wrong(text, f"{problem}; mount it with exec, or set TMPDIR to another place for archives")
            raise _wrong(text, f"its bin/{name} is not executable for the server's user")
    raise _wrong(text, "it has no bin/python3; expected a virtual environment, or what conda-pack makes of one")


def _variables(root: Path, exported: Mapping[str, str]) -> dict[str, str]:
    """The variables of the environment. `exported` are those that its scripts have set."""

    def before(name: str, path: Path) -> str:
        others = exported.get(name, os.environ.get(name, ""))
        return os.pathsep.join([str(path), *(each for each in others.split(os.pathsep) if each not in ("", str(path)))])

    return {
        **exported,
        "PATH": before("PATH", root / "bin"),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", root / "lib"),
        _prefix_name(root): str(root),
    }


def _prefix_name(root: Path) -> str:
    return "VIRTUAL_ENV" if (root / "pyvenv.cfg").is_file() else "CONDA_PREFIX"


def _activated(root: Path, python: Path, text: str) -> dict[str, str]:
    """The variables that the environment's scripts export. INVALID_ARG if they end the shell."""
    activate = root / "bin" / "activate"
    scripts = [activate] if activate.is_file() else sorted((root / "etc" / "conda" / "activate.d").glob("*.sh"))
    if not scripts:
        return {}
    bash = shutil.which("bash")
    if bash is None:
        log.warning("the execution environment '%s' is not activated: there is no bash to read its scripts", clip(text))
        return {}
    # What conda-pack writes as `activate` does nothing if this variable is set, and other scripts need it.
    prefix = {} if scripts == [activate] else {_prefix_name(root): str(root)}
    given = {name: value for name, value in os.environ.items() if name != "CONDA_PREFIX"} | prefix
    with os.fdopen(os.memfd_create("environment"), "rb") as result:
        number = result.fileno()
        command = [bash, "--noprofile", "--norc", "-c", ACTIVATE, "bash", str(number), str(python), *map(str, scripts)]
        code, output = _run(command, given, CHECK_SECONDS, keep=(number,), whole=True)
        result.seek(0)
        written = result.read()
    try:
        found: dict[str, str] = json.loads(written)
    except ValueError as error:
        shown = _tail(output, root, text)
        raise _wrong(text, f"its activate scripts failed (exit code {code}): {shown}") from error
    return {
        name: value
        for name, value in found.items()
        if given.get(name) != value and not name.startswith("_") and name not in OF_SHELLS
    }


def _check(python: Path, root: Path, variables: Mapping[str, str], text: str) -> None:
    """Test the interpreter, so that an error is reported by the load and not by a worker that dies."""
    try:
        code, output = _run([str(python), "-I", "-c", CHECK], variables, CHECK_SECONDS)
    except OSError as error:
        raise _wrong(text, f"its interpreter cannot be started: {error.strerror}") from error
    needed = "needed is CPython {}.{} or newer with numpy {}.{} or newer".format(*OLDEST_PYTHON, *OLDEST_NUMPY)
    found = INTERPRETER.search(output)
    if found is None:
        raise _wrong(text, f"its interpreter cannot be run (exit code {code}): {_tail(output, root, text)}")
    name, major, minor = found[1], int(found[2]), int(found[3])
    if name != "cpython" or (major, minor) < OLDEST_PYTHON:
        raise _wrong(text, f"its interpreter is {name} {major}.{minor}; {needed}")
    numpy = NUMPY.search(output)
    if numpy is None or code:
        raise _wrong(text, f"its numpy cannot be imported: {_tail(output, root, text)}; {needed}")
    if (int(numpy[2]), int(numpy[3])) < OLDEST_NUMPY:
        raise _wrong(text, f"its numpy is {numpy[1]}; {needed}")


def _tail(output: str, root: Path, text: str) -> str:
    """The last line of the output, with the environment's path replaced by the user's text for it."""
    lines = [line for line in output.replace(str(root), text).splitlines() if line.strip()]
    return lines[-1].strip()[:SHOWN_CHARACTERS] if lines else "it printed nothing"


def _unpacked(archive: Path, text: str, cache: Path) -> Path:
    """The archive's entry in the cache, locked; unpacks the archive if there is no entry."""
    identity = _identity(archive)
    if identity is None:
        raise _wrong(text, "it is neither a folder nor a tar.gz")
    key = sha256(json.dumps(identity).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    entry, lock = cache / key, cache / f"{key}.lock"
    try:
        _make_cache(cache)
        while True:
            descriptor = _open_lock(lock)
            if (entry / READY).is_file():
                LEASES.take(entry, descriptor)
                return entry
            try:
                # Do not block here: a process that has just unpacked it holds the shared lock as long as it uses it.
                # If another process is still unpacking it, the next round blocks on the shared lock.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_linked(descriptor, lock) and not (entry / READY).is_file():
                    _remove_stale(cache, key)
                    _unpack(archive, text, entry, identity, descriptor)
            except BlockingIOError:
                time.sleep(LOCK_PAUSE_SECS)
            finally:
                os.close(descriptor)
    except OSError as error:
        log.exception("the execution environment '%s' cannot be unpacked in '%s'", text, cache)
        raise _no_directory(text, error.strerror or type(error).__name__) from error


def _unpack(archive: Path, text: str, entry: Path, identity: Sequence[object], lock: int) -> None:
    log.info("Extracting Python execution env %s", archive)
    shutil.rmtree(entry, ignore_errors=True)
    root = entry / "env"
    root.mkdir(parents=True)
    try:
        # The child holds the lock too: if this process is killed, no other process unpacks at the same time.
        command = [sys.executable, "-I", str(unpack.__file__), str(archive), str(root)]
        code, output = _run(command, {}, UNPACK_SECONDS, keep=(lock,))
        if code == unpack.ARCHIVE_AT_FAULT:
            raise _wrong(text, _tail(output, root, text))
        if code:
            raise _no_directory(text, _tail(output, root, text) if code > 0 else "it took too long or was killed")
        if (root / "bin" / "conda-unpack").is_file():
            _set_prefix(root, text)
        if _identity(archive) != identity:
            raise _wrong(text, "it changed while it was unpacked")
        (entry / f"{READY}.new").write_text(json.dumps(identity))
        (entry / f"{READY}.new").rename(entry / READY)
    except BaseException:
        shutil.rmtree(entry, ignore_errors=True)
        raise


def _set_prefix(root: Path, text: str) -> None:
    """Let the environment write its new path into its scripts, which have the path where it was packed."""
    command = [str(_interpreter(root, text)), str(root / "bin" / "conda-unpack")]
    code, output = _run(command, _variables(root, {}), PREFIX_SECONDS)
    if code:
        raise _wrong(text, f"its conda-unpack failed (exit code {code}): {_tail(output, root, text)}")


def _remove_stale(cache: Path, mine: str) -> None:
    for lock in cache.glob("*.lock"):
        if lock.stem == mine or _is_current(cache / lock.stem):
            continue
        # An entry that cannot be removed now (in use, or being removed) is tried again the next time.
        with suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_linked(descriptor, lock) and not _is_current(cache / lock.stem):
                    shutil.rmtree(cache / lock.stem, ignore_errors=True)
                    lock.unlink()
            finally:
                os.close(descriptor)


def _is_current(entry: Path) -> bool:
    """Whether the entry is complete and its archive unchanged."""
    try:
        identity = json.loads((entry / READY).read_text())
        return bool(identity == _identity(Path(identity[0])))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _identity(archive: Path) -> list[str | int] | None:
    """The identity of a file's content; None if there is no such file."""
    try:
        found = os.stat(archive)
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return [str(archive), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns]


def _make_cache(cache: Path) -> None:
    with suppress(FileExistsError):
        cache.mkdir(mode=0o700)
    found = cache.lstat()
    # Else other users could put their own interpreter into it.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(0, "the folder for it belongs to another user, or other users may write to it")


def _open_lock(path: Path) -> int:
    """A descriptor of the lock file with a shared lock; retried if the file was removed meanwhile."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_linked(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_linked(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _run(
    command: Sequence[str],
    variables: Mapping[str, str],
    seconds: float,
    keep: tuple[int, ...] = (),
    *,
    whole: bool = False,
) -> tuple[int, str]:
    """Exit code and the beginning of the output; all of its processes are killed if it takes too long.

    `variables` override the server's own, or are all there are if they are the `whole` environment.
    """
    with subprocess.Popen(  # noqa: S603  # the interpreter that the model's configuration names
        command,
        env=variables if whole else {**os.environ, **variables},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=keep,
        start_new_session=True,
    ) as process:

        def kill() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            output = _output(process)
            if len(output) >= OUTPUT_BYTES:
                kill()
            code = process.wait()
        except BaseException:
            kill()
            raise
        finally:
            timer.cancel()
    return code, output.decode("utf-8", "replace")


def _output(process: subprocess.Popen[bytes]) -> bytes:
    """What the process prints. Processes that it leaves behind may have its output open, and are not waited for."""
    assert process.stdout is not None  # noqa: S101  # asked for by the caller
    printed, output = process.stdout.fileno(), bytearray()
    end = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(printed)
        poll.register(end)
        while len(output) < OUTPUT_BYTES:
            ready = dict(poll.poll())
            if printed not in ready:
                break  # it has ended, and everything is read
            piece = os.read(printed, 1 << 16)
            if not piece:
                break
            output += piece
    finally:
        os.close(end)
    return bytes(output)


def _wrong(text: str, what: str) -> InferenceError:
    return invalid(f"the execution environment '{clip(text)}' cannot be used: {what}")


def _no_directory(text: str, what: str) -> InferenceError:
    return internal(
        f"the execution environment '{clip(text)}' cannot be unpacked: {what}; set TMPDIR to another folder"
    )
