"""Merge the configuration of a fetched model: the plan's values override those of its directory. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.read import ParsedConfig, read_config
from halimede.core.config.write import to_pbtxt
from halimede.core.repository.layout import PLATFORMS
from halimede.fetch.errors import FetchError
from halimede.fetch.tree import named
from halimede_spec.fetch_exit import FetchExit
from halimede_spec.fetch_plan import FORMATS

PARAMETERS = "parameters"


@dataclass(frozen=True, slots=True)
class MadeConfig:
    """`text` is the config.pbtxt to write; None keeps the directory's own configuration, or none, unchanged."""

    config: ModelConfig
    text: bytes | None


def read_own(filename: str, content: bytes, where: str) -> ParsedConfig:
    """The directory's configuration; NOT_A_MODEL with all its problems if it is invalid."""
    parsed = read_config(filename, content)
    if parsed.problems:
        declared = named([f"{filename}:{problem}" for problem in parsed.problems], "; ")
        raise FetchError(FetchExit.NOT_A_MODEL, f"{where}: {declared}")
    return parsed


def make_config(own: ParsedConfig | None, over: ParsedConfig | None, name: str, form: str | None) -> MadeConfig:
    """The configuration of the model `name`; NOT_A_MODEL if it contradicts the plan's format."""
    before = own.config if own is not None else ModelConfig()
    config, given = _merged(before, own.locations if own is not None else {}, over)
    if config.name and config.name != name:
        config = replace(config, name=name)
    if form is not None:
        config = _with_backend(config, FORMATS[form], name, form)
    if config == before and over is None:
        return MadeConfig(config, None)
    return MadeConfig(config, pbtxt(config, given))


def pbtxt(config: ModelConfig, given: Collection[str]) -> bytes:
    return "".join(f"{line.text}\n" for line in to_pbtxt(config, given)).encode()


def _merged(
    base: ModelConfig, given: Mapping[str, Any], over: ParsedConfig | None
) -> tuple[ModelConfig, frozenset[str]]:
    """Fields that `over` sets replace those of `base`; parameters do so key by key. Also returns the set paths.

    Any: positions in the text, which are not used here.
    """
    if over is None:
        return base, frozenset(given)
    # A top-level field's path is a plain name.
    set_fields = {path for path in over.locations if path.isidentifier()}
    # At most one field of such a group may be set, and the plan's wins.
    displaced = {other for group in ModelConfig.ONEOFS if set_fields & set(group) for other in group} - set_fields
    changes: dict[str, Any] = dict.fromkeys(displaced)
    changes |= {field: getattr(over.config, field) for field in set_fields}
    if PARAMETERS in set_fields:
        changes[PARAMETERS] = {**base.parameters, **over.config.parameters}
    replaced = (set_fields | displaced) - {PARAMETERS}
    kept = {path for path in given if path.partition(".")[0].partition("[")[0] not in replaced}
    return replace(base, **changes), frozenset(kept | over.locations.keys())


def _with_backend(config: ModelConfig, backend: str, name: str, form: str) -> ModelConfig:
    declared = config.backend or PLATFORMS.get(config.platform, config.platform)
    if declared and declared != backend:
        text = f"model '{name}': its configuration says {declared}, and the format {form} means backend {backend}"
        raise FetchError(FetchExit.NOT_A_MODEL, text)
    return config if declared else replace(config, backend=backend)
