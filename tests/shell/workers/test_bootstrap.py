"""The code in a worker's process needs no installed package of the server and runs in other versions of Python."""

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import halimede
from halimede.core.restarts import ProcessExit
from halimede.processes import bootstrap
from support.workers import FOLDER, Crew, printed

PACKAGE = Path(halimede.__file__).parent
OLDEST = (3, 10)
VERSION = "import sys; print(*sys.version_info[:2])"


@cache
def other_interpreters() -> dict[str, str]:
    """Other versions from 3.10 on that this machine has, with their paths."""
    names = [shutil.which(f"python3.{minor}") or "" for minor in range(OLDEST[1], 20)]
    managed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions").glob("3.*/bin/python3")
    found = {}
    for path in [*names, *map(str, sorted(managed))]:
        if not path:
            continue
        done = subprocess.run([path, "-c", VERSION], capture_output=True, check=False, text=True, timeout=60)
        version = tuple(int(part) for part in done.stdout.split())
        if version >= OLDEST and version != sys.version_info[:2]:
            found[f"{version[0]}.{version[1]}"] = path
    return found


@pytest.mark.parametrize("minor", range(OLDEST[1], 16))
def test_a_worker_runs_in_another_version_of_python(crew: Crew, minor: int):
    python = other_interpreters().get(f"3.{minor}")
    if python is None:
        pytest.skip(f"this machine has no other CPython 3.{minor}")

    worker = crew.talk(python=python)

    assert worker.ask("list(__import__('sys').version_info[:2])") == [3, minor]
    # Only the source tree is importable, not the server's installed packages.
    assert worker.ask("__import__('halimede.workers.host').__path__") == [str(PACKAGE)]
    assert worker.ask("__import__('halimede.processes.bootstrap').processes.bootstrap.PATH") == bootstrap.PATH
    assert worker.ask("[p for p in __import__('sys').path if 'site-packages' in p and sys.prefix not in p]"
                      " if (sys := __import__('sys')) else 0") == []  # fmt: skip
    assert worker.end() == ProcessExit(code=0)
    assert printed(worker.process) == ""


def test_a_worker_imports_from_pythonpath_but_not_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_crew: Crew
):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for name in ("json", "atexit", "halimede", "talkative", "socket"):
        (here / f"{name}.py").write_text("raise RuntimeError('imported by accident')")
    (there / "of_the_user.py").write_text("value = 7")
    monkeypatch.chdir(here)

    path = {"PYTHONPATH": os.pathsep.join([FOLDER, str(there)])}
    worker = own_crew.talk(python=sys.executable, environment=path, working_directory=str(here))

    assert worker.ask("__import__('of_the_user').value") == 7
    path_ = worker.ask("__import__('sys').path")
    assert path_[:2] == [FOLDER, str(there)]
    assert not {"", ".", str(here), str(Path(bootstrap.PATH).parent)} & set(path_)
    assert own_crew.talk(working_directory=str(here)).ask("__import__('json').dumps(1)") == "1"


def test_processes_of_a_worker_do_not_import_its_bootstrap(crew: Crew):
    worker = crew.talk(python=sys.executable)

    assert worker.ask(
        """
import multiprocessing
with multiprocessing.get_context("spawn").Pool(1) as pool:
    answer = pool.map(len, ["one", "four"])
"""
    ) == [3, 4]


def test_the_childs_code_needs_only_the_standard_library_and_numpy(crew: Crew):
    loaded = crew.talk().ask("[[name, getattr(m, '__file__', None)] for name, m in __import__('sys').modules.items()]")

    packages = {name.partition(".")[0] for name, _ in loaded} - set(sys.stdlib_module_names)
    # The distribution's own hooks (`_virtualenv`, `__editable__…`) are loaded by every interpreter of this environment.
    plain = subprocess.check_output([sys.executable, "-c", "import sys; print(*sys.modules)"], text=True).split()
    assert packages - set(plain) == {"numpy", "halimede", "talkative"}

    own_files = [Path(file) for name, file in loaded if name.startswith("halimede.") and file]
    assert PACKAGE / "workers" / "host" / "main.py" in own_files
    of_processes = [PACKAGE / "processes" / name for name in ("blas.py", "bootstrap.py", "zygote.py")]
    for file in {*own_files, *(PACKAGE / "workers" / "host").glob("*.py"), *of_processes}:
        ast.parse(file.read_text(), str(file), feature_version=OLDEST)
