"""Parameters and settings that nobody reads, most likely because of a typing mistake: they are named in a warning."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from halimede.core.config.batching_options import (
    BATCHING_STRATEGY,
    PRIORITY_AGING_MICROSECONDS,
    TRITON_BATCH_STRATEGY_PATH,
)
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.padding import BATCH_SIZES, PADDING, parameter_path
from halimede.core.config.process_options import (
    BLS_TIMEOUT_MS,
    EXECUTION_TIMEOUT_MS,
    INTRA_OP_THREAD_COUNT,
    ISOLATION,
    MAX_CONCURRENCY,
    SPIN,
    STRICT_OUTPUTS,
)
from halimede.core.types import Problem
from halimede.core.types.error import clip

SERVER_PARAMETERS = (
    BATCHING_STRATEGY,
    BATCH_SIZES,
    BLS_TIMEOUT_MS,
    EXECUTION_TIMEOUT_MS,
    INTRA_OP_THREAD_COUNT,
    ISOLATION,
    MAX_CONCURRENCY,
    PADDING,
    PRIORITY_AGING_MICROSECONDS,
    SPIN,
    STRICT_OUTPUTS,
    TRITON_BATCH_STRATEGY_PATH,
)
"""Parameters of a model of any backend."""


def unknown_parameters(config: ModelConfig, known: Sequence[str]) -> tuple[Problem, ...]:
    """Notes on the parameters that neither the server nor the backend has. `known` are the backend's.

    None for a model with a batching strategy, whose code may read any parameter.
    """
    if BATCHING_STRATEGY in config.parameters:
        return ()
    names = (*SERVER_PARAMETERS, *known)
    return tuple(
        Problem(
            f"parameter '{clip(name)}' has no effect: backend '{clip(config.backend)}' has no such parameter{hint}",
            parameter_path(name),
        )
        for name, hint in _unknown(config.parameters, names)
    )


def unknown_settings(backend: str, settings: Iterable[str], known: Sequence[str]) -> Iterator[str]:
    """Warnings of `--backend-config` settings that the backend does not have; `backend` is "" for all backends."""
    of = f"backend '{clip(backend)}' has" if backend else "the backends have"
    for name, hint in _unknown(settings, known):
        given = f"{clip(backend)},{clip(name)}" if backend else clip(name)
        yield f"--backend-config={given} has no effect: {of} no such setting{hint}"


def _unknown(names: Iterable[str], known: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The unknown names, with a hint each. A known name that ends in `*` stands for all that begin so."""
    exact = {each.lower(): each for each in known if not each.endswith("*")}
    starts = tuple(each.removesuffix("*") for each in known if each.endswith("*"))
    for name in names:
        if name in known or name.startswith(starts):
            continue
        near = get_close_matches(name.lower(), exact, n=1)
        yield name, f"; did you mean '{exact[near[0]]}'?" if near else ""
