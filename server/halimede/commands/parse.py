"""Parse arguments to flag values, in getopt's syntax: `--opt=v` and `--opt v`, `--` ends the flags, and a name may be
abbreviated as long as it is unambiguous. All mistakes are reported, not only the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from halimede.commands.flag import Flag, FlagTreatment
from halimede.commands.flags import BY_NAME


@dataclass(slots=True)
class Given:
    """The parsed command line. `values` are those of honoured flags, in order; notices are for the log."""

    values: dict[Flag, list[object]] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    without_effect: dict[Flag, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def notices(self) -> list[str]:
        """One line per flag without effect."""
        return [
            f"{flag.name}={', '.join(texts)} has no effect: {flag.why}" for flag, texts in self.without_effect.items()
        ]


def parse(arguments: Sequence[str]) -> Given:
    """Read all arguments."""
    given = Given()
    rest = list(reversed(arguments))
    while rest:
        argument = rest.pop()
        if argument == "--":
            given.positional += reversed(rest)
            break
        if not argument.startswith("-") or argument == "-":
            given.positional.append(argument)
            continue
        name, equals, text = argument.partition("=")
        flag = find(name)
        if flag is None:
            given.problems.append(f'Bad option: "{name}".{_hint(name)}')
            # The next argument is most likely its value; do not report it as a second mistake.
            if not equals and rest and not rest[-1].startswith("-"):
                rest.pop()
            continue
        if not equals:
            value = _following(flag, rest)
            if value is None:
                given.problems.append(f"Option '{flag.name}' requires an argument.")
                continue
            text = value
        _take(given, flag, text)
    return given


def find(name: str) -> Flag | None:
    """The flag with this name, or the only one whose name begins with it."""
    if name in BY_NAME:
        return BY_NAME[name]
    if not name.startswith("--"):
        return None
    meant = {flag for known, flag in BY_NAME.items() if known.startswith(name)}
    return meant.pop() if len(meant) == 1 else None


def _following(flag: Flag, rest: list[str]) -> str | None:
    """The value of a flag without `=`, taken from the next argument; None if it has none and needs one."""
    if not flag.metavar or not rest:
        return flag.kind.bare or None
    follows = rest[-1]
    # getopt takes any argument as the value, but a flag's name is never meant as one.
    is_flag = follows == "--" or (follows.startswith("-") and find(follows.partition("=")[0]) is not None)
    if is_flag or (flag.kind.bare and follows.startswith("--")):
        return flag.kind.bare or None
    return rest.pop()


def _take(given: Given, flag: Flag, text: str) -> None:
    try:
        value = flag.kind.read(text)
    except ValueError as error:
        given.problems.append(f"{flag.name}: {error}")
        return
    match flag.treatment_of(value):
        case FlagTreatment.HONOURED:
            given.values.setdefault(flag, []).append(value)
        case FlagTreatment.NO_EFFECT:
            given.without_effect.setdefault(flag, []).append(_shown(flag, text))


def _shown(flag: Flag, text: str) -> str:
    name, equals, _ = text.partition("=")
    return f"{name}{equals}..." if flag.is_secret and equals else text


def _hint(name: str) -> str:
    near = [known for known in BY_NAME if _is_misspelling(name, known)]
    # Two equally close names would make either suggestion a guess.
    return f" Did you mean {near[0]}?" if len(near) == 1 else ""


def _is_misspelling(name: str, known: str) -> bool:
    """Whether one typing mistake separates them: a letter too many, too few, wrong or swapped.

    Similarity by common letters would not be sufficient: `--http-infer-thread-count` shares most letters with
    `--grpc-infer-thread-count`, but is as unrelated to it as `--metrics-host` to `--metrics-port`.
    """
    given, right = name.lower().replace("_", "-"), known
    if given == right or given.replace("-", "") == right.replace("-", ""):
        return True
    matcher = SequenceMatcher(None, given, right, autojunk=False)
    if matcher.ratio() < 0.85:
        return False
    slips = [(i2 - i1, j2 - j1) for what, i1, i2, j1, j2 in matcher.get_opcodes() if what != "equal"]
    is_one = len(slips) == 1 and max(slips[0]) == 1
    is_swap = sorted(slips) == [(0, 1), (1, 0)] and sorted(given) == sorted(right)
    return is_one or is_swap
