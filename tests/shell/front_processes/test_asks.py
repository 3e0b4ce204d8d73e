"""ASK and TOLD: what a front end asks the core besides inferences."""

import ast
import asyncio
import json
import struct
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halimede import front_processes
from halimede.channel.frames import FrameError
from halimede.core.config.model_view import ModelView
from halimede.core.config.read import read_pbtxt
from halimede.core.types import (
    Device,
    DeviceKind,
    DeviceMemory,
    DeviceReport,
    DeviceState,
    ErrorCode,
    InferenceError,
    ModelIndexEntry,
    ModelReadyState,
    PlacedInstances,
)
from halimede.core.types.kv_cache import KvCache
from halimede.core.types.server import WorkerHealth
from halimede.core.types.statistics import (
    BatchStatistics,
    Duration,
    InferStatistics,
    ModelStatistics,
    ResponseStatistics,
)
from halimede.facade.server import Server
from halimede.front_processes.asks import (
    DEVICES,
    IS_MODEL_READY,
    KV_CACHE,
    LOAD_MODEL,
    MODEL,
    QUESTIONS,
    REPOSITORY_INDEX,
    STATISTICS,
    UNLOAD_MODEL,
    AnyQuestion,
    answer,
    decode_ask,
    decode_told,
    encode_ask,
    encode_told,
    told_of,
)
from halimede.front_processes.frames import FrontFrame
from halimede.frontends.http.protocol import INTERNAL_ERROR
from support.config_seeds import SEEDS
from support.configs import CONFIGURATION_BYTES, configuration
from support.examples import drawn, examples
from support.frames import U32, body_of
from support.played_core import view

TEXTS = st.text(max_size=9)
VALUES = st.booleans() | st.integers(-(2**63), 2**64) | TEXTS | st.binary(max_size=20)
PARAMETERS = st.dictionaries(TEXTS, VALUES, max_size=3)


def asked(number: int, question: AnyQuestion, arguments: tuple[Any, ...]) -> tuple[int, AnyQuestion, tuple[Any, ...]]:
    return decode_ask(body_of(encode_ask(number, question, arguments), FrontFrame.ASK))


def told(question: AnyQuestion, frame: bytes) -> tuple[int, Any]:
    number, document = decode_told(body_of(frame, FrontFrame.TOLD))
    return number, told_of(question, document)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda question: str(question.number))
def test_types_of_a_question_are_those_of_the_method(question: AnyQuestion):
    hints = get_type_hints(question.method(cast("Server", Server)))
    answers = hints.pop("return")

    assert (question.arguments, question.answer) == (tuple[tuple(hints.values())], answers)  # type: ignore[misc]


def test_each_method_that_waits_has_a_question():
    names = {name for name, method in vars(Server).items() if iscoroutinefunction(method)}
    methods = [question.method(cast("Server", Server)) for question in QUESTIONS.values() if question is not MODEL]

    assert sorted(method.__name__ for method in methods) == sorted(names)


@given(U32, st.sampled_from([MODEL, IS_MODEL_READY, STATISTICS]), TEXTS, TEXTS)
def test_a_question_about_a_version_arrives(number: int, question: AnyQuestion, name: str, version: str):
    assert asked(number, question, (name, version)) == (number, question, (name, version))


@given(TEXTS, PARAMETERS)
def test_parameters_of_a_load_arrive(name: str, parameters: dict[str, Any]):
    number, question, arguments = asked(1, LOAD_MODEL, (name, parameters))

    assert (number, question) == (1, LOAD_MODEL)
    assert repr(arguments) == repr((name, parameters)), "True is not 1"


@pytest.mark.parametrize(
    ("question", "arguments"),
    [(KV_CACHE, ("m",)), (REPOSITORY_INDEX, (True,)), (DEVICES, ()), (UNLOAD_MODEL, ("m", False))],
)
def test_other_questions_arrive(question: AnyQuestion, arguments: tuple[Any, ...]):
    assert asked(7, question, arguments) == (7, question, arguments)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(configuration, CONFIGURATION_BYTES), TEXTS)
def test_a_view_of_any_configuration_arrives_as_it_is(config: Any, label: str):
    told_view = ModelView("m", "2", ("1", "2"), config, {"out": (label, "")})

    assert told(MODEL, encode_told(1, MODEL, told_view)) == (1, told_view)


def test_views_of_written_configurations_arrive_as_they_are():
    views = [ModelView("m", "1", ("1",), read_pbtxt(text).config, {}) for text in SEEDS.values()]

    assert [told(MODEL, encode_told(1, MODEL, each))[1] for each in views] == views


def numbered(at: int) -> Duration:
    return Duration(at, 1000 * at)


STATISTICS_OF_TWO = [
    ModelStatistics("m", "1"),
    ModelStatistics(
        "größe",
        "2",
        1_700_000_000_000,
        2**63,
        5,
        InferStatistics(*map(numbered, range(8))),
        [BatchStatistics(4, *map(numbered, range(8, 11)))],
        [ResponseStatistics(*map(numbered, range(11, 17))), ResponseStatistics()],
    ),
]
INDEX = [
    ModelIndexEntry("never loaded"),
    ModelIndexEntry("m", "1", ModelReadyState.READY, "", WorkerHealth("exit code 1", out_of_memory=True)),
]
SLICE = Device(DeviceKind.MIG, 1, "MIG-1", "H100", 10 << 30, (9, 0), "1g.10gb")
REPORT = DeviceReport(
    (
        DeviceState(SLICE, DeviceMemory(3, 1, 4), (PlacedInstances("m", "1", 2), PlacedInstances("n", "1", 1))),
        DeviceState(Device(DeviceKind.GPU, 0, "GPU-0")),
    ),
    1 << 40,
)


@pytest.mark.parametrize(
    ("question", "value"),
    [
        (IS_MODEL_READY, True),
        (KV_CACHE, KvCache(1.5, float("inf"), 64)),
        (KV_CACHE, None),
        (STATISTICS, STATISTICS_OF_TWO),
        (REPOSITORY_INDEX, INDEX),
        (DEVICES, REPORT),
        (DEVICES, DeviceReport(())),
        (LOAD_MODEL, None),
    ],
)
def test_other_answers_arrive_as_they_are(question: AnyQuestion, value: object):
    assert told(question, encode_told(9, question, value)) == (9, value)


@given(U32, st.sampled_from(list(ErrorCode)), TEXTS)
def test_an_error_arrives_as_it_was_told(number: int, code: ErrorCode, text: str):
    error = InferenceError(code, text)
    assert told(LOAD_MODEL, encode_told(number, LOAD_MODEL, error)) == (number, error)


def ask(question: AnyQuestion, document: Any) -> memoryview:
    return memoryview(struct.pack("<IB", 1, question.number) + json.dumps(document).encode())


@pytest.mark.parametrize(
    "body",
    [
        memoryview(b""),
        memoryview(b"\1\0\0\0"),
        memoryview(b"\1\0\0\0\1"),
        memoryview(b"\1\0\0\0\0[]"),
        memoryview(b"\1\0\0\0\xff[]"),
        memoryview(b"\1\0\0\0\1\xff"),
        memoryview(b"\1\0\0\0\1" + b"[" * 100_000),
        ask(MODEL, 1),
        ask(MODEL, {}),
        ask(MODEL, "mv"),
        ask(MODEL, []),
        ask(MODEL, ["m"]),
        ask(MODEL, ["m", "1", "2"]),
        ask(MODEL, ["m", 1]),
        ask(MODEL, ["m", None]),
        ask(MODEL, [["m"], ""]),
        ask(REPOSITORY_INDEX, [1]),
        ask(LOAD_MODEL, ["m", {}]),
        ask(LOAD_MODEL, ["m", [["a"]]]),
        ask(LOAD_MODEL, ["m", [["a", "b"]]]),
        ask(LOAD_MODEL, ["m", [["a", None]]]),
        ask(LOAD_MODEL, ["m", [["a", ["float", 1.0]]]]),
        ask(LOAD_MODEL, ["m", [["a", [["int"], 1]]]]),
        ask(LOAD_MODEL, ["m", [["a", ["x" * 100_000, 1]]]]),
        ask(LOAD_MODEL, ["m", [["a", ["int", True]]]]),
        ask(LOAD_MODEL, ["m", [["a", ["bytes", "x"]]]]),
        ask(LOAD_MODEL, ["m", [["a", ["bytes", 5]]]]),
    ],
    ids=lambda body: bytes(body[4:30]).decode(errors="replace"),
)
def test_what_is_not_a_question_is_refused_with_a_frame_error(body: memoryview):
    with pytest.raises(FrameError) as caught:
        decode_ask(body)

    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("question", [MODEL, IS_MODEL_READY])
def test_arguments_above_the_limit_are_neither_asked_nor_taken(question: AnyQuestion):
    """The core would end a front end for a frame that is too large."""
    name = "m" * (question.max_bytes - len('["", ""]'))
    assert asked(1, question, (name, ""))[2] == (name, "")

    with pytest.raises(InferenceError, match=f"at most {question.max_bytes} are taken"):
        encode_ask(1, question, (name, "1"))
    with pytest.raises(FrameError, match="arguments of"):
        decode_ask(ask(question, [name, "1"]))


@dataclass
class Core:
    """Answers, or fails in the ways that a core may."""

    done: list[str] = field(default_factory=list)

    def model(self, name: str, version: str = "") -> ModelView:
        if name == "large":
            raise MemoryError
        if name != "m":
            raise InferenceError(ErrorCode.NOT_FOUND, f"no {name}")
        return view(name, version)

    async def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        if name == "broken":
            raise RuntimeError("a fault of the core")
        return STATISTICS_OF_TWO

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        self.done.append(f"{name} {unload_dependents}")


def answered(question: AnyQuestion, *arguments: Any, core: Core | None = None) -> Any:
    frame = asyncio.run(answer(cast("Server", core or Core()), 2, question, arguments))
    number, found = told(question, frame)
    assert number == 2
    return found


def test_the_core_answers():
    core = Core()
    assert answered(MODEL, "m", "1", core=core) == view("m", "1")
    assert answered(STATISTICS, "", "", core=core) == STATISTICS_OF_TWO
    assert answered(UNLOAD_MODEL, "m", True, core=core) is None
    assert core.done == ["m True"]


def test_errors_of_the_core_reach_the_client():
    assert answered(MODEL, "other", "") == InferenceError(ErrorCode.NOT_FOUND, "no other")


def test_a_fault_of_the_core_is_an_answer():
    """Without one the client would wait for ever."""
    assert answered(STATISTICS, "broken", "") == InferenceError(ErrorCode.INTERNAL, INTERNAL_ERROR)


def test_what_the_core_lacks_is_unavailable_for_the_client():
    assert answered(MODEL, "large", "").code is ErrorCode.UNAVAILABLE


def test_the_room_calls_nothing_by_a_name_that_was_sent():
    """An import contract forbids pickle."""
    modules = list(Path(front_processes.__path__[0]).glob("*.py"))
    called = {
        node.func.id
        for module in modules
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }

    assert "encode_frame" in called, "otherwise nothing would be found"
    assert called & {"getattr", "eval", "exec", "methodcaller", "__import__"} == set()
