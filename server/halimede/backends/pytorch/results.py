"""Find a model's outputs in what its `forward` returned. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from halimede.core.types.error import clip, internal


def pick(result: Any, positions: Mapping[str, int | str], wanted: Sequence[str]) -> dict[str, Any]:
    """The wanted outputs: by key of a dictionary, by field of a named tuple that has these fields, else by position.

    `positions` has the position of each output. INTERNAL if the model returned something else.
    """
    if isinstance(result, Mapping):
        missing = [name for name in wanted if name not in result]
        if missing:
            keys = clip(", ".join(map(str, result)))
            raise internal(f"the model returned no '{clip(missing[0])}'; the keys that it returned are {keys}")
        return {name: result[name] for name in wanted}
    fields = getattr(result, "_fields", ())
    if fields and all(name in fields for name in positions):
        return {name: getattr(result, name) for name in wanted}
    results = as_sequence(result)
    found: dict[str, Any] = {}
    for name in wanted:
        at = positions[name]
        if not isinstance(at, int) or at >= len(results):
            raise internal(
                f"output '{clip(name)}' is {f'number {at + 1}' if isinstance(at, int) else 'a key'} of the model's "
                f"results, and it returned {len(results)}"
            )
        found[name] = results[at]
    return found


def as_sequence(result: Any) -> Sequence[Any]:
    """The results in order. A list of strings is one result."""
    if isinstance(result, (tuple, list)) and not (result and isinstance(result[0], str)):
        return result
    return (result,)


def names_of(result: Any) -> tuple[str, ...]:
    """Names for all results: keys, fields, or OUTPUT__0 and so on."""
    if isinstance(result, Mapping):
        return tuple(map(str, result))
    fields = getattr(result, "_fields", ())
    return tuple(fields) or tuple(f"OUTPUT__{at}" for at in range(len(as_sequence(result))))
