"""Leader election: holds the Lease, so that only one of several operators acts."""

import asyncio
import datetime
import logging
import time
from collections.abc import Callable
from typing import Protocol

from halimede_operator.api_server.errors import ApiError
from halimede_operator.core.process.election import (
    LEASE_S,
    MAX_LEASE_S,
    RENEW_DEADLINE_S,
    RETRY_S,
    Election,
    Record,
    Step,
)
from halimede_operator.core.snapshot import Object

log = logging.getLogger(__name__)

RELEASE_LIMIT_S = 2.0


class LeaseApi(Protocol):
    async def get_lease(self, namespace: str, name: str, timeout_s: float) -> Object | None: ...

    async def write_lease(self, namespace: str, lease: Object, timeout_s: float) -> Object: ...


class LostError(Exception):
    """Another operator holds the lease that this process held."""


class Leadership:
    """Keeps one Lease. Used by one event loop."""

    def __init__(
        self,
        api: LeaseApi,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        today: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
        *,
        renew_deadline_s: float = RENEW_DEADLINE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """Make the leadership of one Lease; nothing is read yet.

        identity: unique among running processes. clock: monotonic seconds. today: the UTC time that is written into the
        Lease, for people to read. renew_deadline_s: how long we may act after a renewal. retry_s: between attempts.
        """
        self._api = api
        self._namespace = namespace
        self._name = name
        self._clock = clock
        self._today = today
        self._acted = False
        """Whether we might act after the last attempt."""
        self._election = Election(identity, renew_deadline_s)
        self._answer_limit_s = renew_deadline_s / 2
        self._retry_s = retry_s
        self._lease: Object | None = None
        self._waits_for = ""
        """The holder that we last reported to wait for."""
        self._renewed = asyncio.Event()
        self.has_read = False
        """Whether the Lease was read at least once."""

    def may_act(self) -> bool:
        """Whether we hold the lease now, so that writes are safe."""
        return self._election.may_act(self._clock())

    async def active(self) -> None:
        """Wait until we may act; return at once if we already may."""
        while not self.may_act():
            self._renewed.clear()
            await self._renewed.wait()

    async def run(self, regained: Callable[[], None]) -> None:
        """Acquire the lease and renew it until cancelled.

        regained: called each time we become the leader, also the first time. Raises LostError if another operator took
        the lease from us.
        """
        while True:
            await self.attempt(regained)
            await asyncio.sleep(self._retry_s)

    async def attempt(self, regained: Callable[[], None]) -> None:
        """Make one attempt of `run`. Raises LostError as `run` does."""
        try:
            async with asyncio.timeout(self._answer_limit_s):
                await self._advance()
        except (ApiError, TimeoutError) as error:
            log.warning(
                "lease %s/%s: %s", self._namespace, self._name, str(error) or f"no answer in {self._answer_limit_s:g} s"
            )
        if self.may_act() != self._acted:
            self._acted = not self._acted
            what = "acquired" if self._acted else "not renewed in time, nothing is written"
            log.info("lease %s/%s: %s", self._namespace, self._name, what)
            if self._acted:
                regained()
        if self._acted:
            self._renewed.set()

    async def release(self) -> None:
        """Release the lease, so that the next leader need not wait for its end.

        A failure is only logged, because the lease expires by itself.
        """
        try:
            async with asyncio.timeout(RELEASE_LIMIT_S):
                # A cancelled renewal may have reached the API server.
                await self._read()
                if self._lease is None or self._election.step(self._clock()) is not Step.RENEW:
                    return
                record = self._election.next_record(self._now())
                await self._api.write_lease(
                    self._namespace,
                    self._lease_with(Record("", record.renewed, record.transitions, 1.0)),
                    RELEASE_LIMIT_S,
                )
        except (ApiError, TimeoutError) as error:
            log.info("lease not released: %s", str(error) or f"no answer in {RELEASE_LIMIT_S:g} s")
        self._election.saw(None, self._clock())

    async def _advance(self) -> None:
        if self._lease is None or not self.may_act():
            await self._read()
        match self._election.step(self._clock()):
            case Step.LOST:
                raise LostError(f"{_spec(self._lease).get('holderIdentity')} holds the lease now")
            case Step.WAIT:
                # Its holder is alive as long as the record changes.
                self._report_holder()
                await self._read()
            case Step.CREATE | Step.TAKE | Step.RENEW:
                await self._write()

    def _report_holder(self) -> None:
        holder, duration = (_spec(self._lease).get(name) for name in ("holderIdentity", "leaseDurationSeconds"))
        if holder != self._waits_for:
            self._waits_for = str(holder)
            text = "lease %s/%s: waiting, because %s holds it; it is taken when it was not renewed for %.0f s"
            log.info(text, self._namespace, self._name, holder, min(float(duration or LEASE_S), MAX_LEASE_S))

    async def _read(self) -> None:
        self._lease = await self._api.get_lease(self._namespace, self._name, self._answer_limit_s)
        self._election.saw(record_of(self._lease) if self._lease is not None else None, self._clock())
        self.has_read = True

    async def _write(self) -> None:
        begun = self._clock()
        record = self._election.next_record(self._now())
        try:
            self._lease = await self._api.write_lease(self._namespace, self._lease_with(record), self._answer_limit_s)
        except ApiError as error:
            # The write may have been made, or another operator was faster: read before the next write.
            await self._read()
            if not error.is_conflict:
                raise
            return
        self._election.wrote(record_of(self._lease), begun, self._clock())

    def _lease_with(self, record: Record) -> Object:
        lease = self._lease or {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"namespace": self._namespace, "name": self._name},
        }
        before = _spec(lease)
        is_same = before.get("holderIdentity") == record.holder
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": int(record.duration_s),
            "acquireTime": before.get("acquireTime", record.renewed) if is_same else record.renewed,
            "renewTime": record.renewed,
            "leaseTransitions": record.transitions,
        }
        return {**lease, "spec": spec}

    def _now(self) -> str:
        return self._today().strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def record_of(lease: Object) -> Record:
    """The record that a Lease object holds."""
    spec = _spec(lease)
    return Record(
        holder=spec.get("holderIdentity") or "",
        renewed=f"{spec.get('renewTime')} {lease['metadata'].get('resourceVersion')}",
        transitions=int(spec.get("leaseTransitions") or 0),
        duration_s=float(spec.get("leaseDurationSeconds") or LEASE_S),
    )


def _spec(lease: Object | None) -> Object:
    spec: Object = (lease or {}).get("spec") or {}
    return spec
