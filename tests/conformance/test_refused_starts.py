"""Errors of loads whose worker processes do not start, including invalid messages of the processes."""

import time
from collections.abc import Iterator

import pytest

from support.calls import index, load
from support.served import ECHO, Stage, infer, parameter
from support.server import start_server

SPEAKS = r"""
def speak(code, text):
    import struct
    body = json.dumps({"code": code, "message": text}).encode()
    for number in os.listdir("/proc/self/fd"):
        if int(number) >= 512:
            os.write(int(number), struct.pack("<II", len(body), 33) + body)
"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("refused")
    repository = folder / "models"
    repository.mkdir()
    arguments = ["--model-repository", repository, "--model-control-mode", "explicit", "--disable-auto-complete-config"]
    server = start_server(folder, arguments)
    yield Stage(server, repository)
    server.stop()


def test_a_missing_execution_environment_is_an_error_of_the_version(stage: Stage) -> None:
    """The same error with and without auto-complete, which uses the environment too."""
    stage.add("nowhere", extra=parameter("EXECUTION_ENV_PATH", "/nowhere/env"))
    text = "Failed to get the canonical path for /nowhere/env."
    status, message = load(stage.server, "nowhere")
    assert (status, message) == (
        400,
        f"load failed for model 'nowhere': version 1 is at UNAVAILABLE state: Invalid argument: {text};\n",
    )
    assert index(stage.server)["nowhere", "1"] == ("UNAVAILABLE", f"Invalid argument: {text}")
    assert "Traceback" not in stage.server.log


def test_a_reason_that_is_not_unicode_does_not_break_the_index(stage: Stage) -> None:
    stage.deploy("well")
    stage.add("odd", ECHO, head=SPEAKS, methods=r"""
        def initialize(self, args):
            speak("INTERNAL", "no \ud800 text")
            time.sleep(3600)
    """)  # fmt: skip
    status, message = load(stage.server, "odd")
    assert (status, "no ? text" in message) == (400, True)
    assert index(stage.server)["odd", "1"] == ("UNAVAILABLE", "Internal: no ? text")
    assert infer(stage.server, "well", 2) == (200, [2])


def test_instances_of_a_failed_load_finalize_in_parallel(stage: Stage) -> None:
    stage.add("four", count=4, methods="""
        def initialize(self, args):
            if args["model_instance_name"].endswith("_3"):
                raise pb_utils.TritonModelException("one too many")

        def finalize(self):
            time.sleep(2)
    """)  # fmt: skip
    begun = time.monotonic()
    status, message = load(stage.server, "four")
    assert (status, "one too many" in message) == (400, True)
    assert time.monotonic() - begun < 5  # the goal is 2 s; in sequence they take 6
