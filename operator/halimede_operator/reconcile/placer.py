"""Decides which devices objects get, one object at a time.

An object keeps its devices while its spec asks for the same, so most reconciles need no decision and read nothing.
"""

import asyncio
import dataclasses
import datetime
from collections.abc import Callable
from typing import TypeVar

from halimede_operator.cluster.inventory import Inventories
from halimede_operator.core.api.spec import Key
from halimede_operator.core.placement.choice import WHOLE, Demand, Placement, better_than, choose, named, room_for
from halimede_operator.core.placement.explain import CANNOT_SEE_NODES, NAME_THE_SLICE, claim_text, explain
from halimede_operator.core.placement.inventory import Claim, Inventory
from halimede_operator.core.placement.ledger import Ledger
from halimede_operator.core.plan import (
    Devices,
    demand_in,
    deployment_in,
    failed_placement,
    kept_placement,
    placement_in,
    workload_in,
)
from halimede_operator.core.platform import Platform
from halimede_operator.core.pods.placement import waits_for_devices
from halimede_operator.core.reading import at, condition, moment_at
from halimede_operator.core.snapshot import Snapshot

T = TypeVar("T")

RESERVED_S = 120.0
"""A choice whose pods never appear, for instance because of a quota, is kept free for its object for so long."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Reservation:
    """A choice whose pods were not all seen yet."""

    demand: Demand
    placement: Placement
    until: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """A decision that waits for the inventory."""

    created: str
    key: Key
    decide: Callable[[Ledger | None], None]


class Placer:
    """Used by one event loop. Every decision sees those before it, so that two objects never count on one device."""

    def __init__(
        self,
        inventories: Inventories,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
        count: Callable[[float], None],
    ) -> None:
        """clock: monotonic seconds. cpu_clock: CPU seconds of this thread. count: called with those of a decision."""
        self._inventories = inventories
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._count = count
        self._reservations: dict[Key, _Reservation] = {}
        self._waiting: list[_Waiting] = []
        self._inventory: Inventory | None = None
        self._ledger = Ledger(Inventory())
        self._entered: dict[Key, tuple[Claim, list[tuple[str, int]]]] = {}
        """The claims that the ledger has for choices, and the nodes where they are with the number of pods."""

    def forget(self, key: Key) -> None:
        """The object no longer exists."""
        self._reservations.pop(key, None)

    async def place(self, snapshot: Snapshot, platform: Platform, today: datetime.datetime) -> Devices:
        """The devices of the object's pods, without `room`. Raises ApiError."""
        if at(snapshot.object, "spec", "accelerator") is None:
            return Devices()
        workload = workload_in(snapshot, platform)
        if workload is None or not workload.accelerator.is_wanted:
            return Devices()
        if (failed := failed_placement(snapshot)) is not None:
            return Devices(failed)
        if workload.accelerator.claim is not None:
            return Devices(Placement("", claim=workload.accelerator.claim))
        kept = kept_placement(snapshot, workload)
        if kept is not None and waits_for_devices_s(snapshot, today) < workload.accelerator.move_after_seconds:
            return Devices(kept)
        if (demand := demand_in(snapshot, platform)) is None:
            return Devices()
        if kept is not None:

            def another_choice(ledger: Ledger | None) -> Devices:
                moved = better_than(kept, demand, ledger) if ledger is not None else None
                return Devices(self._reserved(demand, moved) or kept)

            return await self._decide(snapshot, another_choice)

        def first_choice(ledger: Ledger | None) -> Devices:
            placement = named(demand) if ledger is None else choose(demand, ledger)
            if placement is None and demand.replicas == 0:
                # Without pods it does not matter, and a Deployment can be scaled down. Without a need it is chosen anew
                # when there are pods.
                current = placement_in(deployment_in(snapshot)) or Placement(WHOLE)
                return Devices(dataclasses.replace(current, need=""))
            if placement is None:
                return Devices(unplaced=NAME_THE_SLICE if ledger is None else explain(demand, ledger))
            self._reserved(demand, placement)
            return Devices(placement)

        return await self._decide(snapshot, first_choice)

    async def room(self, snapshot: Snapshot, platform: Platform, placement: Placement) -> int:
        """For how many further pods of the object devices are free; 0 if that cannot be seen. Raises ApiError."""
        demand = demand_in(snapshot, platform)
        if demand is None:
            return 0
        return await self._decide(
            snapshot, lambda ledger: 0 if ledger is None else room_for(demand, placement, ledger, with_own=False)
        )

    async def explanation(self, snapshot: Snapshot, platform: Platform) -> str:
        """Which devices are free, and why they do not serve the object; "" if it needs none. Raises ApiError."""
        placement = placement_in(deployment_in(snapshot))
        if placement is not None and placement.claim is not None:
            return claim_text(placement.claim)
        demand = demand_in(snapshot, platform)
        if demand is None:
            return ""
        return await self._decide(
            snapshot, lambda ledger: CANNOT_SEE_NODES if ledger is None else explain(demand, ledger)
        )

    async def _decide(self, snapshot: Snapshot, decide: Callable[[Ledger | None], T]) -> T:
        """Call `decide` with the newest ledger, None without one. Of several decisions that wait for it, that of the
        oldest object is made first."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def make(ledger: Ledger | None) -> None:
            if not answer.done():
                try:
                    answer.set_result(decide(ledger))
                except Exception as error:  # noqa: BLE001 - it belongs to the reconcile that waits for this decision
                    answer.set_exception(error)

        created = moment_at(snapshot.object, "metadata", "creationTimestamp") or ""
        waiting = _Waiting(created, snapshot.key, make)
        self._waiting.append(waiting)
        try:
            inventory = await self._inventories.read()
        finally:
            if not answer.done():
                self._waiting.remove(waiting)
        if not answer.done():
            ledger = self._current_ledger(inventory)
            ready, self._waiting = [waiting, *self._waiting], []
            for each in sorted(ready, key=lambda each: (each.created, each.key)):
                begun = self._cpu_clock()
                each.decide(ledger)
                self._count(self._cpu_clock() - begun)
        return await answer

    def _current_ledger(self, inventory: Inventory | None) -> Ledger | None:
        if inventory is None:
            return None
        if inventory is not self._inventory:
            self._inventory = inventory
            now = self._clock()
            self._ledger, self._entered = Ledger(inventory), {}
            for key, reservation in list(self._reservations.items()):
                claim = reservation.demand.claim(reservation.placement)
                seen = inventory.pods_of(key, reservation.placement.resource, self._ledger.eligible(claim))
                missing = reservation.demand.replicas - seen
                if missing <= 0 or now >= reservation.until:
                    del self._reservations[key]
                else:
                    self._entered[key] = claim, self._ledger.enter(claim, missing)
        return self._ledger

    def _reserved(self, demand: Demand, placement: Placement | None) -> Placement | None:
        """Keep the devices for the object until its pods are seen."""
        if placement is not None:
            # A reconcile that is repeated chooses again, and reserves no longer.
            before = self._reservations.get(demand.key)
            is_same = before is not None and before.placement == placement
            until = before.until if before is not None and is_same else self._clock() + RESERVED_S
            self._reservations[demand.key] = _Reservation(demand, placement, until)
            if demand.key in self._entered:
                self._ledger.withdraw(*self._entered.pop(demand.key))
            claim = demand.claim(placement)
            self._entered[demand.key] = claim, self._ledger.enter(claim, demand.replicas)
        return placement


def waits_for_devices_s(snapshot: Snapshot, today: datetime.datetime) -> float:
    """How long a pod has waited for devices, in seconds; 0 if none does."""
    since = [
        moment_at(condition(pod, "PodScheduled"), "lastTransitionTime")
        for pod in snapshot.pods
        if waits_for_devices(pod)
    ]
    begun = min((each for each in since if each is not None), default=None)
    return 0.0 if begun is None else (today - datetime.datetime.fromisoformat(begun)).total_seconds()
