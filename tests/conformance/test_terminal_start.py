"""The start at a terminal: a summary for people. Elsewhere the log has Triton's tables, for scripts."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.forked import run_python
from support.models import add_identity, write_config
from support.server import LOOPBACK, wait_until
from support.terminal import TerminalServer

Begin = Callable[..., TerminalServer]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    add_identity(tmp_path / "models", "ident")
    return tmp_path / "models"


@pytest.fixture
def begin(models: Path) -> Iterator[Begin]:
    running: list[TerminalServer] = []

    def start(*arguments: str, **options: object) -> TerminalServer:
        running.append(TerminalServer("--model-repository", models, *arguments, **options))  # type: ignore[arg-type]
        return running[-1]

    yield start
    for server in running:
        server.kill()


def broken(models: Path) -> None:
    write_config(models / "broken", "max_batchsize: 4")
    (models / "broken" / "1").mkdir()


def test_a_terminal_shows_a_summary_and_problems_last(models: Path, begin: Begin) -> None:
    broken(models)
    server = begin("--exit-on-error=false", columns=60, environment={"NO_COLOR": "1"})
    wait_until(lambda: "Internal: failed to load all models" in server.shown, "the end of the summary")
    began = server.shown
    ports = (
        r"  HTTP     http://127\.0\.0\.1:\d+\n  gRPC     127\.0\.0\.1:\d+\n  metrics  http://127\.0\.0\.1:\d+/metrics\n"
    )
    table = r"  model   version  state        seconds\n  broken +UNAVAILABLE\n  ident   1        READY        \d+\.\d\n"
    problem = r"error: Poll failed for model directory 'broken':\n  broken/config\.pbtxt:1:1: max_batchsize: unknown field of\n"
    assert re.match(rf"Halimede \S+ serves 1 model\n{ports}\n{table}\n{problem}", began), began
    assert [line for line in began.splitlines() if len(line) > 60 or "\x1b" in line] == []
    assert server.stop() == 0
    assert '"Signal (2) received."' in server.shown


def test_a_summary_is_coloured_and_at_most_100_columns_wide(begin: Begin) -> None:
    server = begin("--model-control-mode=explicit", "--load-model=ident", "--load-model=" + "long" * 40, columns=200)
    assert server.ended() == 1
    assert server.shown.startswith("\x1b[31merror:\x1b[0m ")
    lines = re.sub(r"\x1b\[\d+m", "", server.shown).splitlines()
    assert [line for line in lines if len(line) > 100 and " " in line.strip()] == []


def test_a_server_stops_when_its_terminal_is_closed(begin: Begin) -> None:
    server = begin()
    wait_until(lambda: "READY" in server.shown, "the end of the summary")
    server.process.send_signal(signal.SIGHUP)
    assert server.ended() == 0
    assert '"Signal (1) received."' in server.shown


@pytest.mark.parametrize("columns", [80, 0])
def test_the_last_line_says_why_the_start_failed(models: Path, begin: Begin, columns: int) -> None:
    broken(models)
    if columns:
        server = begin(columns=columns, environment={"TERM": "dumb"})
        assert server.ended() == 1
        last = " ".join(line.strip() for line in server.shown.rpartition("error: ")[2].splitlines())
    else:
        done = run_python("-m", "halimede", "serve", f"--model-repository={models}", *LOOPBACK)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
    cause = "broken: broken/config.pbtxt:1:1: max_batchsize: unknown field of ModelConfig; did you mean max_batch_size?"
    assert f"creating server: Internal - failed to load all models: {cause}" in last


def test_an_option_shows_the_whole_log_on_a_terminal(begin: Begin) -> None:
    server = begin("--log-verbose=1")
    wait_until(lambda: '"Started HTTPService at' in server.shown, "the last line of the start")
    assert "| Option " in server.shown
    assert re.search(r"\| ident +\| 1 +\| READY +\|", server.shown)


def test_a_program_named_tritonserver_shows_the_whole_log_on_a_terminal(begin: Begin) -> None:
    named = "import sys; sys.argv[0] = 'tritonserver'; from halimede.commands.serve import serve; serve()"
    server = begin(program=["-c", named])
    wait_until(lambda: '"Started HTTPService at' in server.shown, "the last line of the start")
    assert re.search(r"\| ident +\| 1 +\| READY +\|", server.shown)


def test_a_models_own_folder_is_warned_of_in_mode_explicit(models: Path) -> None:
    server = TerminalServer(
        "--model-control-mode=explicit", "--model-repository", models / "ident", environment={"NO_COLOR": "1"}
    )
    text = f"looks like a model itself; give the folder above as the repository: '{models}'"
    try:
        wait_until(lambda: text in " ".join(server.shown.split()), "the warning")
        assert "\n\n  no model is loaded\n\nwarning: there is no model in repository" in server.shown
    finally:
        server.kill()


@pytest.mark.large
def test_a_terminal_names_each_5_s_what_still_loads(models: Path, begin: Begin) -> None:
    add_identity(models, "slow", extra='parameters { key: "creation_delay_sec" value { string_value: "6" } }')
    broken(models)
    server = begin(environment={"NO_COLOR": "1"})
    wait_until(lambda: "still loading: slow (5 s)\n" in server.shown, "a line for the model that loads")
    assert server.shown.startswith("error: Poll failed for model directory 'broken'")
    assert server.ended() == 1
