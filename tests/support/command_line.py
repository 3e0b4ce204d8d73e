"""Parse arguments of `halimede serve` with the real command, without starting a server."""

import click
import pytest

from halimede.commands.serve import serve
from halimede.settings import Settings


def settings(*arguments: str) -> Settings:
    return serve.make_context("serve", list(arguments)).params["settings"]


def complaints(*arguments: str) -> list[str]:
    """Every mistake that the command reports, in its order."""
    with pytest.raises(click.UsageError) as caught:
        settings(*arguments)
    assert caught.value.exit_code == 2
    return caught.value.format_message().split("\nError: ")


def complaint(*arguments: str) -> str:
    """The only mistake."""
    (only,) = complaints(*arguments)
    return only
