"""What the command lines of both processes have in common."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import click

T = TypeVar("T")

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def run_command(command: click.Command, kind: type[T], arguments: Sequence[str] | None, program: str) -> T:
    """The settings that `command` returns, which are of `kind`. Exits for --help and for invalid flags."""
    try:
        settings = command.main(args=arguments, prog_name=program, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    if not isinstance(settings, kind):
        # --help was shown.
        raise SystemExit(0)
    return settings


def pods_namespace() -> str:
    """The namespace that this process runs in; `default` outside of a cluster."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except FileNotFoundError:
        return "default"
