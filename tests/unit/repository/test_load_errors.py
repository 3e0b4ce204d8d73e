"""The texts of failed loads for clients and the log, and whether they are retried."""

import pytest

from halimede.core.repository.load_errors import (
    CircleError,
    ConfigError,
    EnsembleError,
    LeftBehindError,
    LoadError,
    NoVersionError,
    VersionError,
    client_error,
    log_text,
    retry_pause_secs,
    steps_error,
)
from halimede.core.types import ErrorCode, InferenceError

VERSION = VersionError(2, (1, 2), ErrorCode.INTERNAL, "broken")
CONFIG = ConfigError(ErrorCode.INVALID_ARG, "nonsense")


@pytest.mark.parametrize(
    ("error", "code", "client", "log"),
    [
        (
            VERSION,
            ErrorCode.INVALID_ARG,
            "load failed for model 'm': version 2 is at UNAVAILABLE state: Internal: broken;\n",
            "failed to load 'm' version 2: Internal: broken",
        ),
        (
            CONFIG,
            ErrorCode.INTERNAL,
            "failed to load 'm', failed to poll from model repository: nonsense",
            "Poll failed for model directory 'm': nonsense",
        ),
        (
            NoVersionError(ErrorCode.INVALID_ARG, "no version"),
            ErrorCode.INVALID_ARG,
            "load failed for model 'm': no version",
            "failed to load 'm': no version",
        ),
        (
            EnsembleError("misfit"),
            ErrorCode.INVALID_ARG,
            "load failed for model 'm': misfit",
            "failed to load 'm': misfit",
        ),
        (
            LeftBehindError(),
            ErrorCode.INTERNAL,
            "failed to load 'm', no version is available",
            "failed to load 'm': the model was unloaded while it was loading",
        ),
    ],
)
def test_each_kind_of_failure_has_its_texts(error: LoadError, code: ErrorCode, client: str, log: str) -> None:
    assert client_error("m", error) == InferenceError(code, client)
    assert log_text("m", error) == log


def caused(error: LoadError, name: str, cause: Exception | None = None) -> InferenceError:
    """The client error of a load, as the shell raises it."""
    error.__cause__ = cause
    failure = client_error(name, error)
    failure.__cause__ = error
    return failure


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (ConfigError(ErrorCode.INTERNAL, "x"), MemoryError(), ErrorCode.UNAVAILABLE),
        (ConfigError(ErrorCode.INTERNAL, "x"), RuntimeError("can't start new thread"), ErrorCode.UNAVAILABLE),
        (ConfigError(ErrorCode.INTERNAL, "x"), RuntimeError("a fault"), ErrorCode.INTERNAL),
        (VersionError(1, (1,), ErrorCode.INTERNAL, "x"), RuntimeError("can't start new thread"), ErrorCode.UNAVAILABLE),
        # The memory that the model's own code does not get.
        (VersionError(1, (1,), ErrorCode.INTERNAL, "x"), MemoryError(), ErrorCode.INVALID_ARG),
    ],
    ids=lambda value: repr(value) if isinstance(value, Exception) else "",
)
def test_a_load_for_which_the_server_lacks_something_is_unavailable(
    error: LoadError, cause: Exception, code: ErrorCode
) -> None:
    assert caused(error, "m", cause).code is code


def test_an_ensemble_names_the_step_that_failed_and_why() -> None:
    assert steps_error("e", {"m": caused(VERSION, "m")}).message == (
        "ensemble 'e' depends on 'm' which has no loaded version. Model 'm' loading failed with error: "
        "version 2 is at UNAVAILABLE state: Internal: broken;\n"
    )


def test_an_ensemble_names_all_steps_that_no_repository_has() -> None:
    gone = [caused(ConfigError(ErrorCode.INTERNAL, "gone"), name, LookupError()) for name in ("a", "b")]
    failures = {"m": caused(VERSION, "m"), "a": gone[0], "b": gone[1]}
    expected = "ensemble e contains models that are not available or ambiguous: a, b"
    assert steps_error("e", failures).message == expected


def test_circle_is_reported_from_the_ensemble_on() -> None:
    failure = caused(CircleError(("b", "e", "a")), "b")
    error = steps_error("e", {"m": caused(VERSION, "m"), "b": failure})
    assert isinstance(error, CircleError)
    assert error.circle == ("e", "a", "b")
    assert not isinstance(steps_error("other", {"b": failure}), CircleError)


def unreadable() -> ConfigError:
    error = ConfigError(ErrorCode.INTERNAL, "disk")
    error.__cause__ = OSError()
    return error


@pytest.mark.parametrize(
    ("error", "pause"),
    [(VERSION, 0.25), (unreadable(), 0.25), (CONFIG, None), (EnsembleError("misfit"), None), (LeftBehindError(), None)],
)
def test_only_failures_that_may_pass_are_tried_again(error: LoadError, pause: float | None) -> None:
    assert retry_pause_secs(error, 1, 1) == pause
    assert retry_pause_secs(error, 1, 0) is None


def test_the_pause_between_two_attempts_doubles_and_is_bounded() -> None:
    attempts = (1, 2, 3, 6, 7, 10**9)
    assert [retry_pause_secs(VERSION, attempt, 10**9) for attempt in attempts] == [0.25, 0.5, 1, 8, 8, 8]
    assert retry_pause_secs(VERSION, 3, 2) is None
