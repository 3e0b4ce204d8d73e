"""`halimede debug`: a python model at a terminal, without a server."""

import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.forked import run_python
from support.models import add_scaled, add_simple
from support.served import add_python, parameter

DEBUG = [str(Path(sys.executable).parent / "halimede"), "debug"]


def write_request(folder: Path, *numbers: float, name: str = "request.json", **more: object) -> Path:
    file = folder / name
    given = {"name": "IN", "shape": [1, len(numbers)], "datatype": "FP32", "data": numbers}
    file.write_text(json.dumps({"inputs": [given], **more}))
    return file


def debug(model: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "halimede", "debug", model, *files)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "models" / "m"


def add(model: Path, *args: str, **how: object) -> None:
    add_python(model.parent, model.name, *args, **how)


class Person:
    """A user at a terminal."""

    def __init__(self, *command: str | Path) -> None:
        self._terminal, program_side = os.openpty()
        self.process = subprocess.Popen(command, stdin=program_side, stdout=program_side, stderr=program_side)
        os.close(program_side)
        self.seen = ""

    def reads(self, pattern: str) -> str:
        """Wait for the pattern in the new output."""
        end = time.monotonic() + 60
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < end, self.seen
            if select.select([self._terminal], [], [], 1)[0]:
                self.seen += os.read(self._terminal, 1 << 16).decode()
        self.seen = self.seen[found.end() :]
        return found[0]

    def types(self, line: str) -> None:
        os.write(self._terminal, f"{line}\n".encode())

    def leaves(self) -> int:
        code = self.process.wait(60)
        os.close(self._terminal)
        return code


@pytest.mark.parametrize("how", ["def", "async def"])
def test_breakpoint_stops_at_the_terminal(model: Path, how: str) -> None:
    execute = """
for request in requests:
    number = value(request)
    breakpoint()
    number = number + 1
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, 1), number, np.float32))])]
"""
    add(model, execute, how=how)
    person = Person(*DEBUG, model, write_request(model.parent, 5))
    person.reads(r"\(Pdb\) ")
    person.types("p 'number is', number")
    person.reads(r"\('number is', 5\.0\)")
    person.types("number = 41")
    person.types("continue")
    person.reads(r'"data":\[42\.0\]')
    assert person.leaves() == 0


def test_quitting_the_debugger_fails_the_request(model: Path) -> None:
    add(model, "breakpoint()\nvalue(requests[0])")
    person = Person(*DEBUG, model, write_request(model.parent, 5))
    person.reads(r"\(Pdb\) ")
    person.types("q")
    # Nothing about a missing terminal.
    person.reads(r"message: BdbQuit\r\n")
    assert person.leaves() == 1


def test_each_request_is_answered_as_a_server_does(model: Path) -> None:
    add(model, methods="def finalize(self): print('good bye')")
    done = debug(
        model,
        write_request(model.parent, 1, 2, id="a"),
        write_request(model.parent, 3, name="second.json", outputs=[{"name": "OUT"}]),
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second, last = done.stdout.splitlines()
    assert json.loads(first) == {
        "id": "a",
        "model_name": "m",
        "model_version": "1",
        "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 2.0]}],
    }
    assert json.loads(second)["outputs"][0]["data"] == [3.0]
    assert last == "good bye"


def test_answers_of_a_sender_are_waited_for(model: Path) -> None:
    execute = """
sender = requests[0].get_response_sender()
def send():
    for number in range(2):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, 1), number, np.float32))]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
threading.Timer(0.2, send).start()
"""
    add(model, execute, decoupled=True)
    done = debug(model, write_request(model.parent, 1))
    assert [json.loads(line)["outputs"][0]["data"] for line in done.stdout.splitlines()] == [[0.0], [1.0]]


def test_failures_show_the_models_frames_and_set_the_exit_code(model: Path) -> None:
    add(model, "raise ValueError('boom')")
    done = debug(model, write_request(model.parent, 1))
    assert (done.returncode, done.stdout) == (1, "")
    assert "model.py" in done.stderr
    assert done.stderr.endswith("message: ValueError: boom\n")


def test_metrics_are_accepted(model: Path) -> None:
    metrics = """
def initialize(self, args):
    family = pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER)
    family.Metric(labels={}).increment(1)
"""
    add(model, methods=metrics)
    assert debug(model, write_request(model.parent, 1)).returncode == 0


CALL = """
given = pb_utils.Tensor("IN", np.full((1, 4), value(requests[0]), np.float32))
answer = pb_utils.InferenceRequest(model_name="other", requested_output_names=["OUT"], inputs=[given]).EXEC()
if answer.has_error():
    return [pb_utils.InferenceResponse(error=answer.error())]
numbers = answer.output_tensors()[0].as_numpy()
numbers += 1
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", numbers[:, :1])])]
"""


def calling(how: str) -> str:
    if how == "def":
        return CALL.replace("EXEC", "exec")
    return CALL.replace("pb_utils.InferenceRequest(model", "await pb_utils.InferenceRequest(model").replace(
        "EXEC", "async_exec"
    )


@pytest.mark.parametrize("how", ["def", "async def"])
def test_other_models_of_the_repository_are_served_for_its_calls(model: Path, how: str) -> None:
    add(model, calling(how), how=how)
    add_scaled(model.parent, "other", 3.0)
    done = debug(model, write_request(model.parent, 5), write_request(model.parent, 6, name="second.json"))
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["outputs"][0]["data"] for line in done.stdout.splitlines()] == [[16.0], [19.0]]


def test_a_call_of_a_model_that_is_not_there_fails(model: Path) -> None:
    add(model, calling("def"))
    done = debug(model, write_request(model.parent, 5))
    assert (done.returncode, done.stdout) == (1, "")
    assert "failed to load 'other'" in done.stderr


def test_each_answer_of_a_model_that_is_called_arrives_and_it_can_be_unloaded(model: Path) -> None:
    count = """
print("counting")
sender = requests[0].get_response_sender()
for number in range(40):
    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full((1, 1), number, np.float32))]))
sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    execute = """
assert pb_utils.is_model_ready("other") and not pb_utils.is_model_ready("another")
given = pb_utils.Tensor("IN", np.ones((1, 1), np.float32))
call = pb_utils.InferenceRequest(model_name="other", requested_output_names=["OUT"], inputs=[given])
answers = [each.output_tensors()[0].as_numpy()[0, 0] for each in call.exec(decoupled=True) if each.output_tensors()]
pb_utils.unload_model("other")
assert not pb_utils.is_model_ready("other")
assert next(iter(call.exec(decoupled=True))).has_error()
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([answers]))])]
"""
    add(model, execute)
    add_python(model.parent, "other", count, decoupled=True)
    done = debug(model, write_request(model.parent, 1))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["data"] == [float(number) for number in range(40)]
    assert "counting" in done.stderr


def test_unexpected_outputs_give_a_warning_or_an_error(model: Path) -> None:
    add(model, "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.ones((1, 1), np.int64))])]")
    file = write_request(model.parent, 1)
    done = debug(model, file)
    assert (done.returncode, json.loads(done.stdout)["outputs"][0]["datatype"]) == (0, "INT64")
    assert "the model sent INT64, but the configuration says TYPE_FP32" in done.stderr
    with (model / "config.pbtxt").open("a") as config:
        config.write(parameter("STRICT_OUTPUTS", "true"))
    assert debug(model, file).returncode == 1


def test_mistakes_are_reported_without_a_traceback(model: Path, tmp_path: Path) -> None:
    add(model, methods="def initialize(self, args): raise OSError('no weights')")
    file = write_request(model.parent, 1)
    for given, text in (
        ([model, file], "no weights"),
        ([add_and_get(tmp_path), file], "is a model of backend 'onnxruntime', not a python model"),
        ([model], "Missing argument 'REQUEST.json...'"),
    ):
        done = debug(*given)
        assert done.returncode in (1, 2)
        assert text in done.stderr
        assert "halimede/commands" not in done.stderr


def add_and_get(tmp_path: Path) -> Path:
    add_simple(tmp_path / "others", "simple")
    return tmp_path / "others" / "simple"


def test_request_that_does_not_fit_is_reported(model: Path) -> None:
    add(model)
    file = model.parent / "wrong.json"
    file.write_text('{"inputs": []}')
    done = debug(model, file)
    assert done.returncode == 1
    assert "expected 1 inputs but got 0 inputs for model 'm'" in done.stderr
