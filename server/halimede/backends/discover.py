"""Finds backends by the entry point group `halimede.backends`: ours and those of any other installed distribution."""

from functools import cache
from importlib.metadata import entry_points
from typing import cast

from halimede.backends.api import Backend
from halimede.core.types import ErrorCode, InferenceError

GROUP = "halimede.backends"


def backend_names() -> tuple[str, ...]:
    """The names of the backends that are installed, whether or not their runtimes are."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


@cache
def find_backend(name: str) -> Backend:
    """The backend of that name, one object for all who ask. INVALID_ARG when not installed, INTERNAL when broken."""
    # Sorted by value: two distributions that both name a backend are told apart in the same way on every start.
    found = sorted(entry_points(group=GROUP, name=name), key=lambda point: point.value)
    if not found:
        raise InferenceError(
            ErrorCode.INVALID_ARG,
            f"unable to find backend library for backend '{name}'; the backends that are installed: "
            f"{', '.join(backend_names())}",
        )
    try:
        return cast(Backend, found[0].load()())
    except Exception as error:
        raise InferenceError(
            ErrorCode.INTERNAL, f"unable to load backend '{name}' ({found[0].value}): {type(error).__name__}: {error}"
        ) from error
