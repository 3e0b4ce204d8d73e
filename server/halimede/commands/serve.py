"""`halimede serve`, also installed as `tritonserver`: serve until stopped. Invalid flags end it with exit code 2."""

import os
import signal
import textwrap
from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from halimede import __version__
from halimede.commands.assemble import assemble
from halimede.commands.flag import Flag, FlagTreatment
from halimede.commands.flags import BY_NAME, GROUPS, HELP, TRITON_VERSION, VERSION, all_flags
from halimede.commands.parse import parse
from halimede.encoding import use_utf8
from halimede.processes.blas import loading_blas
from halimede.settings import Settings

TEXT_COLUMN = 32
"""Maximum column at which the help's descriptions begin; a longer flag has a line of its own."""
NO_BREAK = "\N{NO-BREAK SPACE}"


class ServeCommand(click.Command):
    """Flags come from the table of flags instead of click's parameters, because click stops at the first mistake."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return []
        use_utf8()
        given = parse(args)
        if HELP in given.values:
            click.echo(self.get_help(ctx))
            ctx.exit()
        is_tritonserver = ctx.info_name == "tritonserver"
        version = TRITON_VERSION if is_tritonserver else __version__
        if VERSION in given.values:
            # The one that clients see.
            reported = given.values.get(BY_NAME["--server-version"], [version])[-1]
            own = "" if reported == __version__ else f" (halimede {__version__})"
            click.echo(f"{ctx.find_root().info_name} {reported}{own}")
            ctx.exit()
        settings, problems = assemble(given, os.environ, server_version=version)
        if problems:
            raise click.UsageError("\nError: ".join(problems), ctx)
        ctx.params["settings"] = replace(settings, has_start_tables=is_tritonserver)
        return []

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return ["[OPTIONS]", "[MODEL_FILE]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        for title, flags in GROUPS.items():
            honoured = [flag for flag in flags if flag.treatment is FlagTreatment.HONOURED]
            if honoured:
                with formatter.section(title):
                    for flag in honoured:
                        _write_flag(formatter, flag)
        with formatter.section("Without effect here (accepted; the log gives the reason)"):
            _write_names(formatter, FlagTreatment.NO_EFFECT)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002 - as above
        return [CompletionItem(name) for name in BY_NAME if name.startswith(incomplete)]


# click's own lists break lines at hyphens, and a search does not find a flag that is split over two lines.


def _write_flag(formatter: click.HelpFormatter, flag: Flag) -> None:
    notes = ["(repeatable)"] if flag.repeatable else []
    notes += [f"[{flag.default}]"] if flag.default and flag.metavar else []
    head = " ".join([" " * formatter.current_indent + ", ".join(flag.names), flag.metavar]).rstrip()
    column = min(TEXT_COLUMN, formatter.width // 3)
    lines = _wrap(" ".join([flag.help, *notes]), formatter.width, column)
    if len(head) + 2 <= column:
        lines[0] = head.ljust(column) + lines[0].lstrip()
    else:
        lines.insert(0, head)
    formatter.write("".join(f"{line}\n" for line in lines))


def _write_names(formatter: click.HelpFormatter, treatment: FlagTreatment) -> None:
    names: Iterable[str] = (
        f"{flag.name} [{flag.default}]" if flag.default else flag.name
        for flag in all_flags()
        if flag.treatment is treatment
    )
    lines = _wrap(", ".join(names), formatter.width, formatter.current_indent)
    formatter.write("".join(f"{line}\n" for line in lines))


def _wrap(text: str, width: int, indent: int) -> list[str]:
    space = " " * indent
    # Keep a default on the same line as the word before it.
    lines = textwrap.wrap(
        text.replace(" [", f"{NO_BREAK}["),
        width,
        initial_indent=space,
        subsequent_indent=space,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace(NO_BREAK, " ") for line in lines]


def run_server(settings: Settings) -> NoReturn:
    """Serve until stopped; the process ends with the server's exit code."""
    # For a stop while the libraries are imported: PID 1 of a container gets no signal for which it has no handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    # Imported here, so that --help and a mistyped flag answer quickly, without the server's libraries.
    with loading_blas():
        from halimede.app import run

    run(settings)


serve = ServeCommand(
    "serve",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    callback=run_server,
    short_help="Serve models over HTTP and gRPC.",
    help="Serve the models of a repository, or one model file, over HTTP and gRPC until SIGTERM.\n\n"
    "Values are written --flag=value or --flag value; booleans are true, on, 1, false, off or 0, and true if none "
    "is given. Defaults are in brackets.",
)
"""Installed as the console script `tritonserver`."""
