"""Makes ensembles, and swaps or withdraws them as the models of their steps change.

`follow` is called in the same step of the event loop as every change of a model's served versions. A request in flight
in an ensemble ends with the models with which it began: models that are unloaded meanwhile stay until then, for calls
of the ensemble only.
"""

import logging

from halimede.core.repository.plan import Design, Swap, Withdraw, follow, make_design
from halimede.runtime.executor import VersionExecutor
from halimede.runtime.lifecycle.closing import Closing
from halimede.runtime.lifecycle.record import ModelRecord, Records, find_step, take_snapshot
from halimede.runtime.model import ModelVersion, make_ensemble
from halimede.runtime.prepare import PreparedModel
from halimede.runtime.requests import RequestTable
from halimede.runtime.services import ModelServices

log = logging.getLogger(__name__)


class Ensembles:
    """The ensembles among the records."""

    def __init__(self, records: Records, table: RequestTable, services: ModelServices, closing: Closing) -> None:
        self._records = records
        self._table = table
        self._services = services
        self._closing = closing

    def make(self, prepared: PreparedModel) -> dict[int, ModelVersion]:
        """Make all versions of an ensemble, which serve at once. Raises EnsembleError."""
        return self._make(prepared, make_design(take_snapshot(self._records), prepared.config, prepared.labels))

    def follow(self, name: str) -> None:
        """Update the ensembles that use a model to the versions that it serves now."""
        replaced: list[tuple[ModelRecord, dict[int, ModelVersion]]] = []
        for action in follow(take_snapshot(self._records), name):
            record = self._records[action.ensemble]
            old = self._swap(record, action.design) if isinstance(action, Swap) else self._withdraw(record, action)
            replaced.append((record, old))
        # Outer ensembles first: the inner ones stay until the outer ones have finished.
        for record, old in reversed(replaced):
            self._closing.retire(record, old)

    def _swap(self, record: ModelRecord, design: Design) -> dict[int, ModelVersion]:
        """Return the versions that are replaced."""
        if record.ensemble is None:
            raise RuntimeError(f"model '{record.name}' is not a loaded ensemble")
        made = self._make(record.ensemble, design)
        old = record.replace(made)
        record.status.serve(made.keys() - old.keys())
        what = "follows" if old else "is back with"
        log.info("ensemble '%s' %s the models of its steps", record.name, what, extra={"model": record.name})
        return old

    def _withdraw(self, record: ModelRecord, action: Withdraw) -> dict[int, ModelVersion]:
        """Return the versions that are withdrawn."""
        old = record.replace({})
        record.status.withdraw(action.problem)
        if old:
            log.warning("ensemble '%s' is unloaded: %s", record.name, action.cause, extra={"model": record.name})
        return old

    def _make(self, prepared: PreparedModel, design: Design) -> dict[int, ModelVersion]:
        steps = tuple(dict.fromkeys(design.steps))

        def members() -> list[VersionExecutor | None]:
            serving = [find_step(self._records, step) for step in steps]
            return [version.executor if version is not None else None for version in serving]

        return {
            version.version: make_ensemble(version, design, prepared.load_seconds, self._table, self._services, members)
            for version in prepared.versions
        }
