"""The index entries of a model while it is loaded, reloaded and unloaded: lists of events."""

from halimede.core.repository.load_errors import ConfigError, LeftBehindError, VersionError
from halimede.core.repository.status import Attempt, Health, ModelStatus, finish_unload, should_serve
from halimede.core.types import ErrorCode, InferenceError, ModelIndexEntry, ModelReadyState
from halimede.core.types.server import WorkerHealth

READY, LOADING = ("READY", ""), ("LOADING", "")
WRONG = ConfigError(ErrorCode.INVALID_ARG, "nonsense")


def shown(status: ModelStatus) -> dict[str, tuple[str, str]]:
    return {e.version: (e.state.value if e.state else "", e.reason) for e in status.entries("m", {})}


def loaded(*versions: int) -> ModelStatus:
    status = ModelStatus(wanted=True)
    attempt = status.begin(versions)
    status.start(attempt, ())
    status.succeed(attempt, versions)
    return status


def broken(version: int, *selected: int) -> VersionError:
    return VersionError(version, selected, ErrorCode.INTERNAL, "broken")


def test_a_model_that_was_never_loaded_has_neither_version_nor_state() -> None:
    assert list(ModelStatus().entries("m", {})) == [ModelIndexEntry("m", "", None, "")]


def test_a_load_shows_its_versions_from_their_start_to_their_end() -> None:
    status = ModelStatus()
    attempt = status.begin((1, 2, 3))
    assert shown(status) == {"": ("", "")}
    status.start(attempt, ())
    assert shown(status) == {"1": LOADING, "2": LOADING, "3": LOADING}
    status.select(attempt, {2, 3})
    assert shown(status) == {"2": LOADING, "3": LOADING}
    status.succeed(attempt, (2, 3))
    assert shown(status) == {"2": READY, "3": READY}
    assert (2 in status, 1 in status) == (True, False)


def test_a_failed_version_names_its_error_and_the_others_name_it() -> None:
    status = ModelStatus()
    attempt = status.begin((1, 2))
    status.start(attempt, ())
    status.fail(attempt, broken(2, 1, 2))
    assert shown(status) == {
        "1": ("UNAVAILABLE", "Internal: not loaded because version 2 failed: broken"),
        "2": ("UNAVAILABLE", "Internal: broken"),
    }


def test_versions_that_were_not_selected_keep_their_state() -> None:
    status = loaded(1)
    finish_unload(status.unload(1))
    attempt = status.begin((1, 2))
    status.start(attempt, ())
    status.fail(attempt, broken(2, 2))
    assert shown(status) == {"1": ("UNAVAILABLE", "unloaded"), "2": ("UNAVAILABLE", "Internal: broken")}


def test_a_wrong_configuration_is_shown_where_there_is_no_version() -> None:
    status = ModelStatus()
    attempt = status.begin((1,))
    status.start(attempt, ())
    status.fail(attempt, WRONG)
    assert shown(status) == {"": ("UNAVAILABLE", "nonsense")}
    assert not status.is_known()


def test_a_failed_reload_leaves_the_versions_that_serve() -> None:
    status = loaded(1)
    attempt = status.begin((1, 2))
    status.start(attempt, (1,))
    assert shown(status) == {"1": READY, "2": LOADING}
    status.fail(attempt, broken(2, 1, 2))
    reason = "reload failed, the loaded one keeps serving: Internal: broken"
    assert shown(status) == {"1": ("READY", reason), "2": ("UNAVAILABLE", "Internal: broken")}
    status.forget_failures((1,))
    assert shown(status) == {"1": READY}


def test_unreadable_reload_is_shown_at_the_serving_versions() -> None:
    status = loaded(1)
    status.fail(Attempt(), WRONG)
    assert shown(status) == {"1": ("READY", "reload failed, the loaded one keeps serving: Invalid argument: nonsense")}


def test_a_load_that_is_left_behind_fails_in_all_of_its_versions() -> None:
    status = ModelStatus()
    attempt = status.begin((1, 2))
    status.start(attempt, ())
    status.fail(attempt, LeftBehindError())
    assert set(shown(status).values()) == {("UNAVAILABLE", "Unavailable: the model was unloaded while it was loading")}


def test_an_unloaded_version_can_be_loaded_again_before_it_has_ended() -> None:
    status = loaded(1)
    leaving = status.unload(1)
    assert shown(status) == {"1": ("UNLOADING", "")}
    attempt = status.begin((1,))
    status.start(attempt, ())
    status.succeed(attempt, (1,))
    assert finish_unload(leaving)
    assert shown(status) == {"1": READY}
    assert not finish_unload(leaving)


def test_a_failed_load_makes_a_model_wanted_only_if_it_was() -> None:
    for was_wanted in (False, True):
        status = ModelStatus()
        status.end((), was_wanted=was_wanted)
        assert (status.wanted, status.is_known()) == (was_wanted, was_wanted)
    status.end((1,), was_wanted=False)
    assert status.wanted


def test_an_unload_ends_what_a_load_asked_for() -> None:
    status = loaded(1)
    status.asked, status.failure, status.problem = True, "old", "misfit"
    assert status.unwant()
    assert status == ModelStatus(versions=status.versions)
    assert not status.unwant()


def test_misfit_ensemble_is_wanted_and_one_without_a_step_is_not() -> None:
    status = loaded(1)
    finish_unload(status.unload(1))
    status.withdraw("Invalid argument: misfit")
    assert (status.wanted, shown(status)) == (True, {"1": ("UNAVAILABLE", "Invalid argument: misfit")})
    status.withdraw("")
    assert (status.wanted, shown(status)) == (False, {"1": ("UNAVAILABLE", "unloaded")})
    status.serve((1, 2))
    assert (status.wanted, shown(status)) == (True, {"1": READY, "2": READY})


def test_version_with_parked_instances_is_unavailable_with_their_reason() -> None:
    refusal = InferenceError(ErrorCode.UNAVAILABLE, "died too often")
    workers = WorkerHealth("killed", out_of_memory=True)
    entries = list(loaded(1, 2).entries("m", {1: Health(refusal, workers), 2: Health(None, workers)}))
    assert entries == [
        ModelIndexEntry("m", "1", ModelReadyState.UNAVAILABLE, "Unavailable: died too often", workers),
        ModelIndexEntry("m", "2", ModelReadyState.READY, "", workers),
    ]


def test_a_model_in_several_repositories_is_unavailable() -> None:
    (entry,) = ModelStatus().entries("m", {}, is_duplicate=True)
    assert (entry.state, bool(entry.reason)) == (ModelReadyState.UNAVAILABLE, True)
    assert list(loaded(1).entries("m", {}, is_duplicate=True)) == [ModelIndexEntry("m", "1", ModelReadyState.READY)]


def test_unloaded_versions_and_unknown_models_should_not_serve() -> None:
    unavailable = ModelReadyState.UNAVAILABLE
    entries = [(None, ""), (unavailable, "unloaded"), (unavailable, "broken"), (ModelReadyState.READY, "")]
    assert [should_serve(ModelIndexEntry("m", "1", *each)) for each in entries] == [False, False, True, True]
