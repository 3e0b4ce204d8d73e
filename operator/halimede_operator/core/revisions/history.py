"""`status.revisions`: the last revisions of an object's pods and their outcomes, newest first.

    outcome         it is current       meaning
    RollingOut      yes                 its pods have not been ready yet
    Serving         yes                 all its replicas were ready together once
    Failed          yes                 it was not ready within the progress deadline
    Superseded      no                  another spec replaced it; reason NeverReady if it had not been ready
    Failed          no                  it failed, and another spec replaced it
    RolledBack      no                  it failed, and the operator restored the revision before

A revision that is applied again becomes the newest one, and starts again with RollingOut. After a rollback the restored
revision keeps its place: the one that failed is newer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from halimede_operator.core.reading import clean, texts_at
from halimede_operator.core.revisions.rollback import RolledBack

MAX_REVISIONS = 5
NEVER_READY = "NeverReady"


class Outcome(StrEnum):
    ROLLING_OUT = "RollingOut"
    SERVING = "Serving"
    SUPERSEDED = "Superseded"
    ROLLED_BACK = "RolledBack"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class Entry:
    revision: str
    """The pods' label."""
    generation: int
    outcome: Outcome
    reason: str = ""
    """Why it failed, or NeverReady; "" for other outcomes."""

    @property
    def was_ready(self) -> bool:
        return self.outcome is Outcome.SERVING or (self.outcome is Outcome.SUPERSEDED and self.reason != NEVER_READY)

    def as_text(self) -> str:
        """`902f369e of generation 2: RolledBack (CrashLoop)`."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.revision} of generation {self.generation}: {self.outcome}{reason}"


_TEXT = re.compile(r"(\S{1,63}) of generation (\d{1,18}): (\w+)(?: \(([^()]{1,253})\))?")


def read_history(status: object) -> tuple[Entry, ...]:
    """The revisions in a status. Malformed and repeated ones are left out, because any user may have written them."""
    found: dict[str, Entry] = {}
    for text in texts_at(status, "revisions"):
        entry = _TEXT.fullmatch(clean(text))
        if entry is not None and entry[3] in set(Outcome):
            found.setdefault(entry[1], Entry(entry[1], int(entry[2]), Outcome(entry[3]), entry[4] or ""))
    return tuple(found.values())[:MAX_REVISIONS]


def with_current(history: Sequence[Entry], current: Entry, rolled_back: RolledBack | None) -> tuple[Entry, ...]:
    """The history, with the Deployment's revision and its outcome.

    current: its outcome as far as it can be seen now. rolled_back: the record that the Deployment has.
    """
    entries = [each if each.revision == current.revision else _superseded(each) for each in history]
    if rolled_back is not None:
        failed = Entry(rolled_back.name, rolled_back.generation, Outcome.ROLLED_BACK, rolled_back.reason)
        names = [each.revision for each in entries]
        entries = [failed if each.revision == failed.revision else each for each in entries]
        entries = entries if failed.revision in names else [failed, *entries]
    index = 0 if rolled_back is None else 1
    known = next((each for each in entries if each.revision == current.revision), None)
    if known is not None and (rolled_back is not None or known is entries[0]):
        index = entries.index(known)
        if known.outcome is Outcome.SERVING:
            # It stays that while its pods fail later on.
            current = replace(current, outcome=Outcome.SERVING, reason="")
    others = [each for each in entries if each is not known][: MAX_REVISIONS - 1]
    return (*others[:index], current, *others[index:])


def _superseded(entry: Entry) -> Entry:
    match entry.outcome:
        case Outcome.SERVING:
            return replace(entry, outcome=Outcome.SUPERSEDED, reason="")
        case Outcome.ROLLING_OUT:
            return replace(entry, outcome=Outcome.SUPERSEDED, reason=NEVER_READY)
        case _:
            return entry
