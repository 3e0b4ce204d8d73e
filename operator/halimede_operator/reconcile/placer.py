"""Decides which devices objects get, one object at a time.

An object keeps its devices while its spec asks for the same, so most reconciles need no decision and read nothing.
"""

import asyncio
import dataclasses
import datetime
from collections.abc import Callable
from typing import TypeVar

from halimede_operator.cluster.inventory import Inventories
from halimede_operator.core.labels import REVISION_LABEL
from halimede_operator.core.placement.choice import (
    WHOLE,
    Demand,
    Devices,
    Placement,
    better_than,
    choose,
    named,
    room_for,
    smaller_kind,
)
from halimede_operator.core.placement.explain import (
    CANNOT_SEE_NODES,
    NAME_THE_SLICE,
    Tenant,
    Waiting,
    claim_text,
    explain,
    free_text,
    holders,
    movable,
)
from halimede_operator.core.placement.inventory import Claim, Inventory
from halimede_operator.core.placement.ledger import Ledger
from halimede_operator.core.pods.scheduling import waits_for_devices
from halimede_operator.core.reading import at, condition, moment_at, moment_of, text_at
from halimede_operator.core.snapshot import Snapshot
from halimede_operator.core.spec.types import Key, RolloutPolicy
from halimede_operator.core.subject import Subject

T = TypeVar("T")

RESERVED_S = 120.0
"""How long devices stay reserved for pods that do not appear, for instance because of a quota."""
GONE_S = 30.0
"""After this time the pods of a deleted object are marked as ending, unless the deletion keeps them."""
MAX_TENANTS = 8
"""How many objects that hold wanted devices are asked whether they fit on smaller ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Reservation:
    """Devices that are kept free for the pods of an object that were not all seen yet."""

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
        today: Callable[[], datetime.datetime],
    ) -> None:
        """clock: monotonic seconds. cpu_clock: CPU seconds of this thread. count: called with those of a decision.
        today: the UTC time."""
        self._inventories = inventories
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._count = count
        self._today = today
        self._reservations: dict[Key, _Reservation] = {}
        self._gone: dict[Key, float] = {}
        """Objects that were deleted, and until when their pods count as ending although they are not marked so yet."""
        self._asked: set[Key] = set()
        """Objects that may move to smaller devices, because another object waits for theirs."""
        self._waiting: list[_Waiting] = []
        self._inventory: Inventory | None = None
        self._ledger = Ledger(Inventory())
        self._entered: dict[Key, tuple[Claim, list[tuple[str, int]]]] = {}
        """The claims that the ledger has for choices, and the nodes where they are with the number of pods."""

    def forget(self, key: Key) -> None:
        """Free the devices of an object that was deleted or is being deleted."""
        self._reservations.pop(key, None)
        self._asked.discard(key)
        self._gone[key] = self._clock() + GONE_S
        # The ledger is made anew.
        self._inventory = None

    async def devices_for(self, subject: Subject) -> Devices:
        """The devices of the object's pods, without `room`. Raises ApiError."""
        if subject.spec is None or not subject.spec.workload.accelerator.is_wanted:
            return Devices()
        if (failed := subject.failed_placement) is not None:
            return Devices(failed)
        accelerator, key = subject.spec.workload.accelerator, subject.snapshot.key
        if accelerator.claim is not None:
            return Devices(Placement("", claim=accelerator.claim))
        self._gone.pop(key, None)
        is_asked = subject.spec.workload.rollout.rebalance and key in self._asked
        self._asked.discard(key)
        kept = subject.kept_placement
        is_late = waits_for_devices_s(subject.snapshot, self._today()) >= accelerator.move_after_seconds
        if kept is not None and not is_late and not is_asked:
            return Devices(kept)
        if (demand := subject.demand) is None:
            return Devices()
        if kept is not None:

            def another_choice(ledger: Ledger | None) -> Devices:
                find = better_than if is_late else smaller_kind
                moved = find(kept, demand, ledger) if ledger is not None else None
                return Devices(self._reserved(demand, moved) or kept)

            return await self._decide(subject.snapshot, another_choice)

        def first_choice(ledger: Ledger | None) -> Devices:
            placement = named(demand) if ledger is None else choose(demand, ledger)
            if placement is None and demand.replicas == 0:
                # Without pods it does not matter, and a Deployment can be scaled down. Without a need it is chosen anew
                # when there are pods.
                current = subject.placement or Placement(WHOLE)
                return Devices(dataclasses.replace(current, need=""))
            if placement is None:
                return Devices(unplaced=NAME_THE_SLICE if ledger is None else explain(demand, ledger))
            self._reserved(demand, placement)
            return Devices(placement)

        return await self._decide(subject.snapshot, first_choice)

    async def room(self, subject: Subject, placement: Placement) -> int:
        """For how many further pods of the object devices are free or will be soon; 0 if we may not read the nodes.
        Raises ApiError."""
        demand = subject.demand
        if demand is None:
            return 0
        return await self._decide(
            subject.snapshot, lambda ledger: 0 if ledger is None else room_for(demand, placement, ledger, own=False)
        )

    async def explanation(self, subject: Subject, find: Callable[[Key], Subject | None]) -> tuple[str, Key | None]:
        """Which devices are free, and why the object cannot use them; "" if it needs none. Raises ApiError.

        The second value is another object that can move to smaller devices at its next reconcile, and so free what this
        one needs. find: gives another object.
        """
        snapshot, spec, placement = subject.snapshot, subject.spec, subject.placement
        if placement is not None and placement.claim is not None:
            return claim_text(placement.claim), None
        demand = subject.demand
        if demand is None:
            return "", None

        is_surge = spec is not None and spec.workload.rollout.policy is RolloutPolicy.SURGE
        revisions = {text_at(pod, "metadata", "labels", REVISION_LABEL) for pod in snapshot.pods}
        is_only_beside = is_surge and len(revisions) > 1
        living = sum(
            text_at(pod, "status", "phase") not in {"Failed", "Succeeded"}
            and at(pod, "metadata", "deletionTimestamp") is None
            for pod in snapshot.pods
        )

        def with_others(ledger: Ledger | None) -> tuple[str, Key | None]:
            if ledger is None:
                return CANNOT_SEE_NODES, None
            if placement is not None and room_for(demand, placement, ledger) >= living:
                return free_text(demand), None
            found = {key: _tenant(find(key)) for key in holders(demand, ledger)[:MAX_TENANTS]}
            tenants = {key: tenant for key, tenant in found.items() if tenant is not None}
            asked = next((key for key in movable(demand, tenants, ledger) if tenants[key].may_move), None)
            if asked is not None:
                self._asked.add(asked)
            return explain(demand, ledger, Waiting(placement, tenants, is_only_beside)), asked

        return await self._decide(snapshot, with_others)

    async def _decide(self, snapshot: Snapshot, decide: Callable[[Ledger | None], T]) -> T:
        """Call `decide` with the newest ledger, or with None before the first one. Decisions that wait for a ledger are
        made in the order of the age of their objects, the oldest first."""
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
            self._gone = {key: until for key, until in self._gone.items() if now < until}
            self._ledger, self._entered = Ledger(inventory, moment_of(self._today()), self._gone), {}
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


def _tenant(subject: Subject | None) -> Tenant | None:
    """What is known of an object that holds devices; None if the operator does not choose them."""
    if subject is None or subject.spec is None or subject.demand is None or subject.placement is None:
        return None
    rollout = subject.spec.workload.rollout
    return Tenant(subject.demand, subject.placement, rollout.rebalance and not rollout.paused)


def waits_for_devices_s(snapshot: Snapshot, today: datetime.datetime) -> float:
    """How long a pod has waited for devices, in seconds; 0 if none does."""
    since = [
        moment_at(condition(pod, "PodScheduled"), "lastTransitionTime")
        for pod in snapshot.pods
        if waits_for_devices(pod)
    ]
    begun = min((each for each in since if each is not None), default=None)
    return 0.0 if begun is None else (today - datetime.datetime.fromisoformat(begun)).total_seconds()
