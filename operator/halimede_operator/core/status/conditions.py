"""Status conditions, as Kubernetes' API conventions define them (metav1.Condition).

They have no `observedGeneration`: all of them are of the status's, which tools read instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

TRUE, FALSE, UNKNOWN = "True", "False", "Unknown"


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: str
    """TRUE, FALSE or UNKNOWN."""
    reason: str
    message: str
    last_transition_time: str = ""
    """RFC 3339; `merged` sets it."""


def merged(old: Sequence[Mapping[str, Any]], new: Sequence[Condition], now: str) -> list[dict[str, Any]]:
    """The new conditions as JSON, in their order. Each keeps the old transition time unless its status changed.

    Old conditions that are not among the new ones are dropped, because all conditions of a status are ours.
    """
    return [_as_json(condition, _transition_time(old, condition, now)) for condition in new]


def _transition_time(old: Sequence[Mapping[str, Any]], new: Condition, now: str) -> str:
    for condition in old:
        if condition.get("type") == new.type and condition.get("status") == new.status:
            time = condition.get("lastTransitionTime")
            return time if isinstance(time, str) and _is_time(time) else now
    return now


def _is_time(text: str) -> bool:
    """Whether a text is a time that the API server accepts; it refuses a status with any other text."""
    if len(text) < 20 or text[10] != "T":
        return False
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _as_json(condition: Condition, time: str) -> dict[str, Any]:
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": time,
    }
