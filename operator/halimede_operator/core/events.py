"""Events: what a person reads under `kubectl describe` of how an object became what it is.

Only changes are told: that it serves, that it fails and why, that it stopped serving because somebody asked. The steps
on the way there are in the status.
"""

from dataclasses import dataclass, field

from halimede_operator.core.api.conditions import TRUE
from halimede_operator.core.api.spec import Key
from halimede_operator.core.pods import Calm
from halimede_operator.core.reading import clean, condition, name_at, text_at

LEAST_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class EventDraft:
    type: str
    """Normal or Warning."""
    reason: str
    message: str


def events_of(old_status: object, new_status: object) -> tuple[EventDraft, ...]:
    """What happened between two statuses of an object; the old one is None or empty at first."""
    old, new = (condition({"status": status}, "Ready") for status in (old_status, new_status))
    reason = name_at(new, "reason")
    if not reason or (old.get("status"), old.get("reason")) == (new.get("status"), new.get("reason")):
        return ()
    draft = EventDraft("Normal", reason, clean(text_at(new, "message")))
    if new.get("status") == TRUE:
        return (draft,)
    if reason not in set(Calm):
        return (EventDraft("Warning", draft.reason, draft.message),)
    return (draft,) if old.get("status") == TRUE else ()


@dataclass(slots=True)
class EventLimit:
    """At most one event of an object and reason in a minute, so that what flaps does not fill the cluster's events."""

    _last: dict[tuple[Key, str], float] = field(default_factory=dict)
    """When each was last sent, oldest first."""

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._last)

    def try_send(self, key: Key, draft: EventDraft, now_s: float) -> bool:
        """Whether it may be sent now; then it counts as sent. `now_s` never goes back."""
        while self._last and now_s - next(iter(self._last.values())) >= LEAST_PAUSE_S:
            del self._last[next(iter(self._last))]
        if (key, draft.reason) in self._last:
            return False
        self._last[key, draft.reason] = now_s
        return True
