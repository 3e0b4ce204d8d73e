"""The fetch plan of `halimede_spec.fetch_plan`, with the server's own configurations. Pure."""

from typing import Any, TypeAlias

import orjson

from halimede.core.config.defaults import apply_defaults
from halimede.core.config.names import model_name_problem
from halimede.core.config.read import ParsedConfig, read_json
from halimede.core.config.validate import validate
from halimede.core.repository.layout import NOT_MODELS, detect_backend
from halimede.core.types import InferenceError
from halimede_spec import fetch_plan

FetchPlan: TypeAlias = fetch_plan.FetchPlan[ParsedConfig]
PlannedModel: TypeAlias = fetch_plan.PlannedModel[ParsedConfig]


def read_plan(text: bytes) -> tuple[FetchPlan, list[str]]:
    """The plan and its problems. Do not use a plan that has problems."""
    return fetch_plan.read_plan(text, _Rules())


class _Rules:
    """The server's rules for names and configurations of models."""

    def name_problem(self, name: str) -> str | None:
        if name.startswith(".") or name in NOT_MODELS:
            return f"{name!a} is not a name of a model: repositories ignore it"
        return model_name_problem(name)

    def read_config(self, document: dict[str, Any]) -> tuple[ParsedConfig | None, list[str]]:  # Any: what JSON has
        try:
            parsed = read_json(orjson.dumps(document))
        except (TypeError, orjson.JSONEncodeError):
            return None, ["has a number or a string that a configuration cannot hold"]
        return parsed, [problem.message for problem in parsed.problems]

    def name_of(self, config: ParsedConfig) -> str:
        return config.config.name

    def ensemble_problems(self, config: ParsedConfig, name: str) -> list[str]:
        """The problems for which the server would refuse the ensemble, which has no files that could complete it."""
        if config.config.ensemble_scheduling is None:
            return ["has no ensemble_scheduling"]
        try:
            complete = apply_defaults(detect_backend(config.config, name, ()), name)
        except InferenceError as error:
            return [error.message]
        return [problem.message for problem in validate(complete, name)]
