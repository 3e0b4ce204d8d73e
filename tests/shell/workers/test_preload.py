"""Workers whose zygote has imported a runtime that takes long to import."""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec

import psutil
import pytest

from halimede.processes.launcher import Launcher
from support.server import wait_until
from support.workers import FOLDER, Crew, Talk, is_alive

RUNTIME = """
import os
calls = []
def load():
    calls.append(os.getpid())
def fail():
    os.write(2, b"it is broken")
    raise SystemExit(3)
"""
LOADED_BY = "__import__('sys').modules['slow_runtime'].calls"
PARENT = "__import__('os').getppid()"
MIB = 1 << 20
IMPORT_LIMIT_S = 300.0


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "slow_runtime.py").write_text(RUNTIME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([FOLDER, str(folder)]))
        made = Launcher()
        yield made
        made.close()


@pytest.fixture
def own_crew(launcher: Launcher) -> Iterator[Crew]:
    """With a launcher of its own, in the environment of the other one."""
    with Crew() as crew:
        yield crew


def test_workers_get_the_runtime_that_their_zygote_has_loaded(crew: Crew) -> None:
    workers = [crew.talk(preload="slow_runtime:load") for _ in range(2)]
    parents = {each.ask(PARENT) for each in workers}
    assert len(parents) == 1
    assert [each.ask(LOADED_BY) for each in workers] == [[*parents]] * 2
    assert not [name for name in workers[0].ask("list(__import__('os').environ)") if "PRELOAD" in name]


def test_other_workers_have_another_zygote(crew: Crew) -> None:
    runtime, plain = crew.talk(preload="slow_runtime:load"), crew.talk()
    assert runtime.ask(PARENT) != plain.ask(PARENT) == crew.zygote
    assert plain.ask("'slow_runtime' in __import__('sys').modules") is False


@pytest.mark.parametrize("preload", ["slow_runtime:fail", "no_such_module:load", "slow_runtime", "slow_runtime:absent"])
def test_a_runtime_that_cannot_be_loaded_leaves_workers_as_they_are(
    crew: Crew, preload: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert crew.talk(preload=preload).ask("1 + 1") == 2
    assert capfd.readouterr().err == ""


def test_a_zygote_that_died_is_replaced_by_one_with_the_runtime(own_crew: Crew) -> None:
    worker = own_crew.talk(preload="slow_runtime:load")
    zygote = worker.ask(PARENT)
    os.kill(zygote, signal.SIGKILL)
    wait_until(lambda: not is_alive(zygote), "the end of the zygote")
    again = own_crew.talk(preload="slow_runtime:load")
    assert again.ask(LOADED_BY) == [again.ask(PARENT)] != [zygote]


def test_all_zygotes_end_with_the_launcher(own_crew: Crew) -> None:
    zygotes = [own_crew.talk(preload=preload).ask(PARENT) for preload in ("slow_runtime:load", "")]
    own_crew.launcher.close()
    assert [is_alive(pid) for pid in zygotes] == [False, False]


# `conformance` has the same for servers with models of these frameworks.
@pytest.mark.large
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "preload"),
    [
        ("torch", "halimede.backends.pytorch.runtime:runtime"),
        ("torch", "halimede.backends.pytorch.runtime:export_runtime"),
        ("tensorflow", "halimede.backends.tensorflow.session:runtime"),
    ],
)
def test_workers_share_the_memory_of_a_framework(crew: Crew, package: str, preload: str) -> None:
    """A fork of a process with several threads may hang, and one that has used a device cannot use it."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    workers: list[Talk] = [crew.talk(preload=preload) for _ in range(3)]
    for each in workers:
        assert each.ask(f"{package!r} in __import__('sys').modules", IMPORT_LIMIT_S) is True
        assert each.ask("len(__import__('os').listdir(f'/proc/{__import__(\"os\").getppid()}/task'))") == 1
    own = [psutil.Process(each.ask("__import__('os').getpid()")).memory_full_info().uss for each in workers]
    # Measured: 6 to 16 MiB; a worker that imports the framework itself has more than 200.
    assert max(own) < 64 * MIB
