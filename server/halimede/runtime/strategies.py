"""Find batching strategies: installed classes, by the entry point group `halimede.batching_strategies`.

Only installed code is used, never a file of a model: a strategy runs inside the server's process.
"""

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import cast

from halimede.core.config.batching_options import BATCHING_STRATEGY, STRATEGY_GROUP, batching_strategy_name
from halimede.core.config.model_config import ModelConfig
from halimede.core.schedule.strategy import BatchingStrategy
from halimede.core.types.error import clip, internal, invalid
from halimede.runtime.repository import ModelEntry

LIBRARY = "batchstrategy.so"


def find_strategy(config: ModelConfig) -> EntryPoint | None:
    """The entry point of the model's strategy; None if none is configured. INVALID_ARG if it is not installed."""
    name = batching_strategy_name(config)
    if not name:
        return None
    found = sorted(entry_points(group=STRATEGY_GROUP, name=name), key=lambda point: point.value)
    if not found:
        names = sorted({point.name for point in entry_points(group=STRATEGY_GROUP)})
        raise invalid(
            f"model '{clip(config.name)}': parameter '{BATCHING_STRATEGY}' is '{clip(name)}', which is not installed; "
            f"the entry points of group '{STRATEGY_GROUP}' are: {', '.join(names) or 'none'}"
        )
    # Sorted by value: if two distributions have the name, every load must choose the same one.
    return found[0]


def make_strategy(config: ModelConfig) -> BatchingStrategy | None:
    """The strategy for one version of the model; None if its configuration names none. INVALID_ARG, INTERNAL."""
    point = find_strategy(config)
    if point is None:
        return None
    try:
        return cast(BatchingStrategy, point.load()(config))
    except Exception as error:
        raise internal(
            f"model '{clip(config.name)}': unable to make batching strategy '{point.name}' ({point.value}): "
            f"{type(error).__name__}: {error}"
        ) from error


def strategy_libraries(
    entry: ModelEntry, config: ModelConfig, versions: tuple[int, ...], backend_directory: Path
) -> list[str]:
    """The C libraries that Triton would load as strategies, in its order."""
    folders = [*(entry.directory / str(version) for version in versions), entry.directory]
    if config.backend:
        folders.append(backend_directory / config.backend)
    return [str(path) for folder in folders if (path := folder / LIBRARY).is_file()]
