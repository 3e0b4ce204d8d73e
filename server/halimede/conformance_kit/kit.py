"""All checks, in order, and a model for backends that need no file."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from halimede.backends.python.backend import PythonBackend
from halimede.conformance_kit import interface, life, responses, results, sequences
from halimede.conformance_kit.requests import Maker
from halimede.conformance_kit.subject import NotTried, Subject, Wrong, on_thread
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import DataType, InferenceError, InferenceRequest
from halimede.core.types.error import describe, invalid, unsupported
from halimede.runtime.prepare import LoadOptions, plan_model
from halimede.runtime.repository import ModelEntry
from halimede.workers.abandon import Abandon


class Verdict(Enum):
    OK = "ok"
    NOT_TRIED = "--"
    FAILED = "FAIL"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check: `text` says what was seen, or what is wrong and what to do."""

    check: str
    verdict: Verdict
    text: str

    def __str__(self) -> str:
        return f"{self.verdict.value:<4}  {self.check:<12}  {self.text}"


CHECKS: dict[str, Callable[[Subject], str]] = {
    "interface": interface.check_interface,
    "load": interface.check_load,
    "completion": interface.check_completion,
    "single": results.check_single,
    "full-batch": results.check_full_batch,
    "dimensions": results.check_variable_dimensions,
    "no-elements": results.check_no_elements,
    "values": results.check_values,
    "batching": results.check_batching,
    "outputs": results.check_outputs_in_part,
    "inputs": results.check_inputs_unchanged,
    "answers": results.check_answers_kept,
    "refusals": life.check_refusals,
    "cancellation": life.check_cancellation,
    "instances": life.check_instances,
    "cycles": life.check_cycles,
    "load-errors": interface.check_load_errors,
    "check": interface.check_check,
    "process": life.check_process,
    "sequences": sequences.check_sequences,
    "restart": sequences.check_restart,
    "null-rows": sequences.check_null_rows,
    "responses": responses.check_responses,
}
DECOUPLED = ("interface", "load", "completion", "load-errors", "check", "responses")
"""Checks of decoupled models. The others run single answers in this process, where these models cannot run."""
HOSTED = ("process", "responses")
"""Checks in a worker process."""
NEEDED = ("interface", "load", "single")
"""Checks whose failure would make all further ones fail."""


def make_subject(
    entry: ModelEntry,
    options: LoadOptions,
    name: str,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    refused: Callable[[ModelConfig], Sequence[InferenceRequest]] = lambda _: (),
    tolerance: float = 1e-3,
    cycles: int = 10,
    longest_wait_secs: float = 60.0,
) -> Subject:
    """The model of the backend `name`, planned as for a load. InferenceError with every problem."""
    plan = plan_model(entry, options, Abandon())
    if plan.backend is None or plan.config.backend != name:
        what = plan.config.backend or "ensemble"
        raise invalid(f"model '{entry.name}' is of the backend '{what}', not '{name}'")
    if isinstance(plan.backend, PythonBackend):
        text = f"the backend '{name}' hosts programs in processes of its own: check its models with `halimede check`"
        raise unsupported(text)
    config = plan.config
    if unknown := shapes.keys() - {each.name for each in config.input}:
        raise invalid(f"--shape names '{min(unknown)}', which is no input of model '{entry.name}'")
    maker = Maker(config, shapes)
    return Subject(entry, options, plan, plan.backend, maker, tolerance, cycles, refused(config), longest_wait_secs)


def write_sample(directory: Path, backend: str) -> Path:
    """Write a model for a backend that needs no file: an input and an output of each datatype, of any size."""
    folder = directory / f"every_datatype_{backend}"
    (folder / "1").mkdir(parents=True)
    lines = [f'backend: "{backend}"', "max_batch_size: 8"]
    for at, datatype in enumerate(each for each in DataType if each is not DataType.INVALID):
        lines.append(f'input {{ name: "INPUT{at}" data_type: {datatype.config_name} dims: -1 }}')
        lines.append(f'output {{ name: "OUTPUT{at}" data_type: {datatype.config_name} dims: -1 }}')
    (folder / "config.pbtxt").write_text("\n".join(lines))
    return folder


def run_checks(
    subject: Subject, begin: Callable[[str], None] = lambda _: None, only: Collection[str] = ()
) -> Iterator[Outcome]:
    """The outcome of each check, as it ends. `begin` is called with the name of each before it runs."""
    for name, check in CHECKS.items():
        if only and name not in only:
            continue
        begin(name)
        outcome = _run(name, check, subject)
        yield outcome
        if outcome.verdict is Verdict.FAILED and name in NEEDED:
            return


def _run(name: str, check: Callable[[Subject], str], subject: Subject) -> Outcome:
    try:
        # On a thread, as instances are; a process is started from the main thread, whose loop it needs.
        if subject.config.is_decoupled and name not in DECOUPLED:
            raise NotTried("the model is decoupled")
        text = check(subject) if name in HOSTED else on_thread(lambda: check(subject))
    except NotTried as reason:
        return Outcome(name, Verdict.NOT_TRIED, f"not tried: {reason}")
    except Wrong as wrong:
        return Outcome(name, Verdict.FAILED, str(wrong))
    except InferenceError as error:
        return Outcome(name, Verdict.FAILED, f"an unexpected error: {error.message}; it must not occur for this model")
    except BaseException as error:  # noqa: BLE001  # backends may raise anything
        text = f"an unexpected exception: {describe(error)}; it must not occur for this model"
        return Outcome(name, Verdict.FAILED, text)
    return Outcome(name, Verdict.OK, text)
