"""Paths in directed graphs. A graph is a function from a node to its successors."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)

Successors = Callable[[Node], Iterable[Node]]


def path(start: Node, goal: Node, successors: Successors[Node]) -> tuple[Node, ...]:
    """The nodes of a shortest path, both ends included; (start,) if they are the same, () if no path exists."""
    before = {start: start}
    level = [start]
    while level and goal not in before:
        following = []
        for node in level:
            for successor in successors(node):
                if successor not in before:
                    before[successor] = node
                    following.append(successor)
        level = following
    return _back_to(start, goal, before) if goal in before else ()


def reachable(start: Node, successors: Successors[Node]) -> dict[Node, None]:
    """The start and every node to which a path leads from it, as the keys of a dictionary. Asks once per node."""
    found = {start: None}
    pending = [start]
    while pending:
        for node in successors(pending.pop()):
            if node not in found:
                found[node] = None
                pending.append(node)
    return found


def longest_path(start: Node, successors: Successors[Node]) -> tuple[Node, ...]:
    """The nodes of a longest path from `start`; never returns if a cycle can be reached."""
    # Level n has each node that some path of n edges leads to, with the node before it.
    levels: list[dict[Node, Node]] = [{start: start}]
    while following := {successor: node for node in levels[-1] for successor in successors(node)}:
        levels.append(following)
    nodes = [next(iter(levels[-1]))]
    for level in levels[:0:-1]:
        nodes.append(level[nodes[-1]])
    return tuple(reversed(nodes))


def _back_to(start: Node, goal: Node, before: dict[Node, Node]) -> tuple[Node, ...]:
    nodes = [goal]
    while nodes[-1] != start:
        nodes.append(before[nodes[-1]])
    return tuple(reversed(nodes))
