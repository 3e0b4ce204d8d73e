"""The tensors that flow between an ensemble's steps: which step makes each, which need it, and which are never made.

Steps are numbers, in the order of the ensemble. Each side words the problems of a flow itself.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flow:
    """`maker` has the step that makes a tensor, `users` the steps that need it; `needs` are the tensors of each step.

    `written` are the ensemble's inputs and all tensors that are made if every step runs that can run. `order` are these
    steps, each after the steps that make its tensors.
    """

    maker: Mapping[str, int]
    users: Mapping[str, list[int]]
    needs: Sequence[Collection[str]]
    written: Collection[str]
    order: Sequence[int]

    def missing(self, step: int) -> Iterable[str]:
        """The tensors that the step needs and never gets, in the order of its needs."""
        return (tensor for tensor in self.needs[step] if tensor not in self.written)


def makers(inputs: Collection[str], makes: Sequence[Collection[str]]) -> dict[str, int]:
    """The first step that makes each tensor, inputs left out; `makes` are the tensors of each step."""
    maker: dict[str, int] = {}
    for step, tensors in enumerate(makes):
        for tensor in tensors:
            if tensor not in inputs:
                maker.setdefault(tensor, step)
    return maker


def make_flow(inputs: Collection[str], maker: Mapping[str, int], needs: Sequence[Collection[str]]) -> Flow:
    """The flow of an ensemble with these inputs; `needs` are the tensors of each step, each once."""
    users: dict[str, list[int]] = {}
    for step, tensors in enumerate(needs):
        for tensor in tensors:
            users.setdefault(tensor, []).append(step)
    return Flow(maker, users, needs, *_run_all(inputs, maker, users, needs))


def _run_all(
    inputs: Collection[str], maker: Mapping[str, int], users: Mapping[str, list[int]], needs: Sequence[Collection[str]]
) -> tuple[set[str], list[int]]:
    """The tensors that exist at the end, and the order of the steps."""
    waits = [len(tensors) for tensors in needs]
    made: list[list[str]] = [[] for _ in needs]
    for tensor, step in maker.items():
        made[step].append(tensor)
    # A step that needs nothing is a separate problem; here it does not make other steps wait.
    order = [step for step, count in enumerate(waits) if count == 0]
    news = [*inputs, *(tensor for step in order for tensor in made[step])]
    written = set(news)
    while news:
        for user in users.get(news.pop(), ()):
            waits[user] -= 1
            if waits[user] == 0:
                order.append(user)
                news += made[user]
                written.update(made[user])
    return written, order


@dataclass(frozen=True, slots=True)
class Walk(Generic[T]):
    """`path` has each node once, in order; `circle` is the end of the path that forms a circle, else empty."""

    path: tuple[T, ...]
    circle: tuple[T, ...]


def walk(start: T, following: Callable[[T], T | None]) -> Walk[T]:
    """Go from node to node until no next one exists (None), or one repeats."""
    path: dict[T, int] = {}
    at: T | None = start
    while at is not None and at not in path:
        path[at] = len(path)
        at = following(at)
    nodes = tuple(path)
    return Walk(nodes, () if at is None else nodes[path[at] :])
