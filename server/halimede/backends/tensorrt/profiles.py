"""Optimization profiles: the shapes for which an engine was built, and which profile a batch uses. Pure.

Of the profiles that allow the shapes of a batch, the one whose optimum is nearest is used: the distance is the sum of
the differences over all dimensions of all inputs, and over the values of shape tensors. The first one wins a tie.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from halimede.core.config.parameters import parse_number
from halimede.core.types.error import clip, invalid

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """What a profile allows for the dimensions of an input, or for the values of a shape tensor."""

    minimum: Shape
    optimum: Shape
    maximum: Shape

    def allows(self, values: Sequence[int]) -> bool:
        return len(values) == len(self.minimum) and all(
            low <= value <= high for low, value, high in zip(self.minimum, values, self.maximum, strict=True)
        )

    def distance(self, values: Sequence[int]) -> int:
        return sum(abs(usual - value) for usual, value in zip(self.optimum, values, strict=True))


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile: ranges of the dimensions by input, and ranges of the values by shape tensor."""

    index: int
    shapes: Mapping[str, Range]
    values: Mapping[str, Range] = field(default_factory=dict)

    def allows(self, shapes: Mapping[str, Shape], values: Mapping[str, Shape]) -> bool:
        """Whether the profile can run these inputs; all of its inputs must be given."""
        return all(each.allows(shapes[name]) for name, each in self.shapes.items()) and all(
            each.allows(values[name]) for name, each in self.values.items()
        )

    def distance(self, shapes: Mapping[str, Shape], values: Mapping[str, Shape]) -> int:
        """How far these inputs, which the profile allows, are from its optimum."""
        return sum(each.distance(shapes[name]) for name, each in self.shapes.items()) + sum(
            each.distance(values[name]) for name, each in self.values.items()
        )

    @property
    def batches(self) -> tuple[int, int]:
        """The least and the largest batch, for an engine that batches.

        The rows are the first dimension of every input, and the first value of a shape tensor.
        """
        ranges = [self.values.get(name, each) for name, each in self.shapes.items()]
        return max(each.minimum[0] for each in ranges), min(each.maximum[0] for each in ranges)


def choose(profiles: Sequence[Profile], shapes: Mapping[str, Shape], values: Mapping[str, Shape]) -> Profile | None:
    """The profile for these inputs; None if no profile allows them."""
    if len(profiles) == 1:
        return profiles[0] if profiles[0].allows(shapes, values) else None
    fitting = [each for each in profiles if each.allows(shapes, values)]
    return min(fitting, key=lambda each: each.distance(shapes, values)) if fitting else None


def explain(profiles: Sequence[Profile], shapes: Mapping[str, Shape], values: Mapping[str, Shape]) -> str:
    """Why no profile allows these inputs: the first input that does not fit, for each profile."""
    return "; ".join(f"profile {each.index}: {_mismatch(each, shapes, values)}" for each in profiles[:4]) + (
        f"; and {len(profiles) - 4} more profiles" if len(profiles) > 4 else ""
    )


def _mismatch(profile: Profile, shapes: Mapping[str, Shape], values: Mapping[str, Shape]) -> str:
    for what, ranges, given in (("shape", profile.shapes, shapes), ("values", profile.values, values)):
        for name, each in ranges.items():
            if not each.allows(given[name]):
                low, high = _text(each.minimum), _text(each.maximum)
                return f"input '{clip(name)}' has {what} {_text(given[name])}, expected {low} to {high}"
    return "it fits"


def batch_problem(profiles: Sequence[Profile], max_batch_size: int) -> str:
    """Why some batch of 1 to `max_batch_size` rows fits none of the profiles; "" if each fits one."""
    wanted = 1
    for least, most in sorted(each.batches for each in profiles):
        if least > wanted:
            break
        wanted = max(wanted, most + 1)
    if wanted > max_batch_size:
        return ""
    listed = ", ".join(f"profile {p.index}: {p.batches[0]} to {p.batches[1]}" for p in profiles[:8])
    return f"no profile of the instance takes a batch of {wanted} rows ({listed})"


def read_indices(texts: Sequence[str], count: int, instance: str) -> tuple[int, ...]:
    """The profiles that `instance_group.profile` names for an engine with `count` profiles; (0,) if it names none."""
    found: dict[int, None] = {}
    for text in texts:
        index = parse_number(text, 0, count - 1)
        if index is None:
            raise invalid(
                f"instance '{clip(instance)}': profile '{clip(text)}' does not exist, the engine has {count} "
                f"optimization profile{'s' * (count > 1)}: {'0' if count == 1 else f'0 to {count - 1}'}"
            )
        found[index] = None
    return tuple(found) or (0,)


def _text(values: Sequence[int]) -> str:
    return clip(f"[{','.join(map(str, values))}]")
