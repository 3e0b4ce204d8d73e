"""What a pass has decided about an object, and what became of it: the input of its status."""

from dataclasses import dataclass

from halimede_operator.core.api_errors import Meaning
from halimede_operator.core.children.diff import Apply, Conflict, Delete, Hold
from halimede_operator.core.placement.choice import Placement
from halimede_operator.core.revisions.rollback import RolledBack
from halimede_operator.core.rollout.strategy import Strategy
from halimede_operator.core.snapshot import Object

Change = Apply | Delete | Conflict | Hold


@dataclass(frozen=True, slots=True)
class EventDraft:
    type: str
    """Normal or Warning."""
    reason: str
    message: str
    must_last: str = ""
    """The type of the condition whose state it reports, if that must last for a while (`events.LASTING_S`); ""
    otherwise."""


@dataclass(frozen=True, slots=True)
class ApplyFailure:
    """A change of a child that the API server refused."""

    object_ref: str
    """`Deployment prod/digits`."""
    meaning: Meaning
    message: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The changes to make, and what the status needs to know about them.

    As it is without arguments, nothing changes: the spec has problems, or a member is missing. What runs goes on
    running.
    """

    changes: tuple[Change, ...] = ()
    """In the order in which they are made."""
    revision: str | None = None
    """The name of the revision that the Deployment should have; None if it is not known."""
    rolled_back: RolledBack | None = None
    """What was rolled back, if the Deployment has an earlier revision than that of the spec."""
    waiting: tuple[str, ...] | None = None
    """What changed in the operator that only the object's next pods will have; None if it is not known."""
    events: tuple[EventDraft, ...] = ()
    """To post when all changes are made."""
    unplaced: str = ""
    """Why no devices could be chosen; then nothing is changed."""
    strategy: Strategy | None = None
    """How old pods are replaced."""
    placement: Placement | None = None
    """The devices of the pods that the Deployment will have."""
    failures: tuple[ApplyFailure, ...] = ()
    """Wanted children of kinds that this cluster does not have. The others are applied."""

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """The wanted children whose names are taken."""
        return tuple(change for change in self.changes if isinstance(change, Conflict))


@dataclass(frozen=True, slots=True)
class Performed:
    """How many of the decided changes were made, and why not all."""

    is_postponed: bool = False
    """The Deployment's template changed too recently. This change and those decided after it are made later."""
    failure: ApplyFailure | None = None
    retry_after_s: float | None = None


def reference_of(value: Object) -> str:
    """An object in a message: `Deployment prod/digits`."""
    return f"{value['kind']} {value['metadata']['namespace']}/{value['metadata']['name']}"
