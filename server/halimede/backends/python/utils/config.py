"""`ModelConfig`, which `auto_complete_config` completes, and functions that read a configuration parsed from JSON."""

import json
from typing import Any

Config = dict[str, Any]


class ModelConfig:
    """Unset values may be set; values from the configuration may only be repeated. Errors are ValueError."""

    def __init__(self, model_config: str) -> None:
        self._model_config: Config = json.loads(model_config)

    def as_dict(self) -> Config:
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set it to at least the configuration's own value."""
        config = self._model_config
        configured = config.get("max_batch_size", 0)
        if configured > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {configured}, but in auto-complete-config"
                f" function for model '{config['name']}' specified max_batch_size {max_batch_size}"
            )
        config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching. No effect if it is enabled; an error if another scheduler is configured."""
        config = self._model_config
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function"
                    f" for model '{config['name']}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        config.setdefault("dynamic_batching", {})

    def add_input(self, input: Config) -> None:  # noqa: A002  models pass it by name
        """Add an input with `name`, `data_type` and `dims`, optionally `optional`."""
        self._add("input", input, ("optional",), "'name', 'data_type', 'dims' and 'optional'")

    def add_output(self, output: Config) -> None:
        """Add an output with `name`, `data_type` and `dims`."""
        self._add("output", output, (), "'name', 'data_type' and 'dims'")

    def set_model_transaction_policy(self, transaction_policy_dict: Config) -> None:
        """Set `decoupled`, the only field, unless the configuration has another value."""
        config = self._model_config
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{config['name']}' contains"
                " property other than 'decoupled'."
            )
        policy = config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{config['name']}', which is"
                f" already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled

    def _add(self, kind: str, tensor: Config, optional: tuple[str, ...], allowed: str) -> None:
        model = self._model_config["name"]
        required = ("name", "data_type", "dims")
        context = f"in auto-complete-config function for model '{model}'"
        called = f"{kind} '{tensor['name']}' {context}" if "name" in tensor else f"{kind} {context}"
        if any(key not in required + optional for key in tensor):
            raise ValueError(f"{called} contains property other than {allowed}.")
        for key in required:
            if key not in tensor:
                raise ValueError(f"{called} is missing '{key}' property.")
        name, tensors = tensor["name"], self._model_config.setdefault(kind, [])
        known = next((other for other in tensors if other["name"] == name), None)
        if known is None:
            tensors.append(tensor)
            return
        datatype = known.get("data_type", "TYPE_INVALID")
        if datatype not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {datatype} for {kind}"
                f" '{name}', model provides {tensor['data_type']}"
            )
        for key in ("dims", *optional):
            is_open = key not in known or (key == "dims" and not known[key])
            if not is_open and key in tensor and known[key] != tensor[key]:
                raise ValueError(
                    f"model '{model}', tensor '{name}': the model expects {key} {tensor[key]} but the model"
                    f" configuration specifies {key} {known[key]}"
                )
        known.update(tensor)


def get_input_config_by_name(model_config: Config, name: str) -> Config | None:
    """The input of this name in a configuration; None if it has no such input."""
    return _named(model_config, "input", name)


def get_output_config_by_name(model_config: Config, name: str) -> Config | None:
    """The output of this name in a configuration; None if it has no such output."""
    return _named(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: Config) -> bool:
    """Whether the model may send several responses to a request, or none."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _named(config: Config, kind: str, name: str) -> Config | None:
    return next((tensor for tensor in config.get(kind, ()) if tensor["name"] == name), None)
