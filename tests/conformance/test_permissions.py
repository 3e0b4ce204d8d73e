"""Files that the server's user may not read: an error of their model, with owner, mode and the fix.

Root can read everything by two capabilities. Servers in these tests have neither, so that modes apply to them.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.calls import index, load
from support.forked import run_python
from support.models import add_simple, write_config
from support.served import Stage, add_python, infer, parameter
from support.server import LOOPBACK, RunningServer, halimede, start_server, wait_until

IS_ROOT = os.geteuid() == 0
OTHER = 12345
DROP = """
import ctypes, struct
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24
libc = ctypes.CDLL(None, use_errno=True)
for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
    # No program that it executes gets the capability.
    assert libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0
# Version 3 of capset(2), this process; effective, permitted and inheritable capabilities, the low ones first.
header, data = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
assert libc.capget(header, data) == 0
sets = list(struct.unpack("=6I", data.raw))
sets[:3] = sets[0] & ~6, sets[1] & ~6, 0
assert libc.capset(header, struct.pack("=6I", *sets)) == 0
"""
"""What the server does before all else: it gives the two capabilities up."""
WITHOUT_RIGHTS = DROP if IS_ROOT else ""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("permissions")
    repository = folder / "models"
    repository.mkdir()
    server = serve(folder, f"--model-repository={repository}", "--model-control-mode=explicit")
    yield Stage(server, repository)
    assert server.stop() == 0, server.log


def serve(folder: Path, *arguments: str, ready: bool = True) -> RunningServer:
    return start_server(folder, arguments, ready=ready, first=WITHOUT_RIGHTS)


def forbid(path: Path, mode: int) -> str:
    """Give the path to another user with this mode, or remove all rights if the test is not root. Returns the error."""
    if IS_ROOT:
        os.chown(path, OTHER, OTHER)
    path.chmod(mode if IS_ROOT else 0)
    found = path.stat()
    who, wanted = "o" if IS_ROOT else "u", "rx" if path.is_dir() else "r"
    groups = ", ".join(map(str, sorted({os.getegid(), *os.getgroups()})))
    return (
        f"permission denied: '{path}' belongs to user {found.st_uid} and group {found.st_gid} and has mode "
        f"{found.st_mode & 0o777:03o}; the server runs as user {os.geteuid()}, groups {groups}; "
        f"run `chmod {who}+{wanted} {path}`" + (f", or run the server as user {OTHER}" if IS_ROOT else "")
    )


@pytest.mark.parametrize(
    ("name", "path", "mode"),
    [("folder", "", 0o700), ("unsearched", "", 0o744), ("version", "1", 0o700), ("config", "config.pbtxt", 0o600)],
)
def test_an_unreadable_model_folder_version_or_configuration(stage: Stage, name: str, path: str, mode: int) -> None:
    add_simple(stage.repository, name)
    expected = forbid(stage.repository / name / path, mode)
    status, message = load(stage.server, name)
    assert status == 500
    assert message.startswith(f"failed to load '{name}', failed to poll from model repository: ")
    assert message.endswith(expected)
    line = f"Poll failed for model directory '{name}'"
    wait_until(lambda: line in stage.server.log, line, stage.server)
    assert (name, "1") not in index(stage.server)


def test_an_unreadable_model_file(stage: Stage) -> None:
    add_simple(stage.repository, "onnx")
    add_python(stage.repository, "python")
    for name, file in (("onnx", "model.onnx"), ("python", "model.py")):
        expected = forbid(stage.repository / name / "1" / file, 0o600)
        assert load(stage.server, name) == (
            400,
            f"load failed for model '{name}': version 1 is at UNAVAILABLE state: Internal: {expected};\n",
        )
        assert index(stage.server)[name, "1"] == ("UNAVAILABLE", f"Internal: {expected}")


def test_an_unreadable_file_that_a_python_model_opens(stage: Stage) -> None:
    add_python(stage.repository, "weights", methods="""
        def initialize(self, args):
            open(os.path.join(os.path.dirname(__file__), "weights.bin"))
    """)  # fmt: skip
    (stage.repository / "weights/1/weights.bin").touch()
    expected = forbid(stage.repository / "weights/1/weights.bin", 0o600)
    status, message = load(stage.server, "weights")
    assert status == 400
    assert f"PermissionError: [Errno 13] Permission denied: 'weights.bin'; {expected};" in message


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_an_unreadable_execution_environment(stage: Stage, kind: str) -> None:
    path = stage.repository / f"its{kind}/environment"
    add_python(stage.repository, f"its{kind}", extra=parameter("EXECUTION_ENV_PATH", str(path)))
    path.mkdir() if kind == "folder" else path.touch()
    expected = forbid(path, 0o700 if kind == "folder" else 0o600)
    status, message = load(stage.server, f"its{kind}")
    assert status == 400
    assert f"the execution environment '{path}' cannot be used: {expected};" in message


def test_an_unreadable_label_file(stage: Stage) -> None:
    add_simple(stage.repository, "labels")
    config = stage.repository / "labels/config.pbtxt"
    text = config.read_text().replace('"OUTPUT0"', '"OUTPUT0" label_filename: "labels.txt"')
    write_config(config.parent, text)
    (config.parent / "labels.txt").write_text("one\ntwo\n")
    expected = forbid(config.parent / "labels.txt", 0o600)
    status, message = load(stage.server, "labels")
    assert status == 500
    assert message.endswith(f"a label file cannot be read: {expected}")


def test_unreadable_files_that_no_model_needs_are_ignored(stage: Stage) -> None:
    add_python(stage.repository, "notes")
    for name in ("cache", "train.log"):
        path = stage.repository / "notes/1" / name
        path.mkdir() if name == "cache" else path.touch()
        forbid(path, 0o700 if name == "cache" else 0o600)
    assert load(stage.server, "notes") == (200, "")
    assert infer(stage.server, "notes", 2) == (200, [2])


def test_one_model_that_cannot_be_read_leaves_the_others_serving(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for name in ("closed", "open"):
        add_python(repository, name)
    expected = forbid(repository / "closed", 0o700)
    server = serve(tmp_path, f"--model-repository={repository}", "--exit-on-error=false", ready=False)
    try:
        wait_until(lambda: "failed to load all models" in server.log, "the end of the loads", server)
        assert infer(server, "open", 2) == (200, [2])
        assert expected in server.log
        assert server.get("/v2/health/ready").status == 400
    finally:
        server.kill()


@pytest.mark.parametrize("exits", ["true", "false"])
def test_a_repository_that_cannot_be_read_ends_the_start(tmp_path: Path, exits: str) -> None:
    """It may contain models, and a server without them would never be ready."""
    add_simple(tmp_path / "models")
    expected = forbid(tmp_path / "models", 0o700)
    message = refused(f"--model-repository={tmp_path}/models", f"--exit-on-error={exits}")
    assert f"Error: --model-repository: repository '{tmp_path}/models' cannot be read: {expected}" in message


def test_a_model_of_an_unreadable_repository(tmp_path: Path) -> None:
    """A model that is loaded by name is not reported as missing."""
    add_simple(tmp_path / "models", "named")
    server = serve(tmp_path, f"--model-repository={tmp_path}/models", "--model-control-mode=explicit")
    try:
        expected = forbid(tmp_path / "models", 0o600)
        text = f"failed to load 'named', failed to poll from model repository: 'named': it cannot be read: {expected}"
        assert load(server, "named") == (500, text)
    finally:
        server.kill()


def test_an_unreadable_file_or_folder_of_a_flag(tmp_path: Path) -> None:
    (tmp_path / "closed/models").mkdir(parents=True)
    (tmp_path / "key.pem").touch()
    key = forbid(tmp_path / "key.pem", 0o600)
    closed = forbid(tmp_path / "closed", 0o700)
    message = refused(f"--model-repository={tmp_path}/closed/models", f"--grpc-server-key={tmp_path}/key.pem")
    assert key in message
    assert closed in message


@pytest.mark.parametrize("mode", [0o700, 0o644])
def test_a_check_of_a_repository_that_cannot_be_read_fails(tmp_path: Path, mode: int) -> None:
    for name in ("closed", "open"):
        add_simple(tmp_path / name, name)
    expected = forbid(tmp_path / "closed", mode)
    program = f"{WITHOUT_RIGHTS}\nfrom halimede.commands.check import check; check()"
    done = run_python("-c", program, tmp_path / "closed", tmp_path / "open")
    assert done.returncode == 1
    assert expected in done.stderr
    assert "open" in done.stdout


def refused(*arguments: str) -> str:
    """The output of a server that does not start."""
    done = run_python(*halimede(WITHOUT_RIGHTS), "serve", *arguments, *LOOPBACK)
    assert done.returncode != 0
    return done.stderr
