"""Any ensemble and any order of answers, compared with a slow and simple evaluator.

The evaluator has no runs, scopes or counts: to evaluate a tensor, it evaluates the step that makes it, and therefore
that step's inputs. A decoupled step is evaluated once per answer.
"""

import random
import struct
import zlib
from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings

from halimede.core.ensemble.graph import Graph, make_graph
from halimede.core.ensemble.run import Acknowledge, CallStep, CancelCall, EnsembleRun, GiveAnswer
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from support.examples import Draws, drawn, examples
from support.graphs import ensemble, model, tensor


@dataclass
class Part:
    """A step and how its model behaves: `answers` is None for one that is not decoupled."""

    inputs: dict[str, str]
    outputs: dict[str, str]
    optional: set[str]
    when: tuple[str, str] | None
    answers: int | None
    fails: bool
    leaves_out: set[str]


@dataclass
class Case:
    parts: list[Part]
    given: dict[str, float]
    inputs: list[str]
    outputs: list[str]
    wanted: tuple[str, ...]
    parameters: dict[str, int]
    seed: int
    cancel_after: int | None


def case_of(draws: Draws, *, decoupled: bool) -> Case:
    inputs = [f"x{i}" for i in range(1 + draws.below(3))]
    optional = {name for name in inputs[1:] if draws.below(2)}
    tensors = list(inputs)
    # The decoupled step to which a tensor belongs, None for none.
    origin: dict[str, int | None] = dict.fromkeys(inputs)
    parts: list[Part] = []
    for i in range(1 + draws.below(8)):
        taken: dict[str, str] = {}
        belongs = None
        # The latest first, so that graphs become deep.
        for key in ("IN0", "IN1", "IN2")[: 1 + draws.below(3)]:
            usable = [t for t in reversed(tensors) if belongs is None or origin[t] in (None, belongs)]
            taken[key] = draws.pick(usable)
            belongs = origin[taken[key]] if belongs is None else belongs
        when = None
        if draws.below(4) == 2:
            usable = [t for t in tensors if belongs is None or origin[t] in (None, belongs)]
            named = draws.pick(usable)
            belongs = origin[named] if belongs is None else belongs
            when = (draws.pick(("above", "present", "parameter")), named)
        answers = draws.below(4) if decoupled and draws.below(4) == 2 else None
        outputs = {f"OUT{k}": f"t{i}{k}" for k in range(1 + draws.below(2))}
        parts.append(
            Part(
                inputs=taken,
                outputs=outputs,
                optional={key for key in taken if draws.below(2)},
                when=when,
                answers=answers,
                fails=draws.below(20) == 7,
                leaves_out={key for key in outputs if draws.below(12) == 7},
            )
        )
        tensors += outputs.values()
        origin.update(dict.fromkeys(outputs.values(), belongs if answers is None else i))
    used = {t for part in parts for t in (*part.inputs.values(), *([part.when[1]] if part.when else []))}
    inputs = [name for name in inputs if name in used]
    outputs = [t for t in tensors if t not in inputs and t in origin and t[0] == "t" and t not in used]
    outputs += [t for t in tensors if t[0] == "t" and t in used and draws.below(4) == 0]
    rest = list(outputs)
    return Case(
        parts=parts,
        given={name: draws.integer(0, 256) / 256 for name in inputs if name not in optional or draws.below(2)},
        inputs=[name + "?" if name in optional else name for name in inputs],
        outputs=outputs,
        wanted=tuple(rest.pop(draws.below(len(rest))) for _ in range(draws.below(len(outputs) + 1))),
        parameters={"go": draws.below(2)},
        seed=draws.below(1 << 16),
        cancel_after=draws.pick((None, draws.below(9))) if draws.below(10) == 4 else None,
    )


CONDITIONS = {"above": "{} > 0.4", "present": "not {}.present", "parameter": "parameters.go == 1 or {} > 0.9"}


def build(case: Case) -> Graph | None:
    """The graph; None where two decoupled steps meet, which is refused."""
    members = [
        model(
            f"m{i}",
            [key + "?" if key in part.optional else key for key in part.inputs],
            list(part.outputs),
            decoupled=part.answers is not None,
        )
        for i, part in enumerate(case.parts)
    ]
    steps = []
    for member, part in zip(members, case.parts, strict=True):
        when = [CONDITIONS[part.when[0]].format(part.when[1])] if part.when else []
        steps.append((member, part.inputs, part.outputs, *when))
    try:
        return make_graph(ensemble(steps, case.inputs, case.outputs), members)
    except InferenceError as error:
        if error.message.endswith("receives inputs originated from different decoupled models"):
            return None
        raise


def computed(step: int, inputs: dict[str, float], answer: int, key: str) -> float:
    """The output of a model for its inputs."""
    text = repr((step, sorted(inputs.items()), answer, key)).encode()
    return struct.unpack("<f", struct.pack("<f", zlib.crc32(text) % 1000 / 1000))[0]


SKIPPED, MISSING = "skipped", "missing"


class Failed(Exception):
    pass


class Slow:
    """The evaluator. `choice` has the number of the answer for each decoupled step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.maker = {t: i for i, part in enumerate(case.parts) for t in part.outputs.values()}
        self.wanted = case.wanted or tuple(case.outputs)
        self.memo: dict[object, object] = {}
        self.calls: list[tuple[int, tuple[tuple[str, float], ...]]] = []

    def needs(self, tensors) -> list[int]:
        """The steps that these tensors need, in the order of the configuration."""
        found: set[int] = set()
        waiting = list(tensors)
        while waiting:
            i = self.maker.get(waiting.pop())
            if i is not None and i not in found:
                found.add(i)
                waiting += self.tensors(i)
        return sorted(found)

    def tensors(self, i: int) -> list[str]:
        part = self.case.parts[i]
        return [*part.inputs.values(), *([part.when[1]] if part.when else [])]

    def value(self, name: str, choice: dict[int, int]):
        if name not in self.maker:
            return self.case.given.get(name, MISSING)
        i = self.maker[name]
        part = self.case.parts[i]
        inputs = self.call(i, choice)
        if inputs == SKIPPED:
            return SKIPPED
        key = next(key for key, t in part.outputs.items() if t == name)
        return MISSING if key in part.leaves_out else computed(i, inputs, choice.get(i, 0), key)

    def call(self, i: int, choice: dict[int, int]):
        """The inputs that the step is called with, or SKIPPED; Failed where its model fails."""
        before = self.needs(self.tensors(i))
        key = (i, tuple((d, k) for d, k in sorted(choice.items()) if d in before))
        if key not in self.memo:
            try:
                self.memo[key] = self._call(i, choice)
            except Failed as error:
                self.memo[key] = error
        if isinstance(self.memo[key], Failed):
            raise self.memo[key]
        return self.memo[key]

    def _call(self, i: int, choice: dict[int, int]):
        part = self.case.parts[i]
        # All of them are evaluated, independent of the first.
        inputs = {key: self.value(t, choice) for key, t in part.inputs.items()}
        named = self.value(part.when[1], choice) if part.when else None
        if any(value == SKIPPED and key not in part.optional for key, value in inputs.items()):
            return SKIPPED
        if part.when is not None and not self.holds(part.when[0], named):
            return SKIPPED
        present = {key: value for key, value in inputs.items() if isinstance(value, float)}
        self.calls.append((i, tuple(sorted(present.items()))))
        if part.fails or any(value == MISSING and key not in part.optional for key, value in inputs.items()):
            raise Failed
        return present

    def holds(self, kind: str, value) -> bool:
        present = isinstance(value, float)
        if kind == "present":
            return not present
        if kind == "above":
            return present and value > 0.4
        return self.case.parameters["go"] == 1 or (present and value > 0.9)

    def choices(self, steps: list[int]) -> list[dict[int, int]]:
        """Every way to choose an answer of each of these steps that is decoupled."""
        found: list[dict[int, int]] = [{}]
        for i in steps:
            answers = self.case.parts[i].answers
            if answers is not None:
                found = [
                    {**choice, i: k}
                    for choice in found
                    for k in range(1 if self.call(i, choice) == SKIPPED else answers)
                ]
        return found

    def run(self):
        """The answers, None where a step fails. `calls` are then those that take place unless it fails first."""
        failed = False
        for i in self.needs(self.wanted):
            try:
                choices = self.choices(self.needs(self.tensors(i)))
            except Failed:
                continue
            for choice in choices:
                try:
                    self.call(i, choice)
                except Failed:
                    failed = True
        if failed:
            return None
        answers = []
        for choice in self.choices(self.needs(self.wanted)):
            values = {name: self.value(name, choice) for name in self.wanted}
            answers.append(tuple((name, value) for name, value in values.items() if isinstance(value, float)))
        return answers


def single(data: object) -> float:
    return struct.unpack("<f", data)[0]


class Driver:
    """Answers the calls of a run, in any order, and records what happens."""

    def __init__(self, case: Case, graph: Graph) -> None:
        self.case, self.graph = case, graph
        request = InferenceRequest("e", inputs=[tensor(n, v) for n, v in case.given.items()], outputs=case.wanted)
        request.parameters = dict(case.parameters)
        self.run = EnsembleRun(graph, request)
        self.chance = random.Random(case.seed)
        slow = Slow(case)
        self.needed = {*slow.wanted, *(t for i in slow.needs(slow.wanted) for t in slow.tensors(i))}
        self.open: dict[int, tuple[int, dict[str, float], int]] = {}
        self.calls: list[tuple[int, tuple[tuple[str, float], ...]]] = []
        self.owed: Counter[int] = Counter()
        self.answers: list[InferenceResponse] = []
        self.first_error: InferenceError | None = None

    def go(self) -> None:
        self.perform(self.run.begin())
        turns = 0
        while self.open:
            if turns == self.case.cancel_after:
                self.first_error = self.first_error or InferenceError(ErrorCode.CANCELLED, "request was cancelled")
                called = len(self.calls)
                self.perform(self.run.cancel())
                assert len(self.calls) == called
                if not self.open:
                    break
            turns += 1
            call = self.chance.choice(sorted(self.open))
            self.perform(self.run.on_response(call, self.response(call)))
            self.check_held()

    def perform(self, actions) -> None:
        for action in actions:
            assert not (self.answers and self.answers[-1].final), "something after the final answer"
            match action:
                case CallStep(call, step, request):
                    assert self.first_error is None
                    inputs = {t.name: single(t.data) for t in request.inputs}
                    assert request.model_name == f"m{step}"
                    asked = {self.case.parts[step].outputs[key] for key in request.outputs}
                    assert asked <= self.needed
                    self.open[call] = (step, inputs, 0)
                    self.calls.append((step, tuple(sorted(inputs.items()))))
                case CancelCall(call):
                    assert call in self.open
                case Acknowledge(call):
                    assert call in self.open
                    self.owed[call] -= 1
                    assert self.owed[call] >= 0
                case GiveAnswer(response):
                    assert not response.final or not self.open
                    self.answers.append(response)

    def response(self, call: int) -> InferenceResponse:
        step, inputs, sent = self.open[call]
        part = self.case.parts[step]
        missing = [key for key in part.inputs if key not in inputs and key not in part.optional]
        if part.fails or missing:
            del self.open[call]
            text = f"step {step} failed"
            code = ErrorCode.NOT_FOUND
            self.first_error = self.first_error or InferenceError(code, f"in ensemble 'e', {text}")
            return InferenceResponse(f"m{step}", "1", error=InferenceError(code, text))
        outputs = [tensor(key, computed(step, inputs, sent, key)) for key in part.outputs if key not in part.leaves_out]
        if part.answers is None:
            del self.open[call]
            return InferenceResponse(f"m{step}", "1", outputs=outputs)
        if sent == part.answers:
            # Nothing else is under way: all its answers are used up.
            assert len(self.open) > 1 or self.owed[call] == 0
            del self.open[call]
            return InferenceResponse(f"m{step}", "1")
        # The last answer may be marked final; without outputs it would only be the mark.
        if sent + 1 == part.answers and outputs and self.chance.random() < 0.5:
            del self.open[call]
            return InferenceResponse(f"m{step}", "1", outputs=outputs)
        self.open[call] = (step, inputs, sent + 1)
        self.owed[call] += 1
        return InferenceResponse(f"m{step}", "1", outputs=outputs, final=False)

    def check_held(self) -> None:
        """Nothing is held that no step which is still to be called, and no answer, could use."""
        if any(part.answers is not None for part in self.case.parts):
            return
        slow = Slow(self.case)
        called = {step for step, _ in self.calls}
        skipped = set()
        for i in slow.needs(slow.wanted):
            try:
                if slow.call(i, {}) == SKIPPED:
                    skipped.add(i)
            except Failed:
                pass
        open_users = [t for i in slow.needs(slow.wanted) if i not in called | skipped for t in slow.tensors(i)]
        # A step is skipped when all that it waits for is known, so that its inputs may still be held before.
        open_users += [t for i in skipped for t in slow.tensors(i)]
        final = bool(self.answers)
        assert set(self.run.held) <= (set() if final else {*open_users, *slow.wanted})


def play(case: Case) -> None:
    graph = build(case)
    if graph is None:
        return
    slow = Slow(case)
    expected = slow.run()
    driver = Driver(case, graph)
    driver.go()

    *others, last = driver.answers
    assert last.final
    assert not any(answer.final for answer in others)
    assert driver.run.held == ()
    assert last.error == driver.first_error
    if driver.first_error is not None:
        assert Counter(driver.calls) <= Counter(slow.calls)
        return
    assert Counter(driver.calls) == Counter(slow.calls)
    given = [tuple((t.name, single(t.data)) for t in answer.outputs) for answer in driver.answers]
    if graph.decoupled and last.is_empty:
        given.pop()
    assert Counter(given) == Counter(expected)


RELAXED = settings(max_examples=examples(600), deadline=None, suppress_health_check=list(HealthCheck))


@RELAXED
@given(drawn(lambda draws: case_of(draws, decoupled=False), 230))
def test_any_ensemble_gives_what_the_slow_evaluator_gives(case):
    play(case)


@RELAXED
@given(drawn(lambda draws: case_of(draws, decoupled=True), 240))
def test_any_decoupled_ensemble_gives_what_the_slow_evaluator_gives(case):
    play(case)
