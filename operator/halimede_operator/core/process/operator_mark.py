"""Reads which operator an object belongs to.

The status of an object names the Lease of the operator that wrote it (`status.operator`). All pods of a release share
that Lease, and a release keeps it over upgrades, so the mark stays the same while leaders change. An operator of
another release leaves the object alone until that Lease is deleted or was not renewed for `FREE_AFTER_S`.
"""

import re

from halimede_operator.core.reading import text_at
from halimede_operator.core.snapshot import Object

FREE_AFTER_S = 600.0
"""Longer than Kubernetes takes to replace the operator's pod on a lost node."""

_LEASE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)


def other_operator(value: Object, ours: str) -> str | None:
    """The Lease of the other operator that an object belongs to, as `namespace/name`; None if it is ours or free."""
    lease = text_at(value, "status", "operator")
    return lease if lease != ours and _LEASE.fullmatch(lease) else None
