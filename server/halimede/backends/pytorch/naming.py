"""Which argument of the model each configured input is, and which of its results each output is. Pure.

The conventions are Triton's. For TorchScript and modules: the names of `forward`'s arguments; `<name>__<index>`; or
else the order of the configuration. A single argument that is a dictionary takes all inputs by their names. Outputs:
the keys of a dictionary or the fields of a named tuple; `<name>__<index>`; or else the order of the configuration. For
`.pt2` files: the tensor's own name; `<name>__<index>`, where the index counts all tensors; or a path to one: `ARGS[0]`,
`ARGS[2][key]`, `KWARGS[k]`, `RESULT[k][0]`. Triton has only the latter two.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from halimede.core.types.error import clip, invalid

_KEY = re.compile(r".*\[([^]]+)\]", re.DOTALL)
_INDEXED = re.compile(r".*__([0-9]{1,4})", re.DOTALL)


class ArgumentKind(Enum):
    """What an argument of `forward` takes; DICT is a dictionary of tensors by name, ANY is not known, OTHER is no
    tensor."""

    TENSOR = "a tensor"
    STRINGS = "a list of strings"
    DICT = "a dictionary of tensors"
    ANY = "anything"
    OTHER = "no tensor"


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of `forward`. `type_name` is its type as its author wrote it; `optional`: it has a default."""

    name: str
    kind: ArgumentKind = ArgumentKind.TENSOR
    optional: bool = False
    type_name: str = "Tensor"


@dataclass(frozen=True, slots=True)
class Results:
    """What `forward` returns, as far as it is known.

    `names` are the keys of a dictionary or the fields of a named tuple, `count` the number of results; None where the
    file does not say it. `by_name`: a dictionary or named tuple.
    """

    by_name: bool = False
    names: tuple[str, ...] | None = None
    count: int | None = None


def index_of(name: str) -> int | None:
    """The index in a name as `<name>__<index>`; None for another name."""
    found = _INDEXED.fullmatch(name)
    return int(found[1]) if found else None


def bind_inputs(
    model: str, names: Sequence[str], arguments: Sequence[Argument], *, optional: frozenset[str], has_order: bool
) -> dict[str, int] | None:
    """The position of each configured input among the arguments; None if one dictionary takes all.

    `optional` are inputs that requests may leave out. `has_order`: the configuration's order is that of its `input`
    list alone; False if the server adds inputs, whose position in it is not defined. INVALID_ARG with what would be
    right.
    """
    called = f"model '{clip(model)}'"
    if len(arguments) == 1 and arguments[0].kind is ArgumentKind.DICT:
        return None
    positions = {argument.name: at for at, argument in enumerate(arguments)}
    indices = [index_of(name) for name in names]
    if all(name in positions for name in names):
        bound = {name: positions[name] for name in names}
    elif all(index is not None for index in indices):
        bound = {name: index for name, index in zip(names, indices, strict=True) if index is not None}
    elif not has_order:
        raise invalid(
            f"{called} has inputs that the server adds (of sequences or batches), so the order of its inputs does not "
            f"say which is which; name each input as an argument of forward ({_listed(positions)}), or <name>__<index>"
        )
    else:
        bound = {name: at for at, name in enumerate(names)}
        moved = [name for name, at in bound.items() if positions.get(name, at) != at]
        if moved:
            raise invalid(
                f"{called}: some of its inputs ({_listed(names)}) have names of forward's arguments "
                f"({_listed(positions)}) and others do not, and '{clip(moved[0])}' is at another position; name all so"
            )
    return _checked(called, bound, arguments, optional)


def _checked(
    called: str, bound: dict[str, int], arguments: Sequence[Argument], optional: frozenset[str]
) -> dict[str, int]:
    """The same, checked against the arguments."""
    by_position: dict[int, str] = {}
    for name, at in bound.items():
        if at >= len(arguments):
            raise invalid(
                f"{called}: forward has {_arguments(arguments)}, and input '{clip(name)}' would be its argument "
                f"{at + 1}"
            )
        if at in by_position:
            raise invalid(
                f"{called}: inputs '{clip(by_position[at])}' and '{clip(name)}' are the same argument of forward"
            )
        by_position[at] = name
        argument = arguments[at]
        if argument.kind in (ArgumentKind.DICT, ArgumentKind.OTHER):
            raise invalid(
                f"{called}: argument '{clip(argument.name)}' of forward is of type {clip(argument.type_name)}, and an "
                "input can only be a tensor or a list of strings"
            )
        if name in optional and not argument.optional:
            raise invalid(
                f"{called}: input '{clip(name)}' is optional, but argument '{clip(argument.name)}' of forward has no "
                "default"
            )
    missing = [each.name for at, each in enumerate(arguments) if at not in by_position and not each.optional]
    if missing:
        raise invalid(
            f"{called}: forward has {_arguments(arguments)}, and no input in the configuration is "
            f"'{clip(missing[0])}'; name the inputs as its arguments, or <name>__<index>, or list them in its order"
        )
    return bound


def bind_outputs(model: str, names: Sequence[str], results: Results, *, has_order: bool) -> dict[str, int | str]:
    """The position or key of each configured output among the results. INVALID_ARG with what would be right."""
    called = f"model '{clip(model)}'"
    if results.by_name:
        unknown = [name for name in names if results.names is not None and name not in results.names]
        if unknown:
            raise invalid(
                f"{called} has no output '{clip(unknown[0])}'; forward returns the names {_listed(results.names or ())}"
            )
        return {name: name for name in names}
    indices = [index_of(name) for name in names]
    bound: dict[str, int | str]
    if all(index is not None for index in indices):
        bound = {name: index for name, index in zip(names, indices, strict=True) if index is not None}
    elif not has_order and len(names) > 1:
        raise invalid(
            f"{called} has states, so the order of its outputs does not say which is which; name them <name>__<index>"
        )
    else:
        bound = {name: at for at, name in enumerate(names)}
    if results.count is not None:
        beyond = [name for name, at in bound.items() if isinstance(at, int) and at >= results.count]
        if beyond:
            raise invalid(
                f"{called}: forward returns {_count(results.count, 'result')}, and output '{clip(beyond[0])}' would be "
                f"number {int(bound[beyond[0]]) + 1}"
            )
    return bound


def own_names(paths: Sequence[str], arguments: Sequence[str], kind: str) -> tuple[str, ...]:
    """The names of the tensors of a `.pt2` file: the key in a dictionary, or else the name of the argument.

    `arguments` are the names that torch.export gives to tensors, "" for none; they differ from each other. A tensor
    without a name, or whose name is not the only one, has an index: `INPUT__0`. `kind` is "input" or "output".
    """
    keys = [found[1] if (found := _KEY.fullmatch(path)) and not found[1].isdecimal() else "" for path in paths]
    indexed = [f"{kind.upper()}__{at}" for at in range(len(paths))]
    names = list(indexed)
    for candidates in (arguments, [key or argument for key, argument in zip(keys, arguments, strict=True)]):
        chosen = [candidate or name for candidate, name in zip(candidates, names, strict=True)]
        counts = Counter(chosen)
        names = [new if counts[new] == 1 else old for new, old in zip(chosen, names, strict=True)]
    return tuple(names) if len(set(names)) == len(names) else tuple(indexed)


def bind_paths(
    model: str, names: Sequence[str], paths: Sequence[str], own: Sequence[str], kind: str, *, needed: bool = False
) -> dict[str, int]:
    """The position of each name among the tensors of a `.pt2` file, of which `paths` are the names by structure.

    `own` are the results of `own_names`. `kind` is "input" or "output"; `needed`: the model needs all of them.
    INVALID_ARG with what would be right.
    """
    called = f"model '{clip(model)}'"
    positions: Mapping[str, int] = {name: at for each in (own, paths) for at, name in enumerate(each)}
    bound: dict[str, int] = {}
    for name in names:
        at = positions.get(name, index_of(name))
        if at is None or at >= len(paths):
            example = f"{kind.upper()}__0"
            last = f" to {kind.upper()}__{len(paths) - 1}" if len(paths) > 1 else ""
            raise invalid(
                f"{called} has no {kind} '{clip(name)}'; its {kind}s are {_listed(own)}, in order {example}{last}, or "
                f"by structure {_listed(paths)}"
            )
        if at in bound.values():
            twin = next(other for other, position in bound.items() if position == at)
            raise invalid(f"{called}: {kind}s '{clip(twin)}' and '{clip(name)}' are the same tensor ({paths[at]})")
        bound[name] = at
    missing = [path for at, path in enumerate(paths) if at not in bound.values()]
    if needed and missing:
        raise invalid(f"{called}: no {kind} in the configuration is {clip(missing[0])} of the model file")
    return bound


def _arguments(arguments: Sequence[Argument]) -> str:
    listed = f" ({_listed([each.name for each in arguments])})" if arguments else ""
    return _count(len(arguments), "argument") + listed


def _count(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _listed(names: Sequence[str] | Mapping[str, int]) -> str:
    return clip(", ".join(names))
