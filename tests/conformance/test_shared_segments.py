"""Large tensors that one model's process reads in another one's memory: the bytes are correct, regardless of what the
models do with them and which process dies."""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from support.background import in_background
from support.calling import CALLS
from support.calls import executing, load, unload
from support.ensemble_models import Step, Tensors, add_ensemble, chain
from support.served import Stage, add_python, parameter, workers
from support.server import RunningServer, Start, wait_until
from support.virtual_environment import make_environment

ELEMENTS = 320 << 10  # of FP32: 1.25 MiB, and tensors from 1 MiB are shared
Floats = NDArray[np.float32]

PLUS = """
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() + np.float32(1))]) for r in requests]
"""
IN_PLACE = """
answers = []
for request in requests:
    array = request.inputs()[0].as_numpy()
    array += 1
    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
return answers
"""
NOW_AND_THEN_IN_PLACE = """
answers = []
for request in requests:
    array = request.inputs()[0].as_numpy()
    if array.flat[0] % 3 == 0: array += 1
    else: array = array + np.float32(1)
    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
return answers
"""
KEEPS = """
answers = []
for request in requests:
    array = request.inputs()[0].as_numpy()
    self.kept = getattr(self, "kept", [])[-6:] + [(array, array.copy())]
    assert all(np.array_equal(seen, copied) for seen, copied in self.kept), "what was kept has changed"
    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + np.float32(1))]))
return answers
"""
LOCKED = "ctypes.CDLL(None).mlockall(3)"
PLACES = {"plus": PLUS, "in place": IN_PLACE, "now and then": NOW_AND_THEN_IN_PLACE, "keeps": KEEPS}


def ask(server: RunningServer, model: str, number: int) -> Floats:
    """OUT for a tensor that begins with this number. Raises InferenceServerException."""
    sent = np.arange(number, number + ELEMENTS, dtype=np.float32)[None]
    with triton.InferenceServerClient(server.http_url, network_timeout=60) as client:
        given = triton.InferInput("IN", list(sent.shape), "FP32")
        given.set_data_from_numpy(sent)
        found = client.infer(model, [given]).as_numpy("OUT")
    assert found is not None
    return found


def check(server: RunningServer, model: str, number: int, added: float) -> None:
    assert np.array_equal(ask(server, model, number)[0], np.arange(number, number + ELEMENTS, dtype=np.float32) + added)


def shared_bytes(server: RunningServer, model: str) -> int:
    """Bytes of other processes' memory that the model's process maps."""
    [worker] = workers(server, model) or [each for each in workers(server) if each.cmdline()[-1] == f"{model}_0_0"]
    lines = [line.split() for line in Path(f"/proc/{worker.pid}/maps").read_text().splitlines()]
    ranges = [line[0].split("-") for line in lines if line[1] == "rw-p" and "memfd:halimede" in line[-2] + line[-1]]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


@pytest.fixture
def chained(stage: Stage) -> Callable[..., None]:
    """Deploys models by their `execute`, and an ensemble `chain` with them in sequence."""

    def deploy(*executes: str, **how: object) -> None:
        names = [f"step{number}" for number in range(len(executes))]
        for name, execute in zip(names, executes, strict=True):
            stage.deploy(name, execute, **how)
        add_ensemble(
            stage.repository, "chain", chain(*names), inputs=Tensors(dims="-1"), outputs=Tensors(["OUT"], dims="-1")
        )
        stage.names.insert(0, "chain")
        assert load(stage.server, "chain") == (200, "")

    return deploy


PAIRS = {("plus", "in place"), ("in place", "keeps"), ("now and then", "plus"), ("keeps", "now and then")}
"""Each first and each second place once; all pairs run with `large`."""


@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(*pair, marks=() if pair in PAIRS else pytest.mark.large) for pair in product(PLACES, repeat=2)],
)
def test_steps_of_an_ensemble_may_modify_or_keep_their_inputs(
    stage: Stage, chained: Callable[..., None], first: str, second: str
) -> None:
    chained(PLACES[first], PLACES[second], PLUS)
    for number in range(12):
        check(stage.server, "chain", number, 3)


def test_a_step_reads_the_memory_of_the_previous_step_in_place(stage: Stage, chained: Callable[..., None]) -> None:
    chained(PLUS, PLUS)
    for number in range(6):
        check(stage.server, "chain", number, 2)
    assert shared_bytes(stage.server, "step0") == 0
    assert shared_bytes(stage.server, "step1") >= 4 * ELEMENTS
    unload(stage.server, "chain")
    unload(stage.server, "step0")
    wait_until(
        lambda: shared_bytes(stage.server, "step1") == 0, "the memory of ended processes to be unmapped", stage.server
    )


def test_a_process_that_locks_its_memory_gets_the_right_bytes(stage: Stage, chained: Callable[..., None]) -> None:
    chained(PLUS, PLUS, head=LOCKED)
    for number in range(8):
        check(stage.server, "chain", number, 2)


def test_several_steps_read_the_same_bytes(stage: Stage) -> None:
    stage.deploy("source", PLUS)
    stage.deploy("one", IN_PLACE)
    stage.deploy("two", KEEPS)
    stage.deploy("three", PLUS)
    add_ensemble(
        stage.repository,
        "fan",
        [
            Step("source", {"IN": "IN"}, {"OUT": "mid"}),
            *(Step(name, {"IN": "mid"}, {"OUT": name}) for name in ("one", "two", "three")),
        ],
        inputs=Tensors(dims="-1"),
        outputs=Tensors(["one", "two", "three"], dims="-1"),
    )
    stage.names.insert(0, "fan")
    assert load(stage.server, "fan") == (200, "")
    with triton.InferenceServerClient(stage.server.http_url) as client:
        for number in range(10):
            sent = np.arange(number, number + ELEMENTS, dtype=np.float32)[None]
            given = triton.InferInput("IN", list(sent.shape), "FP32")
            given.set_data_from_numpy(sent)
            answer = client.infer("fan", [given])
            for name in ("one", "two", "three"):
                assert np.array_equal(answer.as_numpy(name), sent + 2)


CALLER = """
answers = []
for request in requests:
    sent = request.inputs()[0].as_numpy() + np.float32(1)
    for _ in range(3):
        response = ask("called", tensor(sent)).exec()
        if response.has_error(): break
        found = response.output_tensors()[0].as_numpy()
        assert np.array_equal(found, sent + np.float32(1))
        {change}
        sent = found
    if response.has_error(): answers.append(pb_utils.InferenceResponse(error=response.error()))
    else: answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", sent)]))
return answers
"""


CHANGES = {"reads": ("pass", 4), "writes": ("found *= 1; found += 1", 7)}
CALLS_OF_EACH = {("reads", "plus"), ("writes", "in place"), ("reads", "now and then"), ("writes", "keeps")}


@pytest.mark.parametrize(
    ("caller", "called"),
    [
        pytest.param(*pair, marks=() if pair in CALLS_OF_EACH else pytest.mark.large)
        for pair in product(CHANGES, PLACES)
    ],
)
def test_a_caller_may_modify_the_answers_of_its_calls(stage: Stage, caller: str, called: str) -> None:
    """It passes each answer to the next call, and the last one to its client."""
    change, added = CHANGES[caller]
    stage.deploy("called", PLACES[called])
    stage.deploy("caller", CALLER.format(change=change), head=CALLS)
    for number in range(8):
        check(stage.server, "caller", number, added)


def test_a_model_with_its_own_interpreter_reads_in_place_too(start: Start, repository: Path, tmp_path: Path) -> None:
    make_environment(tmp_path / "environment")
    own = parameter("EXECUTION_ENV_PATH", str(tmp_path / "environment"))
    add_python(repository, "first", PLUS, extra=own)
    add_python(repository, "second", PLUS, extra=own)
    add_ensemble(
        repository, "both", chain("first", "second"), inputs=Tensors(dims="-1"), outputs=Tensors(["OUT"], dims="-1")
    )
    server = start("--model-repository", repository)
    for number in range(6):
        check(server, "both", number, 2)
    assert shared_bytes(server, "second") >= 4 * ELEMENTS


# Fewer deaths than park a model: five in a minute.
@pytest.mark.parametrize(
    "deaths",
    [
        ("step0", "step1", "called", "caller"),
        pytest.param(
            ("step0", "step1", "called", "caller", "step2", "step1", "step0", "called"), marks=pytest.mark.large
        ),
    ],
    ids=len,
)
def test_deaths_of_processes_fail_requests_and_corrupt_no_byte(
    stage: Stage, chained: Callable[..., None], deaths: tuple[str, ...]
) -> None:
    server = stage.server
    chained(PLUS, KEEPS, PLUS, count=2)
    stage.deploy("called", PLUS)
    stage.deploy("caller", CALLER.format(change="pass"), head=CALLS, count=2)
    stop_at = time.monotonic() + 0.4 * len(deaths)
    good = {"chain": 0, "caller": 0}

    def client(model: str, number: int, added: float) -> None:
        while time.monotonic() < stop_at:
            try:
                found = ask(server, model, number)
            except InferenceServerException:
                continue
            assert np.array_equal(found[0], np.arange(number, number + ELEMENTS, dtype=np.float32) + added)
            good[model] += 1

    clients = [in_background(lambda n=n: client("chain", n, 3)) for n in range(3)]
    clients += [in_background(lambda n=n: client("caller", n, 4)) for n in range(2)]
    choose = random.Random(3)
    for model in deaths:
        time.sleep(0.25)
        with suppress(psutil.NoSuchProcess, IndexError):
            choose.choice(workers(server, model)).kill()
    for each in clients:
        each.result(90)
    assert min(good.values()) > 0
    # All processes are back, and no request is in flight.
    wait_until(lambda: not executing(server, "step0") and not executing(server, "called"), "the end of all", server)
    for model, added in (("chain", 3), ("caller", 4)):
        wait_until(
            lambda model=model: len(workers(server, model if model == "caller" else "step1")) == 2, "both", server
        )
        check(server, model, 5, added)
