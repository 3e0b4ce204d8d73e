"""The codec in another interpreter: what it imports, and frames between two versions of Python."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import halimede.workers
from halimede.backends.hosting import Answer
from halimede.core.types import (
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    Tensor,
)
from halimede.inference_frames.calls import decode_infer, encode_call_answer
from halimede.inference_frames.kinds import InferenceFrame
from halimede.workers.frames.answers import (
    decode_done,
)
from halimede.workers.frames.batches import encode_execute
from halimede.workers.frames.kinds import WorkerFrame
from halimede.workers.worker import BatchItem
from support.frames import TYPES, Shelf, body_of, plain

SERVER = Path(halimede.workers.__file__).parents[2]


MODULES = [
    "halimede.workers.host.main",
    "halimede.channel.process_end.channel",
    "halimede.workers.host.calls",
    "halimede.workers.frames.batches",
    "halimede.workers.frames.answers",
    "halimede.inference_frames.calls",
    "halimede.channel.segments",
    "halimede.backends.python.runner",
]

IMPORTED = """
import sys

class Door:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first not in sys.stdlib_module_names and first not in ("numpy", "halimede"):
            raise ImportError(f"{name}: only the standard library and numpy are there")

sys.meta_path.insert(0, Door())
for name in sys.argv[1:]:
    __import__(name)
print("\\n".join(sorted(name for name in sys.modules if name.partition(".")[0] == "halimede")))
"""


def imported() -> list[str]:
    """The modules of this package that a python model's worker imports, where only numpy is installed."""
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED, *MODULES], capture_output=True, text=True, timeout=60, cwd=SERVER, check=False,
        env={"PYTHONPATH": str(SERVER), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_a_python_models_worker_needs_only_numpy_and_python_3_10():
    names = imported()

    assert set(MODULES) <= set(names)
    for name in names:
        path = SERVER.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        ast.parse(path.read_text(), str(path), feature_version=(3, 10))


OTHER_SIDE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from halimede.backends.hosting import Answer
from halimede.core.types import ErrorCode, InferenceError, Tensor
from halimede.channel.frames import HEADER
import halimede.workers.host.main, halimede.backends.python.runner
from halimede.workers.frames.answers import encode_done
from halimede.workers.frames.batches import decode_execute

data = sys.stdin.buffer.read()
body = memoryview(data)[HEADER.size:]
execute = decode_execute(body, 1, None)
replies = []
for item in execute.items:
    request = item.request
    said = {"said": repr((item.key, item.rows, request.id, request.sequence_id, request.parameters, request.timeout_us))}
    replies.append(Answer([Tensor("out", t.datatype, t.shape, t.data) for t in request.inputs[:1]], said))
replies.append(InferenceError(ErrorCode.NOT_FOUND, "größer"))
replies.append(None)
done = encode_done(execute.batch, replies, True, (1, 2, 3), {"out": 0}, lambda data: None, lambda: (5, [(1, 64)]))
sys.stdout.buffer.write(done)
"""


def interpreter(version: str) -> str:
    """The path of an interpreter of another version that has numpy."""
    program = shutil.which(f"python{version}")
    code = f"import numpy, sys; assert '%s.%s' % sys.version_info[:2] == {version!r}"
    if (
        program is None
        or subprocess.run([program, "-c", code], capture_output=True, timeout=60, check=False).returncode
    ):
        pytest.skip(f"THE CODEC WAS NOT TRIED IN PYTHON {version}: there is no python{version} with numpy in PATH")
    return program


@pytest.mark.parametrize("version", [None, "3.10", "3.12", "3.13"])
def test_another_interpreter_reads_and_writes_the_same_frames(version: str | None):
    program = sys.executable if version is None else interpreter(version)
    items = [
        BatchItem(
            key,
            InferenceRequest(
                "m", id=f"ü{key}", inputs=[Tensor("in", datatype, (1, 2), bytes(range(2 * (datatype.itemsize or 4))))],
                parameters={"p": 1.5, "s": "✓"}, sequence_id="s" if key % 2 else key, timeout_us=key,
            ),
            key,
            False,
        )
        for key, datatype in enumerate(TYPES)
    ]  # fmt: skip
    frame = encode_execute(3, items, lambda _: None)

    ran = subprocess.run(
        [program, "-c", OTHER_SIDE, str(SERVER)], input=bytes(frame), capture_output=True, timeout=60, check=False
    )

    assert ran.returncode == 0, ran.stderr.decode()
    done = decode_done(body_of(ran.stdout, WorkerFrame.DONE), ("out",), Shelf(False).locate)
    assert (done.batch, done.failed, done.times, done.wanted_bytes) == (3, True, (1, 2, 3), 5)
    assert done.retained == [(1, 64)]
    for item, reply in zip(items, done.replies[:-2], strict=True):
        assert isinstance(reply, Answer)
        sent = item.request
        assert [t[1:] for t in plain(reply.outputs)] == [t[1:] for t in plain(sent.inputs)]
        said = repr((item.key, item.rows, sent.id, sent.sequence_id, sent.parameters, sent.timeout_us))
        assert reply.parameters == {"said": said}
    assert done.replies[-2:] == [InferenceError(ErrorCode.NOT_FOUND, "größer"), None]


OTHER_CALLER = """
import sys
sys.path.insert(0, sys.argv[1])
from halimede.channel.frames import HEADER
from halimede.core.types import InferenceRequest
from halimede.inference_frames.calls import decode_call_answer, encode_infer

data = sys.stdin.buffer.read()
_, response = decode_call_answer(memoryview(data)[HEADER.size:], None)
request = InferenceRequest(response.model_name, response.model_version, response.id, response.outputs, ("größe",),
    response.parameters, 2, 3, "seq", True, False)
sys.stdout.buffer.write(encode_infer(9, 4, request, lambda data: None, lambda: 5))
"""


@pytest.mark.parametrize("version", [None, "3.10", "3.12", "3.13"])
def test_another_interpreter_calls_in_the_same_frames(version: str | None):
    program = sys.executable if version is None else interpreter(version)
    outputs = [Tensor(f"ü{each.name}", each, (1, 2), bytes(range(2 * (each.itemsize or 4)))) for each in TYPES]
    answer = InferenceResponse("größe", "1", "id", outputs, {"p": 1.5, "s": "✓", "b": True, "n": 3})
    frame = encode_call_answer(1, answer, lambda _: None)

    ran = subprocess.run(
        [program, "-c", OTHER_CALLER, str(SERVER)], input=bytes(frame), capture_output=True, timeout=60, check=False
    )

    assert ran.returncode == 0, ran.stderr.decode()
    got = decode_infer(body_of(ran.stdout, InferenceFrame.INFER), Shelf(False).locate)
    assert (got.number, got.batch, got.wanted_bytes) == (9, 4, 5)
    assert plain(got.request.inputs) == plain(outputs)
    assert got.request == InferenceRequest(
        "größe", "1", "id", got.request.inputs, ("größe",), answer.parameters, 2, 3, "seq", True, False
    )
