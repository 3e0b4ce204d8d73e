"""Plans models as a load does, without loading them: for `explain-config` and `check`.

Import it only when a command runs, because it imports the serving libraries.
"""

from dataclasses import replace
from typing import Protocol

from halimede.core.config.explain import Stage
from halimede.core.ensemble.graph import members_of
from halimede.core.repository.plan import ensemble_graph
from halimede.core.types import InferenceError, invalid
from halimede.runtime.prepare import LoadOptions, LoadPlan, check_versions, plan_model
from halimede.runtime.repository import ModelEntry
from halimede.workers.abandon import Abandon


class Repository(Protocol):
    def find(self, name: str) -> ModelEntry:
        """The model's directory. LookupError, OSError."""


class Planner:
    """Plans models, and for ensembles the models of their steps from the same repository, each of them once."""

    def __init__(self, repository: Repository, options: LoadOptions) -> None:
        self._repository = repository
        self._options = options
        # The error of a model that cannot be loaded; None while its plan is being made.
        self._made: dict[str, LoadPlan | InferenceError | None] = {}

    def plan(self, entry: ModelEntry) -> LoadPlan:
        """The plan of the model; InferenceError with every problem that a load would find."""
        if entry.name not in self._made:
            self._made[entry.name] = None
            try:
                self._made[entry.name] = self._plan(entry)
            except InferenceError as error:
                self._made[entry.name] = error
        made = self._made[entry.name]
        if isinstance(made, InferenceError):
            raise made
        if made is None:
            raise RuntimeError(f"the plan of '{entry.name}' needs itself")
        return made

    def _plan(self, entry: ModelEntry) -> LoadPlan:
        plan = plan_model(entry, self._options, Abandon())
        check_versions(entry, plan, self._options, Abandon())
        members = []
        for name, version in members_of(plan.config):
            step = self._step(entry.name, name)
            if version not in (-1, *step.versions):
                text = f"ensemble '{entry.name}' depends on '{name}' whose required version {version} is not loaded."
                raise invalid(text)
            members.append(step.config)
        if not members:
            return plan
        _, config = ensemble_graph(plan.config, members)
        return replace(plan, config=config, stages=(*plan.stages, Stage("the steps' models", config)))

    def _step(self, ensemble: str, name: str) -> LoadPlan:
        """The plan of a step's model. Its errors also name the ensemble."""
        if name in self._made and self._made[name] is None:
            raise invalid(f"circular dependency between ensembles: {name} -> ... -> {ensemble} -> {name}")
        try:
            return self.plan(self._repository.find(name))
        except (LookupError, OSError) as error:
            text = f"ensemble {ensemble} contains models that are not available or ambiguous: {name}: {error}"
            raise invalid(text) from None
