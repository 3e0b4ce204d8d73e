"""`halimede fetch`: download models from stores into a repository directory, before a server starts on it.

The result is written both to standard error and to the file that Kubernetes shows with a container's state.
"""

import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from halimede.termination_message import MAX_BYTES, TERMINATION_LOG, write_message

if TYPE_CHECKING:
    from halimede.fetch.plan import FetchPlan
    from halimede.fetch.secrets import Secrets
    from halimede_spec.fetch_exit import FetchExit

DEFAULT_TIMEOUT_SECS = 60.0
FAILURE_FILE = "failure"
"""A file in the repository's hidden directory, which survives a container restart: the last run's failure, if its cause
is outside of the pod."""
UNEXPECTED = 1
KILLED = 128 + signal.SIGTERM


def run(
    plan_file: str, into: Path, timeout_secs: float, termination_log: Path | None, *, is_init_container: bool = False
) -> int:
    """Fetch, and report the result; returns the exit code.

    Kubernetes shows why a container failed only after it has ended. Therefore an init container ends at the first
    failure of a store. After the restart it reads from the file what was already reported, and retries until the store
    has the model, or another failure occurs: kubelets wait for up to 5 minutes before the next restart.
    """
    # Imported here, so that --help and a mistyped flag answer quickly, without the libraries of stores.
    from halimede.fetch.errors import FetchError
    from halimede.fetch.fetcher import fetch_plan
    from halimede.fetch.report import done_lines, failure_text, success_text
    from halimede.fetch.retry import RetryPolicy
    from halimede.fetch.secrets import Secrets

    # PID 1 of a container gets no signal for which it has no handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(KILLED))
    # An unresponsive name server must fail a try within seconds: connection timeouts do not cover name resolution.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    # A cache may be shared by processes of one group.
    os.umask(0o002)
    environment = dict(os.environ)
    secrets = Secrets()
    known = _take_last_failure(into) if is_init_container else ""
    try:
        plan = _read(plan_file)
        secrets = _secrets(plan, environment)
        _log_without(secrets)
        retries = RetryPolicy(timeout_secs, is_first=known is None, known=known or "")
        fetched = fetch_plan(plan, into, environment, retries)
    except FetchError as error:
        message = failure_text(secrets.hide(error.message))
        code = int(error.code)
        if is_init_container:
            _keep_failure(into, error.code, message)
    except Exception as error:
        logging.getLogger(__name__).exception("the fetch failed")
        message = failure_text(secrets.hide(f"{type(error).__name__}: {error}"))
        code = UNEXPECTED
    else:
        click.echo("\n".join(done_lines(fetched, into)), err=True)
        write_message(success_text(fetched), termination_log)
        return 0
    click.echo(f"Error: {message}", err=True)
    write_message(message, termination_log)
    return code


def _take_last_failure(into: Path) -> str | None:
    """The last run's report; "" if it only reported that the store answers again; None if it reported nothing."""
    from halimede.fetch.repository import HIDDEN

    file = into / HIDDEN / FAILURE_FILE
    try:
        message = file.read_text()
        # Deleted now: a run that is killed reports another reason, so the next run must report this one again.
        file.unlink()
    except OSError:
        return None
    return message


def _keep_failure(into: Path, code: "FetchExit", message: str) -> None:
    from halimede.fetch.repository import HIDDEN
    from halimede_spec.fetch_exit import FetchExit

    if code in (FetchExit.UNREACHABLE, FetchExit.AUTH, FetchExit.NOT_FOUND, FetchExit.RECOVERED):
        with suppress(OSError):
            (into / HIDDEN / FAILURE_FILE).write_text("" if code is FetchExit.RECOVERED else message)


def _read(plan_file: str) -> "FetchPlan":
    from halimede.fetch.errors import FetchError, cause_of
    from halimede.fetch.plan import read_plan
    from halimede_spec.fetch_exit import FetchExit

    try:
        plan, problems = read_plan(Path(plan_file).read_bytes())
    except OSError as error:
        raise FetchError(FetchExit.BAD_PLAN, f"the plan {plan_file}: {cause_of(error)}") from None
    if problems:
        raise FetchError(FetchExit.BAD_PLAN, "\n".join(["the plan cannot be used:", *problems]))
    return plan


def _secrets(plan: "FetchPlan", environment: dict[str, str]) -> "Secrets":
    """All values that must not be printed. Unreadable credentials are skipped here; the model's fetch reports them."""
    from halimede.fetch.credentials import read_credentials, secret_values, secrets_of_environment
    from halimede.fetch.errors import FetchError
    from halimede.fetch.fetcher import credentials_folder
    from halimede.fetch.secrets import Secrets

    values = secrets_of_environment(environment)
    for model in plan.models:
        if (folder := credentials_folder(model, plan.s3)) is not None:
            try:
                values += secret_values(read_credentials(folder))
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
    help="The repository's folder; created if it does not exist.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=DEFAULT_TIMEOUT_SECS,
    show_default=True,
    metavar="SECS",
    help="How long the store may fail or deliver nothing, before the fetch fails.",
)
@click.option(
    "--init-container",
    "is_init_container",
    is_flag=True,
    help="For a container that is restarted when it fails: end within seconds if the store does not have the model, so "
    "that the container's status shows the reason; after the restart try until it has.",
)
@click.option(
    "--termination-log",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"Where to write the reason of a failure, {MAX_BYTES} bytes at most. [{TERMINATION_LOG}, if it is writable]",
)
@click.pass_context
def fetch(
    ctx: click.Context,
    plan_file: str,
    into: Path,
    timeout: float,
    is_init_container: bool,
    termination_log: Path | None,
) -> None:
    """Download the models that a plan names into a model repository.

    A model is named by a URI of a store (s3, gs, az), of a web server or of a mounted folder. Its folder appears in the
    repository when it is complete. A fetch that was interrupted continues where it stopped.

    Exit codes: 2 the plan or the folder cannot be used, 10 access denied, 11 not found, 12 the digest differs, 13 disk
    or cache full, 14 no model, 15 the store cannot be reached. With --init-container also 16: the store answers again,
    and the next run continues.
    """
    ctx.exit(run(plan_file, into, timeout, termination_log, is_init_container=is_init_container))
