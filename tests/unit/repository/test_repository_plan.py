from halimede.core.repository.plan import Load, LoadModel, Missing, Startup, Unload, UnloadModel, plan
from halimede.core.types import ErrorCode, InferenceError

ON_DISK = {"b": "b1", "a": "a1", "c": "c1"}


def missing(name: str) -> Missing:
    return Missing(
        name,
        InferenceError(
            ErrorCode.INTERNAL,
            f"failed to load '{name}', failed to poll from model repository: no repository has a model directory of "
            "that name",
        ),
    )


def test_at_startup_everything_is_loaded():
    assert plan(ON_DISK, {}, Startup()) == (Load("a", "a1"), Load("b", "b1"), Load("c", "c1"))


def test_at_startup_the_named_models_are_loaded_and_absent_ones_reported():
    assert plan(ON_DISK, {}, Startup(("c", "ghost", "a", "c"))) == (
        Load("a", "a1"),
        Load("c", "c1"),
        missing("ghost"),
    )
    assert plan(ON_DISK, {}, Startup(())) == ()


def test_a_model_is_loaded_when_it_is_new_or_changed_and_not_otherwise():
    assert plan(ON_DISK, {}, LoadModel("a")) == (Load("a", "a1"),)
    assert plan(ON_DISK, {"a": "a0"}, LoadModel("a")) == (Load("a", "a1"),)
    assert plan(ON_DISK, {"a": "a1"}, LoadModel("a")) == ()


def test_a_model_that_vanished_from_disk_cannot_be_loaded_again():
    assert plan(ON_DISK, {"ghost": "g1"}, LoadModel("ghost")) == (missing("ghost"),)


def test_only_what_is_loaded_is_unloaded():
    assert plan(ON_DISK, {"a": "a1"}, UnloadModel("a")) == (Unload("a"),)
    assert plan({}, {"a": "a1"}, UnloadModel("a")) == (Unload("a"),)
    assert plan(ON_DISK, {}, UnloadModel("a")) == ()
    assert plan(ON_DISK, {}, UnloadModel("ghost")) == ()


def test_a_fulfilled_wish_asks_for_nothing_more():
    assert plan(ON_DISK, ON_DISK, Startup()) == ()
    assert plan({}, {}, UnloadModel("a")) == ()


def test_a_long_name_is_cut_in_the_error():
    (step,) = plan({}, {}, LoadModel("n" * 10_000))

    assert isinstance(step, Missing)
    assert len(step.error.message) < 400
