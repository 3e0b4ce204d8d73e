"""`halimede fetch`: models out of stores into a repository's folder, before a server starts on it.

The end is told twice: on standard error, and in the file that Kubernetes shows with a container's state.
"""

import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from halimede.termination import MAX_BYTES, TERMINATION_LOG, tell

if TYPE_CHECKING:
    from halimede.fetch.plan import Plan
    from halimede.fetch.secrets import Secrets

DEFAULT_TIMEOUT_SECS = 900.0
UNEXPECTED = 1
KILLED = 128 + signal.SIGTERM


def run(plan_file: str, into: Path, timeout_secs: float, termination_log: Path | None) -> int:
    """Fetch, and say how it ended; the exit code."""
    # Imported here, so that --help and a mistyped flag answer without the libraries of stores.
    from halimede.fetch.faults import FetchError
    from halimede.fetch.fetcher import fetch_plan
    from halimede.fetch.report import failure_text, success_text
    from halimede.fetch.secrets import Secrets

    # The first process of a container gets no signal without asking.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(KILLED))
    # A cache may be shared by processes of one group.
    os.umask(0o002)
    environment = dict(os.environ)
    secrets = Secrets()
    try:
        plan = _read(plan_file)
        secrets = _secrets(plan, environment)
        _log_without(secrets)
        fetched = fetch_plan(plan, into, environment, timeout_secs)
    except FetchError as error:
        said = failure_text(secrets.hide(error.message))
        code = int(error.code)
    except Exception as error:
        logging.getLogger(__name__).exception("the fetch failed")
        said = failure_text(secrets.hide(f"{type(error).__name__}: {error}"))
        code = UNEXPECTED
    else:
        tell(success_text(fetched), termination_log)
        return 0
    click.echo(f"Error: {said}", err=True)
    tell(said, termination_log)
    return code


def _read(plan_file: str) -> "Plan":
    from halimede.fetch.faults import Exit, FetchError
    from halimede.fetch.plan import read_plan

    try:
        plan, problems = read_plan(Path(plan_file).read_bytes())
    except OSError as error:
        raise FetchError(Exit.BAD_PLAN, f"the plan {plan_file}: {error.strerror}") from None
    if problems:
        raise FetchError(Exit.BAD_PLAN, "\n".join(["the plan cannot be used:", *problems]))
    return plan


def _secrets(plan: "Plan", environment: dict[str, str]) -> "Secrets":
    """All that must not be said. Credentials that cannot be read are no secret; their model's fetch says why."""
    from halimede.fetch.credentials import read_credentials, secret_values, secrets_of_environment
    from halimede.fetch.faults import FetchError
    from halimede.fetch.secrets import Secrets

    values = secrets_of_environment(environment)
    for model in plan.models:
        if model.credentials is not None:
            try:
                values += secret_values(read_credentials(model.credentials))
            except FetchError:
                continue
        values.append(model.uri.address.partition("?")[2])
    return Secrets(values)


def _log_without(secrets: "Secrets") -> None:
    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return secrets.hide(super().format(record))

    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


@click.command(
    "fetch",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    short_help="Download models from stores into a repository.",
)
@click.option("--plan", "plan_file", required=True, metavar="FILE", help="The plan, a JSON document.")
@click.option(
    "--into",
    required=True,
    type=click.Path(path_type=Path),
    help="The repository's folder, made if need be.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=DEFAULT_TIMEOUT_SECS,
    show_default=True,
    metavar="SECS",
    help="How long all of it may take, tries that fail included.",
)
@click.option(
    "--termination-log",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Where to write the reason of a failure, {MAX_BYTES} bytes at most. [{TERMINATION_LOG}, if it is writable]",
)
@click.pass_context
def fetch(ctx: click.Context, plan_file: str, into: Path, timeout: float, termination_log: Path | None) -> None:
    """Download the models that a plan names into a model repository.

    A model is named by a URI of a store (s3, gs, az), of a web server or of a mounted folder. Its folder appears in the
    repository when it is complete. A fetch that was interrupted continues where it stopped.

    Exit codes: 2 the plan or the folder cannot be used, 10 access denied, 11 not found, 12 the digest differs, 13 disk
    or cache full, 14 no model, 15 the store cannot be reached.
    """
    ctx.exit(run(plan_file, into, timeout, termination_log))
