"""What is free on each node: what it has, less what its pods hold and what others are about to take.

Devices of pods that are ending are free soon. They count only where it is better to wait for them than to take others.
"""

from collections.abc import Collection, Iterable, Mapping

from halimede_operator.core.names import canonical_json
from halimede_operator.core.placement.inventory import Amounts, Claim, Holding, Inventory, Node
from halimede_operator.core.placement.node_filter import holds_for
from halimede_operator.core.reading import seconds_before
from halimede_operator.core.spec.types import Key

OVERDUE_S = 10.0
"""A pod that still exists so long after its grace period does not end by itself: its node may be lost."""


class _Room:
    """What is free on one node. May be below zero: a device that is gone may still be held."""

    def __init__(self, node: Node) -> None:
        self.milli_cpu = node.milli_cpu
        self.memory_bytes = node.memory_bytes
        self.pods = node.pods
        self.devices = {device.resource: device.count for device in node.devices}
        for holding in node.holdings:
            self.change(holding.amounts, -1, holding.pods)

    def change(self, amounts: Amounts, sign: int, pods: int) -> None:
        """Take (sign -1) or give back (1) the amounts of so many pods together."""
        self.milli_cpu += sign * amounts.milli_cpu
        self.memory_bytes += sign * amounts.memory_bytes
        self.pods += sign * pods
        for resource, count in amounts.devices.items():
            self.devices[resource] = self.devices.get(resource, 0) + sign * count

    def pods_that_fit(self, amounts: Amounts, plus: Iterable[tuple[Amounts, int]] = ()) -> int:
        """How many pods of these amounts fit. plus: amounts, of so many pods, that count as free too."""
        plus = tuple(plus)
        free = [self.pods + sum(pods for _, pods in plus)]
        if amounts.milli_cpu:
            free.append((self.milli_cpu + sum(each.milli_cpu for each, _ in plus)) // amounts.milli_cpu)
        if amounts.memory_bytes:
            free.append((self.memory_bytes + sum(each.memory_bytes for each, _ in plus)) // amounts.memory_bytes)
        for resource, count in amounts.devices.items():
            free.append((self.devices.get(resource, 0) + sum(each.devices[resource] for each, _ in plus)) // count)
        return max(0, min(free))


class Ledger:
    """Changes while decisions are made: each choice is entered as a claim, so that the next one sees it."""

    def __init__(self, inventory: Inventory, now: str = "", gone: Collection[Key] = ()) -> None:
        """now: UTC time as `moment_at` writes it; "" if it is not known which pods are overdue. gone: objects that were
        deleted a moment ago, whose pods are ending although the inventory may not show it."""
        self.nodes = inventory.nodes
        self._rooms = {node.name: _Room(node) for node in inventory.nodes}
        self._taken: dict[tuple[str, Key], list[tuple[Amounts, int]]] = {}
        """Amounts, and of how many pods, by node and object."""
        self._ending: dict[str, list[tuple[Amounts, int]]] = {}
        """Amounts, and of how many pods, by node."""
        self._ending_after, self._gone = seconds_before(now, OVERDUE_S), gone
        for node in inventory.nodes:
            for holding in node.holdings:
                if self.is_ending(holding):
                    self._ending.setdefault(node.name, []).append((holding.amounts, holding.pods))
                elif holding.key is not None:
                    self._taken.setdefault((node.name, holding.key), []).append((holding.amounts, holding.pods))
        self._with: dict[str, list[Node]] = {}
        """Nodes by a resource that they offer."""
        for node in inventory.nodes:
            for device in node.devices:
                self._with.setdefault(device.resource, []).append(node)
        self._eligible: dict[tuple[str, str, str], tuple[Node, ...]] = {}
        for claim in inventory.waiting:
            self.enter(claim)

    def is_ending(self, holding: Holding) -> bool:
        """Whether these pods end soon, and leave their devices to others."""
        return holding.ends_at > self._ending_after or holding.key in self._gone

    def enter(self, claim: Claim, count: int = 1) -> list[tuple[str, int]]:
        """Take room for pods, on the nodes with the fewest devices first, and then that of pods that are ending.

        Returns the nodes with the number of pods. For pods that fit nowhere nothing is taken.
        """
        entered = self._enter(claim, count, {})
        if self._ending and (left := count - sum(pods for _, pods in entered)) > 0:
            entered += self._enter(claim, left, self._ending)
        return entered

    def _enter(
        self, claim: Claim, count: int, ending: Mapping[str, Iterable[tuple[Amounts, int]]]
    ) -> list[tuple[str, int]]:
        resource = next(iter(claim.amounts.devices), "")
        fitting = sorted(
            (room.devices.get(resource, 0), node.name, pods)
            for node in self.eligible(claim)
            if (pods := (room := self._rooms[node.name]).pods_that_fit(claim.amounts, ending.get(node.name, ())))
        )
        entered = []
        for _, name, pods in fitting:
            taken = min(pods, count)
            if not taken:
                break
            count -= taken
            self._rooms[name].change(claim.amounts.times(taken), -1, taken)
            if claim.key is not None:
                self._taken.setdefault((name, claim.key), []).append((claim.amounts.times(taken), taken))
            entered.append((name, taken))
        return entered

    def withdraw(self, claim: Claim, entered: Iterable[tuple[str, int]]) -> None:
        """Undo what `enter` did for this claim."""
        for name, pods in entered:
            self._rooms[name].change(claim.amounts.times(pods), 1, pods)
            if claim.key is not None:
                self._taken[name, claim.key].remove((claim.amounts.times(pods), pods))

    def eligible(self, claim: Claim) -> tuple[Node, ...]:
        """The nodes that offer the claim's resource and on which its pods may run."""
        resource = next(iter(claim.amounts.devices), "")
        base = (claim.filter.identity, resource, "")
        if base not in self._eligible:
            self._eligible[base] = tuple(
                node
                for node in self._with.get(resource, ())
                if node.is_ready and not claim.filter.obstacle(node.name, node.labels, node.taints)
            )
        if not claim.terms:
            return self._eligible[base]
        # The conditions of a placement are evaluated apart from the pod's own: their product may be large.
        known = (claim.filter.identity, resource, canonical_json(claim.terms))
        if known not in self._eligible:
            self._eligible[known] = tuple(
                node for node in self._eligible[base] if any(holds_for(term, node.labels) for term in claim.terms)
            )
        return self._eligible[known]

    def free(self, node: Node, resource: str) -> int:
        """Free devices of a resource on a node."""
        return max(0, self._rooms[node.name].devices.get(resource, 0))

    def pods_that_fit(self, node: Node, amounts: Amounts, own: Key | None = None, *, ending: bool = False) -> int:
        """How many pods fit on the node. own: the object whose pods there count as gone. ending: whether pods that are
        ending count as gone."""
        going = [
            *(self._taken.get((node.name, own), ()) if own is not None else ()),
            *(self._ending.get(node.name, ()) if ending else ()),
        ]
        return self._rooms[node.name].pods_that_fit(amounts, going)
