"""The record of a rollback: an annotation of the Deployment, which then has the pods of an earlier revision.

The record is written together with the earlier template, so there is no moment in which the operator could forget why
the Deployment does not have the template of the spec.
"""

from dataclasses import dataclass

from halimede_operator.core.labels import ROLLED_BACK
from halimede_operator.core.names import canonical_json
from halimede_operator.core.reading import clean, decimal, json_object, name_at, text_at
from halimede_operator.core.revisions.revision import name_of
from halimede_operator.core.snapshot import Object


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A revision that never became ready."""

    inputs: str
    """The hash of its inputs: they are not tried again."""
    hash: str
    generation: int
    reason: str
    message: str
    """The root cause."""
    former: str
    """The name of the revision that was restored."""
    placement: str = ""
    """Its devices, as in the annotation of the Deployment; "" without any."""

    @property
    def name(self) -> str:
        return name_of(self.hash)

    @property
    def text(self) -> str:
        """For the annotation."""
        fields = ("inputs", "hash", "generation", "reason", "message", "former", "placement")
        return canonical_json({field: getattr(self, field) for field in fields})


def rolled_back_in(workload: Object | None) -> RolledBack | None:
    """The record in the annotations of a Deployment or a ReplicaSet; None if there is none, or if it is malformed."""
    found = json_object(text_at(workload, "metadata", "annotations", ROLLED_BACK)) or {}
    record = RolledBack(
        inputs=name_at(found, "inputs"),
        hash=name_at(found, "hash"),
        generation=decimal(found.get("generation")) or 0,
        reason=name_at(found, "reason"),
        message=clean(text_at(found, "message")),
        former=name_at(found, "former"),
        placement=text_at(found, "placement"),
    )
    return record if record.inputs and record.hash and record.reason and record.former else None
