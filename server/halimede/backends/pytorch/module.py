"""Models written in Python: a class of torch.nn.Module in `model.py`, and its weights beside it."""

import inspect
import linecache
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from halimede.backends.pytorch.naming import Argument, ArgumentKind
from halimede.backends.pytorch.runtime import runtime
from halimede.backends.pytorch.script import Call, cause_of
from halimede.core.types import InferenceError
from halimede.core.types.error import clip, internal, invalid

log = logging.getLogger(__name__)


class ModuleProgram:
    """A module on its device."""

    is_writing = True
    is_stateful = True

    def __init__(
        self, path: Path, weights: Path | None, model: str, device: Any | None, arguments: Mapping[str, object] | None
    ) -> None:
        """`device` None: the module chooses its device itself. `arguments` of torch.compile; None: it runs as it is."""
        torch = runtime()
        found = _module_class(path, model)
        try:
            module = found()
        except Exception as error:
            log.exception("model '%s': %s() failed", model, found.__name__)
            raise _failed(model, f"{found.__name__}() of {path.name} failed, without arguments", error) from error
        if weights is not None:
            _load_weights(module, weights, model)
        self.module = module.eval() if device is None else module.eval().to(device)
        parameter = next(self.module.parameters(), None)
        self.device = device or (parameter.device if parameter is not None else torch.device("cpu"))
        self.arguments = _arguments(self.module)
        self.plain = self.module
        """The module without compilation."""
        if arguments is not None:
            try:
                self.module = torch.compile(self.module, **arguments)
            except Exception as error:
                raise _failed(model, "torch.compile failed", error) from error
        self._call = Call(None, self.arguments)

    def bind(self, indexes: Mapping[str, int] | None) -> None:
        """The positions of the inputs among the arguments; None: one dictionary takes all."""
        self._call = Call(indexes, self.arguments)

    def call(self, values: Mapping[str, Any]) -> Any:
        return self._call(self.module, values)


def _arguments(module: Any) -> tuple[Argument, ...]:
    """The arguments of `forward`; what it takes beyond them (*args) is not used."""
    found: list[Argument] = []
    for each in inspect.signature(module.forward).parameters.values():
        if each.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        written = str(each.annotation)
        kind = ArgumentKind.DICT if written.lower().startswith(("dict[str", "typing.dict[str")) else ArgumentKind.ANY
        found.append(Argument(each.name, kind, each.default is not inspect.Parameter.empty, written))
    return tuple(found)


def _module_class(path: Path, model: str) -> Any:
    """The class of the model in the file."""
    torch = runtime()
    # Not the name of the file, which may be that of an installed module.
    name = "halimede_model"
    code = path.read_bytes()
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    # For modules beside the file. Last, so that they hide no installed one.
    sys.path.append(str(path.parent))
    linecache.cache.pop(str(path), None)
    try:
        # Not by an import, which would use and write compiled files: they may be those of an earlier version.
        exec(compile(code, str(path), "exec"), module.__dict__)  # noqa: S102  # the model's own code, in its process
    except BaseException as error:
        log.exception("model '%s': the import of %s failed", model, path.name)
        raise _failed(model, f"the import of {path.name} failed", error) from error
    own = {
        key: value
        for key, value in sorted(vars(module).items())
        if isinstance(value, type) and issubclass(value, torch.nn.Module) and value.__module__ == name
    }
    if not own:
        raise invalid(f"model '{clip(model)}': {path.name} has no class derived from torch.nn.Module")
    fitting = [key for key, value in own.items() if _needs_nothing(value)] or list(own)
    if len(fitting) > 1:
        log.warning("model '%s': %s has the classes %s; '%s' is served", model, path.name, ", ".join(own), fitting[0])
    return own[fitting[0]]


def _needs_nothing(found: Any) -> bool:
    """Whether the class can be made without arguments."""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return True
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(each.default is not inspect.Parameter.empty or each.kind in variable for each in parameters)


def _load_weights(module: Any, weights: Path, model: str) -> None:
    torch = runtime()
    try:
        found = torch.load(str(weights), map_location="cpu", weights_only=True)
    except Exception as error:
        text = f"model '{clip(model)}': {weights.name} has no plain weights: {clip(cause_of(error))}"
        hint = "; write it by torch.save(model.state_dict(), path)"
        raise invalid(text + hint) from error
    if not isinstance(found, Mapping):
        text = f"model '{clip(model)}': {weights.name} has a {type(found).__name__} and not the weights of a module"
        raise invalid(f"{text}; write it by torch.save(model.state_dict(), path)")
    try:
        module.load_state_dict(found)
    except RuntimeError as error:
        text = f"model '{clip(model)}': the weights in {weights.name} do not fit {type(module).__name__}: "
        raise invalid(text + clip(" ".join(str(error).split()))) from error


def _failed(model: str, what: str, error: BaseException) -> InferenceError:
    return internal(f"model '{clip(model)}': {what}: {type(error).__name__}: {clip(str(error))}")
