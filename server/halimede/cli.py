"""The command `halimede`: a name, a version, and the subcommands that installed packages bring."""

import os
from difflib import get_close_matches
from importlib.metadata import EntryPoint, distribution, entry_points

import click

from halimede import __version__
from halimede.encoding import use_utf8

COMMANDS = "halimede.commands"
"""The entry point group whose members are subcommands: `serve = "halimede.commands.serve:serve"`."""


class EntryPointGroup(click.Group):
    """A group whose subcommands are entry points; one is imported only when it is called or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(entry_points(group=COMMANDS).names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        # This distribution's own first: to read those of all others takes milliseconds.
        own = distribution("halimede").entry_points.select(group=COMMANDS, name=cmd_name)
        found: EntryPoint | None = next(iter(own or entry_points(group=COMMANDS, name=cmd_name)), None)
        if found is None:
            return None
        command = found.load()
        if not isinstance(command, click.Command):
            raise TypeError(f"entry point {found.name} of {COMMANDS} is {found.value}, which is not a click command")
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            text = f"{error.message} Options of a command follow its name: halimede serve {error.option_name}"
            raise click.UsageError(text, ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not near and os.path.exists(args[0]):
                near = [f"serve {args[0]}"]
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean '{near[0]}'?", ctx) from None


@click.group(cls=EntryPointGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="halimede", message="%(prog)s %(version)s")
def main() -> None:
    """Serve trained models; a drop-in for Triton Inference Server.

    To begin with: halimede serve --model-repository DIR. Each command has a --help of its own.
    """
    use_utf8()
