"""What a front-end process knows of the models, and asks the core for."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from halimede.core.config.model_view import ModelView
from halimede.core.types import ErrorCode, InferenceError
from halimede.facade.lookup import ModelLookup
from halimede.front_processes.asks import MODEL
from halimede.front_processes.questions import MAX_KNOWN_MODELS, MAX_UNANSWERED
from support.loop_thread import LoopThread
from support.played_core import PlayedCore, view

UNKNOWN = InferenceError(ErrorCode.NOT_FOUND, "Request for unknown model: 'm' is not found")


@pytest.fixture
def core() -> Iterator[PlayedCore]:
    made = PlayedCore(LoopThread())
    yield made
    made.close()
    assert made.thread.log == []


class Client:
    """Asks for a model on the loop's thread, and notes what it gets."""

    def __init__(self, core: PlayedCore, name: str = "m", version: str = "") -> None:
        self.core = core
        self.got: list[ModelView | InferenceError] = []
        found = core.thread.call(lambda: core.server.model(name, version))
        if isinstance(found, ModelLookup):
            self.leave = core.thread.call(lambda: found.wait(self.got.append))
        else:
            self.got.append(found)

    def wait(self) -> "Client":
        self.core.thread.wait_until(lambda: bool(self.got))
        return self


def known(core: PlayedCore, name: str = "m") -> ModelView:
    """A model that the front end has asked for."""
    client = Client(core, name)
    number, question, arguments = core.asked()
    assert (question, arguments) == (MODEL, (name, ""))
    core.tell(number, view(name))
    (found,) = client.wait().got
    assert isinstance(found, ModelView)
    return found


def test_a_model_is_asked_for_once_for_all_who_wait_and_is_known_then(core: PlayedCore):
    clients = [Client(core) for _ in range(3)]
    number, *_ = core.asked()
    assert [client.got for client in clients] == [[], [], []]

    core.tell(number, view("m"))

    found = [client.wait().got for client in clients]
    assert found == [[view("m")]] * 3
    assert Client(core).got == found[0], "at once"


def test_a_model_that_did_not_change_keeps_its_view_after_others_have(core: PlayedCore):
    before = known(core)
    core.page.note_change()

    assert known(core) is before


def test_an_answer_from_before_a_change_is_not_for_those_who_come_after_it(core: PlayedCore):
    early = Client(core)
    first, *_ = core.asked()
    core.page.note_change()
    late = Client(core)
    second, *_ = core.asked()

    core.tell(first, view("m", "1"))
    assert early.wait().got == [view("m", "1")]
    later = Client(core)
    assert (late.got, later.got) == ([], [])
    core.tell(second, view("m", "2"))
    assert [each.wait().got for each in (late, later, Client(core))] == [[view("m", "2")]] * 3
    assert early.got == [view("m", "1")]


def test_an_answer_before_which_the_models_changed_is_not_kept(core: PlayedCore):
    early = Client(core)
    number, *_ = core.asked()
    core.page.note_change()
    core.tell(number, view("m"))
    assert early.wait().got == [view("m")]

    assert Client(core).got == []


def test_an_error_is_for_those_who_wait_and_is_not_kept(core: PlayedCore):
    for _ in range(2):
        clients = [Client(core), Client(core)]
        number, *_ = core.asked()
        core.tell(number, UNKNOWN)
        assert [client.wait().got for client in clients] == [[UNKNOWN], [UNKNOWN]]
    assert known(core) == view("m")


def test_a_client_that_has_left_gets_nothing(core: PlayedCore):
    gone, stays = Client(core), Client(core)
    number, *_ = core.asked()
    core.thread.call(gone.leave)
    core.thread.call(gone.leave)

    core.tell(number, view("m"))

    assert (stays.wait().got, gone.got) == ([view("m")], [])


def test_one_of_those_who_wait_may_end_the_wait_of_the_next(core: PlayedCore):
    got: list[Any] = []

    def wait(lookup: ModelLookup) -> None:
        def first(found: Any) -> None:
            got.append(found)
            leave()

        lookup.wait(first)
        leave = lookup.wait(partial(got.append))
        lookup.wait(got.append)

    core.thread.call(lambda: wait(core.server.model("m")))  # type: ignore[arg-type]
    core.tell(core.asked()[0], view("m"))

    core.thread.wait_until(lambda: len(got) == 2)
    assert got == [view("m")] * 2


def test_names_without_a_model_leave_nothing(core: PlayedCore):
    before = repr(core.server)
    for number in range(100):
        client = Client(core, f"m{number}")
        core.tell(core.asked()[0], UNKNOWN)
        client.wait()
    assert repr(core.server) == before


def test_spellings_of_a_version_are_kept_up_to_a_number(core: PlayedCore):
    def ask(numbers: range) -> None:
        for number in numbers:
            core.server.model("m", f"{number:09}")

    for numbers in (range(MAX_KNOWN_MODELS), range(MAX_KNOWN_MODELS, MAX_KNOWN_MODELS + 1)):
        core.thread.call(lambda numbers=numbers: ask(numbers))
        for _ in numbers:
            core.tell(core.asked()[0], view("m"))
    core.thread.wait_until(lambda: "unanswered=0" in repr(core.server))
    assert f"models={MAX_KNOWN_MODELS + 1} " in repr(core.server)

    core.thread.call(lambda: ask(range(1)))

    assert "models=1 " in repr(core.server)


def test_questions_that_a_core_leaves_unanswered_are_bounded(core: PlayedCore):
    """As when it hangs: the names need not be those of models, and who asks may leave."""

    def ask() -> str:
        for number in range(MAX_UNANSWERED + 1):
            try:
                core.server.model(f"m{number}")
            except InferenceError as error:
                return f"{number} {error.code.name}"
        return "no limit"

    assert core.thread.call(ask) == f"{MAX_UNANSWERED} UNAVAILABLE"
    with pytest.raises(InferenceError, match="try again later"):
        core.thread.run(core.server.statistics())

    core.tell(core.asked()[0], UNKNOWN)
    core.thread.wait_until(lambda: f"unanswered={MAX_UNANSWERED - 1}" in repr(core.server))
    assert Client(core, "new").got == []


def test_an_answer_that_nobody_waits_for_is_dropped(core: PlayedCore):
    asking = core.thread.call(lambda: core.thread.loop.create_task(core.server.statistics()))
    number, *_ = core.asked()
    core.thread.call(asking.cancel)
    core.thread.wait_until(asking.done)

    core.tell(number, UNKNOWN)

    assert known(core) == view("m")


SECOND = 1_000_000_000


def lives_at(core: PlayedCore, checks: list[tuple[float, bool]]) -> list[bool]:
    """Whether the core is live after each check, which has a time in seconds and whether the core has beaten before."""
    found = []
    for at, has_beaten in checks:
        if has_beaten:
            core.page.beat_core()
        core.life.check(int(at * SECOND))
        found.append(core.server.is_live())
    return found


def test_a_core_that_does_not_beat_for_the_limit_is_neither_live_nor_ready(core: PlayedCore):
    core.page.publish_state(is_ready=True, is_draining=False)
    steps = [(0.25 * number, number < 4) for number in range(14)]
    assert lives_at(core, steps) == [at < 2.75 for at, _ in steps]
    assert not core.server.is_ready()

    core.page.beat_core()

    assert (core.server.is_live(), core.server.is_ready()) == (True, True), "at its next beat"
    core.life.check(4 * SECOND)
    assert core.server.is_live()


def test_a_core_that_was_suspended_with_its_front_end_does_not_hang(core: PlayedCore):
    assert lives_at(core, [(0, True), (3600, False), (3600.25, True), (7200, False), (7200.25, False)]) == [True] * 5
