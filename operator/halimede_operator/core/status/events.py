"""Kubernetes events: the history of an object, as `kubectl describe` shows it.

Only these changes are reported: the object serves; it fails, and why; it stopped serving on request; a new revision was
rolled back; the operator's settings differ from those of its pods. The steps in between are in the status, and so are
failures that are over soon: starts under load have some, such as a kubelet that does not know a ConfigMap yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from halimede_operator.core.decided import EventDraft
from halimede_operator.core.pods.failure import NormalReason
from halimede_operator.core.reading import clean, condition, name_at, text_at
from halimede_operator.core.spec.types import Key
from halimede_operator.core.status.conditions import TRUE

LEAST_PAUSE_S = 60.0
LASTING_S = 10.0
"""A failure is an event only after it has lasted this long."""
_ROLLED_BACK = "RolledBack"


def events_of(old_status: object, new_status: object) -> tuple[EventDraft, ...]:
    """The events between two statuses of an object. The first time, the old one is None or empty."""
    return (
        *_ready_events(old_status, new_status),
        *_rollback_events(old_status, new_status),
        *_upgrade_events(old_status, new_status),
    )


def _rollback_events(old_status: object, new_status: object) -> tuple[EventDraft, ...]:
    old, new = (condition({"status": status}, "Degraded") for status in (old_status, new_status))
    if new.get("reason") != _ROLLED_BACK or text_at(old, "message") == text_at(new, "message"):
        return ()
    return (EventDraft("Warning", _ROLLED_BACK, clean(text_at(new, "message"))),)


def _upgrade_events(old_status: object, new_status: object) -> tuple[EventDraft, ...]:
    old, new = (condition({"status": status}, "UpgradeAvailable") for status in (old_status, new_status))
    if not new or text_at(old, "message") == text_at(new, "message"):
        return ()
    return (EventDraft("Normal", "UpgradeAvailable", clean(text_at(new, "message"))),)


def _ready_events(old_status: object, new_status: object) -> tuple[EventDraft, ...]:
    old, new = (condition({"status": status}, "Ready") for status in (old_status, new_status))
    reason = name_at(new, "reason")
    if not reason:
        return ()
    draft = EventDraft("Normal", reason, clean(text_at(new, "message")))
    if _status_and_reason(old) == _status_and_reason(new):
        return _degraded_events(old_status, new_status, draft) if new.get("status") == TRUE else ()
    if new.get("status") == TRUE:
        return (draft,)
    if reason not in set(NormalReason):
        return (EventDraft("Warning", draft.reason, draft.message, must_last="Ready"),)
    return (draft,) if old.get("status") == TRUE else ()


def _degraded_events(old_status: object, new_status: object, recovered: EventDraft) -> tuple[EventDraft, ...]:
    """A replica began to fail, or recovered, while others serve all the time."""
    old, new = (condition({"status": status}, "Degraded") for status in (old_status, new_status))
    if _status_and_reason(old) == _status_and_reason(new) or new.get("reason") == _ROLLED_BACK:
        return ()
    if new.get("status") == TRUE:
        text = clean(text_at(new, "message"))
        return (EventDraft("Warning", name_at(new, "reason"), text, must_last="Degraded"),)
    return (recovered,) if old.get("status") == TRUE else ()


def _status_and_reason(condition_: Mapping[str, Any]) -> tuple[object, object]:
    return condition_.get("status"), condition_.get("reason")


@dataclass(slots=True)
class LastingStates:
    """Holds events back until the states that they report have lasted for LASTING_S."""

    _held: dict[tuple[Key, str], tuple[EventDraft, float]] = field(default_factory=dict)
    """By object and condition, with the time at which the state began."""

    def due(
        self, key: Key, drafts: Sequence[EventDraft], status: object, now_s: float
    ) -> tuple[tuple[EventDraft, ...], float | None]:
        """The events to post now, and the seconds until one that is held back may be due.

        drafts: the new ones. status: of the object now; an event whose state it no longer has is dropped. `now_s` is
        monotonic.
        """
        for draft in drafts:
            if draft.must_last:
                self._held[key, draft.must_last] = (draft, now_s)
        due = [draft for draft in drafts if not draft.must_last]
        waits_s = []
        for type_ in ("Ready", "Degraded"):
            if (held := self._held.pop((key, type_), None)) is None:
                continue
            draft, since_s = held
            now = condition({"status": status}, type_)
            if now.get("reason") != draft.reason:
                continue
            if now_s - since_s >= LASTING_S:
                due.append(replace(draft, message=clean(text_at(now, "message"))))
            else:
                self._held[key, type_] = held
                waits_s.append(since_s + LASTING_S - now_s)
        return tuple(due), min(waits_s, default=None)

    def forget(self, key: Key) -> None:
        """The object is gone."""
        for type_ in ("Ready", "Degraded"):
            self._held.pop((key, type_), None)


@dataclass(slots=True)
class EventLimit:
    """At most one event per object and reason in a minute, so that a flapping object does not flood the cluster."""

    _last: dict[tuple[Key, str], float] = field(default_factory=dict)
    """When each was last sent, oldest first."""

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._last)

    def try_send(self, key: Key, draft: EventDraft, now_s: float) -> bool:
        """Return whether the event may be sent now; if so, it counts as sent. `now_s` is monotonic."""
        while self._last and now_s - next(iter(self._last.values())) >= LEAST_PAUSE_S:
            del self._last[next(iter(self._last))]
        if (key, draft.reason) in self._last:
            return False
        self._last[key, draft.reason] = now_s
        return True
