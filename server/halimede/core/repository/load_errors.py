"""Why a load fails: the errors, their texts for clients and for the log, and whether another attempt can help."""

from collections.abc import Mapping, Sequence

from halimede.core.types import ErrorCode, InferenceError, internal, invalid, shortage_of, unavailable

FIRST_RETRY_PAUSE_SECS = 0.25
LONGEST_RETRY_PAUSE_SECS = 8.0


class ConfigError(InferenceError):
    """The configuration is invalid, so that no version was tried. `problems` are the parts of the message."""

    def __init__(self, code: ErrorCode, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(code, message)
        self.problems = problems or (message,)


class NoModelError(ConfigError):
    """There is no configuration, and the files do not say for which backend the model is. The server is ready without
    such a folder, as in Triton."""


class NoVersionError(ConfigError):
    """The version policy finds no version to serve."""


class VersionError(InferenceError):
    """One version could not be loaded, and therefore none of the `selected` versions."""

    def __init__(self, version: int, selected: tuple[int, ...], code: ErrorCode, message: str) -> None:
        super().__init__(code, message)
        self.version = version
        self.selected = selected


class EnsembleError(ConfigError):
    """An ensemble cannot serve: it is invalid, or does not fit the current models of its steps."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INVALID_ARG, message)


class MissingStepError(EnsembleError):
    """The model of a step does not serve, or not in the version that the step requires."""


class CircleError(EnsembleError):
    """An ensemble is a step of its own, directly or through others. `circle` has each name once."""

    def __init__(self, circle: Sequence[str]) -> None:
        super().__init__(f"circular dependency between ensembles: {' -> '.join((*circle, circle[0]))}")
        self.circle = tuple(circle)


class LeftBehindError(InferenceError):
    """The load was left behind, because the model is to be unloaded."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, "the model was unloaded while it was loading")


LoadError = ConfigError | VersionError | LeftBehindError


def client_error(name: str, error: LoadError) -> InferenceError:
    """The error for a client that requested the load of `name`. The texts are Triton's: scripts search for them."""
    found, cause = _client_error(name, error), error.__cause__
    # Memory that the code of a version does not get is its error.
    is_of_model = isinstance(error, VersionError) and isinstance(cause, MemoryError)
    if is_of_model or shortage_of(cause) is None:
        return found
    return unavailable(found.message)


def _client_error(name: str, error: LoadError) -> InferenceError:
    match error:
        case NoVersionError() | EnsembleError():
            return invalid(f"load failed for model '{name}': {error.message}")
        case ConfigError():
            # The reason follows Triton's text; Triton itself only logs it.
            return internal(f"failed to load '{name}', failed to poll from model repository: {error.message}")
        case VersionError():
            return invalid(
                f"load failed for model '{name}': version {error.version} is at UNAVAILABLE state: "
                f"{error.code.value}: {error.message};\n"
            )
        case LeftBehindError():
            return internal(f"failed to load '{name}', no version is available")


def log_text(name: str, error: LoadError) -> str:
    """The log line for a failed load of model `name`."""
    match error:
        case VersionError():
            return f"failed to load '{name}' version {error.version}: {error.code.value}: {error.message}"
        case ConfigError() if not isinstance(error, NoVersionError | EnsembleError):
            return f"Poll failed for model directory '{name}': {error.message}"
        case _:
            return f"failed to load '{name}': {error.message}"


def steps_error(ensemble: str, failures: Mapping[str, InferenceError]) -> EnsembleError:
    """Why an ensemble cannot be loaded; `failures` are the client errors of its steps' models, by name.

    The cause of each is its load error, whose cause is the root cause.
    """
    causes = {name: failure.__cause__ for name, failure in failures.items()}
    for cause in causes.values():
        if isinstance(cause, CircleError) and ensemble in cause.circle:
            at = cause.circle.index(ensemble)
            return CircleError((*cause.circle[at:], *cause.circle[:at]))
    unknown = [name for name, cause in causes.items() if cause and isinstance(cause.__cause__, LookupError)]
    if unknown:
        named = ", ".join(unknown)
        return EnsembleError(f"ensemble {ensemble} contains models that are not available or ambiguous: {named}")
    name, failure = next(iter(failures.items()))
    reason = failure.message.removeprefix(f"load failed for model '{name}': ")
    return EnsembleError(
        f"ensemble '{ensemble}' depends on '{name}' which has no loaded version. Model '{name}' loading failed with "
        f"error: {reason}"
    )


def retry_pause_secs(error: LoadError, attempt: int, retry_count: int) -> float | None:
    """How long to wait before the next attempt, after number `attempt`, from 1, has failed: twice as long each time,
    bounded. None for no other attempt: a wrong configuration stays wrong, but a file system, a device or a model may
    recover."""
    may_pass = isinstance(error, VersionError) or (
        isinstance(error, ConfigError) and isinstance(error.__cause__, OSError)
    )
    if attempt > retry_count or not may_pass:
        return None
    doublings = min(attempt - 1, 16)
    return min(FIRST_RETRY_PAUSE_SECS * 2.0**doublings, LONGEST_RETRY_PAUSE_SECS)
