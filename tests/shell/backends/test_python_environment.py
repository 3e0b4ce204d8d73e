"""Execution environments: real ones made from a virtual environment, and small ones whose interpreter is a script."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from halimede.backends.python import environment
from halimede.backends.python.environment import Environment, default_cache, resolve_environment
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of

GOOD = "interpreter cpython 3 12\nnumpy 1.26.4"
VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"


def make_virtual(directory: Path) -> Path:
    """A virtual environment with copied files, so that it can be packed, and with this interpreter's numpy."""
    venv.create(directory, symlinks=False, with_pip=False)
    packages = directory / "lib" / VERSION / "site-packages"
    source = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (source / name).is_dir():
            shutil.copytree(
                source / name, packages / name, ignore=shutil.ignore_patterns("tests", "*.pyi", "*.h", "*.a")
            )
    return directory


def pack(directory: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(directory, arcname=".")
    return archive


def make_script(directory: Path, *, output: str = GOOD, code: int = 0, name: str = "python3") -> Path:
    """An environment whose interpreter prints this for every call."""
    interpreter = directory / "bin" / name
    interpreter.parent.mkdir(parents=True, exist_ok=True)
    interpreter.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
    interpreter.chmod(0o755)
    return directory


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_virtual(tmp_path_factory.mktemp("virtual") / "env")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "m"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def open_environments() -> Iterator[list[Environment]]:
    """Those that a test leaves open; they are closed after it."""
    left: list[Environment] = []
    yield left
    for each in left:
        each.close()


def refusal(text: str, model: Path, cache: Path) -> InferenceError:
    return error_of(resolve_environment, text, model, cache)


def answer(found: Environment, code: str) -> str:
    done = subprocess.run(
        [str(found.python), "-I", "-c", code],
        env={**os.environ, **found.environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_virtual_environment_is_used_in_place(virtual: Path, model: Path, cache: Path):
    (model / "env").symlink_to(virtual)
    found = resolve_environment("$$TRITON_MODEL_DIRECTORY/env", model, cache)
    assert found.python == virtual / "bin" / "python3"
    assert found.environment["VIRTUAL_ENV"] == str(virtual)
    assert found.environment["PATH"] == f"{virtual / 'bin'}:{os.environ['PATH']}"
    assert found.environment["LD_LIBRARY_PATH"].split(":")[0] == str(virtual / "lib")
    assert answer(found, "import numpy, sys; print(sys.prefix, numpy.__file__)") == (
        f"{virtual} {virtual}/lib/{VERSION}/site-packages/numpy/__init__.py"
    )
    assert not cache.exists()
    assert resolve_environment(f"{virtual}/bin/activate", model, cache) == found


def test_archive_is_unpacked_once_and_works_in_the_cache(virtual: Path, model: Path, cache: Path):
    pack(virtual, model / "env.tar.gz")
    found = resolve_environment("$$TRITON_MODEL_DIRECTORY/env.tar.gz", model, cache)
    assert found.python.is_relative_to(cache)
    prefix = answer(found, "import numpy, sys; print(sys.prefix, numpy.ones(3).sum())")
    assert prefix == f"{found.python.parents[1]} 3.0"

    (found.python.parents[1] / "mark").touch()
    again = resolve_environment(str(model / "env.tar.gz"), model, cache)
    assert again == found
    assert (again.python.parents[1] / "mark").exists()
    found.close()
    again.close()


def test_interpreter_that_is_not_executable_is_refused(tmp_path: Path, model: Path, cache: Path):
    root = make_script(tmp_path / "conda", name="python3")
    (root / "bin/python3").chmod(0o644)
    assert "its bin/python3 is not executable for the server's user" in refusal(str(root), model, cache).message


def test_conda_environment_is_recognized(tmp_path: Path, model: Path, cache: Path):
    root = make_script(tmp_path / "conda", name="python")
    found = resolve_environment(str(root), model, cache)
    assert found.python == root / "bin" / "python"
    assert found.environment["CONDA_PREFIX"] == str(root)
    assert "VIRTUAL_ENV" not in found.environment


ACTIVATE = """
prefix="$(dirname "$(dirname "${BASH_SOURCE[0]}")")"
if [ "$CONDA_PREFIX" = "$prefix" ]; then return 0; fi
export CONDA_PREFIX="$prefix"
PATH="$prefix/bin:$PATH"
for each in "$prefix"/etc/conda/activate.d/*.sh; do . "$each"; done
"""
"""What conda-pack writes."""


def make_conda(directory: Path, scripts: dict[str, str]) -> Path:
    """A conda environment, whose interpreter is this one, with these scripts in `activate.d`."""
    make_script(directory)
    (directory / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    activated = directory / "etc" / "conda" / "activate.d"
    activated.mkdir(parents=True)
    for name, text in scripts.items():
        (activated / name).write_text(text)
    return directory


EXPORTS = {
    "a.sh": 'echo "activating $CONDA_PREFIX"\nexport DATA_OF_A="$CONDA_PREFIX/share/a"\nhidden=1\n',
    "b.sh": 'export DATA_OF_B="$DATA_OF_A and b"\nexport PATH="/opt/b:$PATH" LD_LIBRARY_PATH=/opt/lib\nfalse\n',
    "c.fish": "set -x DATA_OF_C 1\n",
}


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_gets_what_the_scripts_of_a_conda_environment_export(
    tmp_path: Path, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
):
    monkeypatch.setenv("CONDA_PREFIX", "/elsewhere")
    root = make_conda(model / "conda", EXPORTS)
    text = "$$TRITON_MODEL_DIRECTORY/conda"
    if packed:
        (root / "bin" / "activate").write_text(ACTIVATE)
        pack(root, tmp_path / "conda.tar.gz")
        text = str(tmp_path / "conda.tar.gz")
    found = resolve_environment(text, model, cache)
    root = found.python.parents[1]
    assert root.is_relative_to(cache) is packed
    assert found.environment["DATA_OF_B"] == f"{root}/share/a and b"
    path = [str(root / "bin"), "/opt/b", *os.environ["PATH"].split(":")]
    assert found.environment == {
        "CONDA_PREFIX": str(root),
        "DATA_OF_A": f"{root}/share/a",
        "DATA_OF_B": f"{root}/share/a and b",
        "PATH": ":".join(path),
        "LD_LIBRARY_PATH": f"{root}/lib:/opt/lib",
    }
    found.close()


def test_scripts_may_print_much_and_leave_processes_behind(tmp_path: Path, model: Path, cache: Path):
    """Neither is a reason to refuse the environment, or to wait."""
    script = f"printf '%100000s' x\nsetsid sleep 20 & echo $! > {tmp_path}/left\nexport DATA=1\n"
    root = make_conda(tmp_path / "conda", {"a.sh": script})
    found = resolve_environment(str(root), model, cache)
    # Raises if the process has ended.
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert found.environment["DATA"] == "1"
    found.close()


def test_scripts_that_end_the_shell_are_named(tmp_path: Path, model: Path, cache: Path):
    root = make_conda(tmp_path / "conda", {"a.sh": 'echo "no licence in $CONDA_PREFIX"; exit 4\n'})
    assert refusal(str(root), model, cache).message == (
        f"the execution environment '{root}' cannot be used: its activate scripts failed (exit code 4): no licence in "
        f"{root}"
    )


def test_unpacked_environment_rewrites_paths_in_its_scripts(tmp_path: Path, model: Path, cache: Path):
    """As conda-unpack does: with the place that it is in when it runs, which must be the last one."""
    root = make_script(tmp_path / "conda")
    (root / "bin" / "python3").write_text(
        '#!/bin/sh\nif [ "${1##*/}" = conda-unpack ]; then . "$1"; exit; fi\n' + f"cat <<'END'\n{GOOD}\nEND\n"
    )
    (root / "bin" / "conda-unpack").write_text('echo "$CONDA_PREFIX" > "$CONDA_PREFIX/prefix"\n')
    pack(root, model / "env.tar.gz")
    found = resolve_environment(str(model / "env.tar.gz"), model, cache)
    assert (found.python.parents[1] / "prefix").read_text().strip() == str(found.python.parents[1])
    found.close()

    (root / "bin" / "conda-unpack").write_text('echo "cannot write $CONDA_PREFIX/x"; exit 3\n')
    pack(root, model / "env.tar.gz")
    error = refusal("$$TRITON_MODEL_DIRECTORY/env.tar.gz", model, cache)
    assert error == InferenceError(
        ErrorCode.INVALID_ARG,
        "the execution environment '$$TRITON_MODEL_DIRECTORY/env.tar.gz' cannot be used: its conda-unpack failed "
        "(exit code 3): cannot write $$TRITON_MODEL_DIRECTORY/env.tar.gz/x",
    )
    # The partial entry and the entry of the removed archive are gone; only lock files are left.
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("text", ["/nowhere/env", "$$TRITON_MODEL_DIRECTORY/env.tar.gz", "", "a\0b", "loop"])
def test_missing_path_is_named_as_configured(text: str, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(model)
    (model / "loop").symlink_to("loop")
    assert refusal(text, model, cache) == InferenceError(
        ErrorCode.INVALID_ARG, f"Failed to get the canonical path for {text}."
    )


NEEDED = "needed is CPython 3.10 or newer with numpy 1.21 or newer"


@pytest.mark.parametrize(
    ("output", "code", "problem"),
    [
        ("interpreter cpython 3 9\nnumpy 1.26.4", 0, f"its interpreter is cpython 3.9; {NEEDED}"),
        ("interpreter cpython 2 7", 1, f"its interpreter is cpython 2.7; {NEEDED}"),
        ("interpreter pypy 3 10\nnumpy 1.26.4", 0, f"its interpreter is pypy 3.10; {NEEDED}"),
        ("interpreter cpython 3 10\nnumpy 1.20.3", 0, f"its numpy is 1.20.3; {NEEDED}"),
        (
            "interpreter cpython 3 10\nModuleNotFoundError: No module named 'numpy'",
            1,
            f"its numpy cannot be imported: ModuleNotFoundError: No module named 'numpy'; {NEEDED}",
        ),
        ("interpreter cpython 3 10\nnumpy 2.0.0", 139, f"its numpy cannot be imported: numpy 2.0.0; {NEEDED}"),
        ("no such option: -I", 2, "its interpreter cannot be run (exit code 2): no such option: -I"),
        ("", 127, "its interpreter cannot be run (exit code 127): it printed nothing"),
        ("interpreter cpython x y", 0, "its interpreter cannot be run (exit code 0): interpreter cpython x y"),
        ("x" * 2_000_000, 0, f"its interpreter cannot be run (exit code -9): {'x' * 500}"),
    ],
)
def test_unusable_interpreter_fails_the_load(output: str, code: int, problem: str, model: Path, cache: Path):
    make_script(model / "env", output=output, code=code)
    error = refusal("$$TRITON_MODEL_DIRECTORY/env", model, cache)
    assert error.code is ErrorCode.INVALID_ARG
    assert error.message == f"the execution environment '$$TRITON_MODEL_DIRECTORY/env' cannot be used: {problem}"


@pytest.mark.parametrize(
    "output", ["interpreter cpython 3 10\nnumpy 1.21.0", "a banner\ninterpreter cpython 4 0\nnumpy 3.0rc1"]
)
def test_oldest_and_newest_supported_python_are_accepted(output: str, model: Path, cache: Path):
    make_script(model / "env", output=output)
    assert resolve_environment(str(model / "env"), model, cache).python == model / "env" / "bin" / "python3"


def test_hanging_interpreter_is_killed_with_its_children(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    make_script(model / "env")
    (model / "env" / "bin" / "python3").write_text("#!/bin/sh\nsleep 300 &\nsleep 300\n")
    monkeypatch.setattr(environment, "CHECK_SECONDS", 0.3)
    assert "its interpreter cannot be run (exit code -9)" in refusal(str(model / "env"), model, cache).message


def test_an_archive_that_changes_while_it_is_unpacked_is_refused(model: Path, cache: Path):
    root = make_script(model / "env")
    (root / "bin" / "conda-unpack").touch()
    (root / "bin" / "python3").write_text(f"#!/bin/sh\necho >> {model}/env.tar.gz\n")
    pack(root, model / "env.tar.gz")
    assert refusal(str(model / "env.tar.gz"), model, cache).message.endswith("it changed while it was unpacked")


def test_folder_without_a_working_interpreter_is_refused(model: Path, cache: Path):
    assert "it has no bin/python3; expected a virtual environment" in refusal(str(model), model, cache).message
    make_script(model / "env")
    (model / "env" / "bin" / "python3").write_bytes(b"\x7fELF")
    assert "its interpreter cannot be started: Exec format error" in refusal(str(model / "env"), model, cache).message


def test_invalid_or_escaping_archive_leaves_nothing(model: Path, cache: Path):
    (model / "env.tar.gz").write_text("hello")
    assert refusal("$$TRITON_MODEL_DIRECTORY/env.tar.gz", model, cache).message.startswith(
        "the execution environment '$$TRITON_MODEL_DIRECTORY/env.tar.gz' cannot be used: it is damaged or not a tar.gz: "
    )
    make_script(model / "env")
    (model / "env" / "evil").symlink_to("/etc/passwd")
    pack(model / "env", model / "env.tar.gz")
    assert (
        "'./evil' is a link to '/etc/passwd', which leads out of it"
        in refusal(str(model / "env.tar.gz"), model, cache).message
    )
    assert [path.name for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_many_loads_share_one_unpacking(model: Path, cache: Path, open_environments: list[Environment]):
    """The interpreter's check and the unpacking of all of them run at once; one entry comes of it."""
    make_script(model / "env")
    (model / "env" / "bin" / "conda-unpack").touch()
    log = model / "unpacked"
    (model / "env" / "bin" / "python3").write_text(
        f'#!/bin/sh\n[ "${{1##*/}}" = conda-unpack ] && echo x >> {log}\n' + f"cat <<'END'\n{GOOD}\nEND\n"
    )
    pack(model / "env", model / "env.tar.gz")
    threads = [
        threading.Thread(
            target=lambda: open_environments.append(resolve_environment(str(model / "env.tar.gz"), model, cache))
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(open_environments) == 6
    assert len({each.python for each in open_environments}) == 1
    assert log.read_text() == "x\n"


def test_waiting_load_does_not_wait_for_running_users(model: Path, cache: Path, open_environments: list[Environment]):
    """It saw the entry unfinished, and before it asked for the lock another load finished and began to use it."""
    make_script(model / "env")
    pack(model / "env", model / "env.tar.gz")
    made = resolve_environment(str(model / "env.tar.gz"), model, cache)
    made.close()
    assert made.entry is not None
    ready, unfinished = made.entry / environment.READY, made.entry / "unfinished"
    ready.rename(unfinished)
    user = os.open(made.entry.with_suffix(".lock"), os.O_RDWR)
    try:
        fcntl.flock(user, fcntl.LOCK_SH)
        load = threading.Thread(
            target=lambda: open_environments.append(resolve_environment(str(model / "env.tar.gz"), model, cache)),
            daemon=True,
        )
        load.start()
        load.join(0.3)  # in which it looks, and asks for the lock
        assert load.is_alive()
        unfinished.rename(ready)
        load.join(20)
        assert len(open_environments) == 1
    finally:
        os.close(user)


def test_unpacking_of_a_killed_server_is_restarted(model: Path, cache: Path):
    make_script(model / "env")
    pack(model / "env", model / "env.tar.gz")
    found = resolve_environment(str(model / "env.tar.gz"), model, cache)
    found.close()
    entry = found.python.parents[2]
    (entry / "ready").unlink()
    (entry / "env" / "bin" / "python3").write_text("half a pro")
    (entry / "env" / "left").touch()

    again = resolve_environment(str(model / "env.tar.gz"), model, cache)
    assert (again, (entry / "env" / "left").exists()) == (found, False)
    again.close()


def test_unused_entry_of_a_changed_archive_is_removed(model: Path, cache: Path):
    def changed(number: int) -> Environment:
        make_script(model / "env", output=f"{number}\n{GOOD}")
        pack(model / "env", model / "env.tar.gz")
        return resolve_environment(str(model / "env.tar.gz"), model, cache)

    def entries() -> set[Path]:
        return {path for path in cache.iterdir() if path.is_dir()}

    def entry(of: Environment) -> Path:
        return of.python.parents[2]

    first, second = changed(1), changed(2)
    assert entries() == {entry(first), entry(second)}
    first.close()
    third = changed(3)
    assert entries() == {entry(second), entry(third)}
    second.close()
    third.close()
    (model / "env.tar.gz").rename(model / "other.tar.gz")
    other = resolve_environment(str(model / "other.tar.gz"), model, cache)
    assert entries() == {entry(other)}
    assert {path.stem for path in cache.glob("*.lock")} == {entry(other).name}
    other.close()


def test_an_entry_in_use_by_another_server_is_kept(model: Path, cache: Path):
    make_script(model / "env")
    pack(model / "env", model / "env.tar.gz")
    mine = resolve_environment(str(model / "env.tar.gz"), model, cache)
    mine.close()
    entry = mine.python.parents[2]
    (model / "env.tar.gz").rename(model / "other.tar.gz")
    with (cache / f"{entry.name}.lock").open() as theirs:
        fcntl.flock(theirs, fcntl.LOCK_SH)
        resolve_environment(str(model / "other.tar.gz"), model, cache).close()
        assert entry.is_dir()


def test_a_use_ends_with_its_last_close(model: Path, cache: Path):
    make_script(model / "env")
    pack(model / "env", model / "env.tar.gz")
    one = resolve_environment(str(model / "env.tar.gz"), model, cache)
    two = resolve_environment(str(model / "env.tar.gz"), model, cache)
    lock = cache / f"{one.python.parents[2].name}.lock"

    def is_free() -> bool:
        with lock.open() as descriptor:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    one.close()
    assert not is_free()
    two.close()
    assert is_free()


def test_error_of_an_uncreatable_cache_hides_its_path(model: Path, tmp_path: Path):
    make_script(model / "env")
    pack(model / "env", model / "env.tar.gz")
    (tmp_path / "file").touch()
    error = refusal("$$TRITON_MODEL_DIRECTORY/env.tar.gz", model, tmp_path / "file" / "cache")
    assert error == InferenceError(
        ErrorCode.INTERNAL,
        "the execution environment '$$TRITON_MODEL_DIRECTORY/env.tar.gz' cannot be unpacked: Not a directory; set "
        "TMPDIR to another folder",
    )


def test_cache_writable_by_other_users_is_refused(model: Path, cache: Path, tmp_path: Path):
    make_script(model / "env")
    pack(model / "env", model / "env.tar.gz")
    cache.mkdir()
    cache.chmod(0o777)
    assert "other users may write to it" in refusal(str(model / "env.tar.gz"), model, cache).message
    (tmp_path / "link").symlink_to(model)
    assert "belongs to another user" in refusal(str(model / "env.tar.gz"), model, tmp_path / "link").message


def test_cache_is_a_user_directory_for_temporary_files(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert default_cache() == tmp_path / f"halimede-environments-{os.geteuid()}"
    make_script(model / "env")
    pack(model / "env", model / "env.tar.gz")
    resolve_environment(str(model / "env.tar.gz"), model, default_cache()).close()
    assert default_cache().stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("TMPDIR")
    assert default_cache().parent == Path("/tmp")
