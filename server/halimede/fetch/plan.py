"""What is to be fetched: the plan of `halimede_spec.fetch_plan`, with the server's configurations in it. Pure."""

from typing import Any, TypeAlias

import orjson

from halimede.core.config.defaults import apply_defaults
from halimede.core.config.names import model_name_problem
from halimede.core.config.read import ParsedConfig, read_json
from halimede.core.config.validate import validate
from halimede.core.repository.layout import NOT_MODELS, detect_backend
from halimede.core.types import InferenceError
from halimede_spec import fetch_plan

Plan: TypeAlias = fetch_plan.Plan[ParsedConfig]
ModelPlan: TypeAlias = fetch_plan.ModelPlan[ParsedConfig]


def read_plan(text: bytes) -> tuple[Plan, list[str]]:
    """The plan and all that is wrong with it; with problems the plan is not to be used."""
    return fetch_plan.read_plan(text, _Rules())


class _Rules:
    """What the server takes as a model's name and as a configuration."""

    def name_problem(self, name: str) -> str | None:
        if name.startswith(".") or name in NOT_MODELS:
            return f"{name!a} is no model's name: a repository passes it over"
        return model_name_problem(name)

    def read_config(self, document: dict[str, Any]) -> tuple[ParsedConfig | None, list[str]]:  # Any: what JSON has
        try:
            parsed = read_json(orjson.dumps(document))
        except (TypeError, orjson.JSONEncodeError):
            return None, ["has a number or a text that no configuration can hold"]
        return parsed, [problem.message for problem in parsed.problems]

    def name_of(self, config: ParsedConfig) -> str:
        return config.config.name

    def ensemble_problems(self, config: ParsedConfig, name: str) -> list[str]:
        """What the server would refuse: an ensemble has no files that could complete it."""
        if config.config.ensemble_scheduling is None:
            return ["has no ensemble_scheduling"]
        try:
            complete = apply_defaults(detect_backend(config.config, name, ()), name)
        except InferenceError as error:
            return [error.message]
        return [problem.message for problem in validate(complete, name)]
