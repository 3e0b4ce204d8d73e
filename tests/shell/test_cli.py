"""The commands `halimede` and `tritonserver` as processes: help, version, exit codes, and what they import."""

import importlib
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from halimede import __version__
from halimede.cli import main
from halimede.commands.flags import TRITON_VERSION, all_flags
from halimede.commands.serve import serve
from support.forked import run_python, start_python
from support.models import add_identity
from support.served import add_python, notes_file
from support.server import wait_until

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def halimede(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "halimede", *arguments, environment=environment)


def tritonserver(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The console script, as an installation makes it of the project's entry."""
    module, function = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]["tritonserver"].split(":")
    script = (
        f"import sys; sys.argv[0] = '/usr/bin/tritonserver'; from {module} import {function}; sys.exit({function}())"
    )
    return run_python("-c", script, *arguments)


def test_an_interpreter_runs_the_command() -> None:
    printed = subprocess.check_output([sys.executable, "-m", "halimede", "--version"], text=True)
    assert printed == f"halimede {__version__}\n"


def test_commands_print_the_version_that_clients_see() -> None:
    for done, printed in (
        (halimede("--version"), f"halimede {__version__}"),
        (halimede("serve", "--version"), f"halimede {__version__}"),
        (tritonserver("--version"), f"tritonserver {TRITON_VERSION} (halimede {__version__})"),
        (tritonserver("--version", "--server-version=2.60.1"), f"tritonserver 2.60.1 (halimede {__version__})"),
    ):
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{printed}\n", "")


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_help_shows_every_flag_whole_and_fits_the_terminal(columns: int) -> None:
    assert "serve" in halimede("--help").stdout
    done = halimede("serve", "--help", COLUMNS=str(columns))
    words = done.stdout.replace(",", " ").split()
    assert [name for flag in all_flags() for name in flag.names if name not in words] == []
    assert [line for line in done.stdout.splitlines() if len(line) > min(columns, 120)] == []
    assert (done.returncode, done.stderr) == (0, "")


def test_tritonserver_is_halimede_serve() -> None:
    subcommand, tritonserver_help = halimede("serve", "--help"), tritonserver("--help")
    assert tritonserver_help.stdout.startswith("Usage: tritonserver [OPTIONS]")
    assert tritonserver_help.stdout.split("\n", 1)[1] == subcommand.stdout.split("\n", 1)[1]


def test_help_works_with_invalid_flags() -> None:
    shown = CliRunner().invoke(serve, ["--http-port", "x", "-h"])
    assert (shown.exit_code, shown.output.startswith("Usage:")) == (0, True)


def test_mistakes_end_the_command_with_code_2_and_are_all_reported() -> None:
    for done in (halimede("serve", "--http-port=x", "--nonsense"), tritonserver("--http-port=x", "--nonsense")):
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.splitlines()[-2:] == [
            "Error: --http-port: Invalid option value. Got x; expected an integer",
            'Error: Bad option: "--nonsense".',
        ]


def test_an_unknown_subcommand_is_named() -> None:
    done = halimede("server")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("Error: No such command 'server'. Did you mean 'serve'?\n")
    assert halimede("model").stderr.endswith("Error: No such command 'model'.\n")


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--model-repository", "Options of a command follow its name: halimede serve --model-repository"),
        (str(PYPROJECT), f"Did you mean 'serve {PYPROJECT}'?"),
    ],
)
def test_arguments_without_a_command_name_serve(argument: str, text: str) -> None:
    shown = CliRunner().invoke(main, [argument, "models"])
    assert (shown.exit_code, shown.output.rstrip().endswith(text)) == (2, True), shown.output


@pytest.mark.parametrize(
    "command", [["check", "."], ["explain-config", "slow"], ["debug", "slow", "slow/config.pbtxt"]]
)
def test_an_interrupt_ends_a_command_and_is_no_error_of_its_model(tmp_path: Path, command: list[str]) -> None:
    models = tmp_path / "models"
    add_python(models, "slow", head="note('imported'); time.sleep(20)")
    with (tmp_path / "shown").open("w+b") as shown:
        process = start_python("-m", "halimede", *command, stdout=shown, stderr=shown, directory=models)
        wait_until(notes_file(models, "slow").exists, "the import of the model")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT
    assert (tmp_path / "shown").read_bytes() == b""


def test_another_distribution_adds_a_subcommand(tmp_path: Path) -> None:
    (tmp_path / "greeting.py").write_text("import click\n\n@click.command()\ndef greet():\n    print('hello')\n")
    information = tmp_path / "greeting-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1\n")
    (information / "entry_points.txt").write_text("[halimede.commands]\ngreet = greeting:greet\n")
    done = halimede("greet", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_the_shell_completes_flags() -> None:
    done = halimede(
        "serve", _HALIMEDE_COMPLETE="bash_complete", COMP_WORDS="halimede serve --http-port 1 --http-m", COMP_CWORD="4"
    )
    assert (done.stdout, done.stderr) == ("plain,--http-max-input-size\n", "")


def test_help_and_mistakes_import_no_serving_library() -> None:
    program = "import sys\nfrom halimede.cli import main\nmain(['serve', *sys.argv[1:]], standalone_mode=False)\n"
    heavy = "{'numpy', 'grpc', 'uvloop', 'onnxruntime', 'google.protobuf', 'rich', 'halimede.app'}"
    check = f"import atexit, sys; atexit.register(lambda: print(sorted({heavy} & sys.modules.keys())))\n"
    for argument in ("--help", "--http-port=x"):
        command = [sys.executable, "-c", check + program, argument]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.splitlines()[-1] == "[]"


def test_names_of_models_are_utf8_whatever_the_locale_says(tmp_path: Path) -> None:
    add_identity(tmp_path, "grüße")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "halimede", "check", tmp_path]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "grüße  yes" in done.stdout.decode()


def test_the_console_scripts_exist() -> None:
    scripts = tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]
    for value in scripts.values():
        module, function = value.split(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert sorted(scripts) == ["halimede", "halimede-operator", "tritonserver"]
