"""The tables of halimede_spec that follow from the server, which the operator cannot import.

`PYTHONPATH=tests python -m support.spec_tables` writes them; a test compares them with the server.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import halimede_spec
from halimede.commands.flags import BY_NAME
from halimede.commands.readers import Choice
from halimede_spec import flag_values
from halimede_spec.flag_values import Form, Integers, Seconds, ServerFlag, Words, read_text

REGENERATE = "PYTHONPATH=tests python -m support.spec_tables"
_FOLDER = Path(halimede_spec.__file__).parent
_FLAGS_HEAD = f'''\
"""The server's flags by name. `{REGENERATE}` writes this file."""

from collections.abc import Mapping

from halimede_spec.flag_values import *

FLAGS: Mapping[str, ServerFlag] = {{
'''


def flags() -> Mapping[str, ServerFlag]:
    """The server's flags. Readers that need the server accept any text here."""
    return {
        name: ServerFlag(_reader(flag.kind.read), flag.kind.metavar, flag.kind.bare) for name, flag in BY_NAME.items()
    }


def _reader(read: Callable[[str], object]) -> Callable[[str], object]:
    if isinstance(read, Choice):
        return read.words
    if isinstance(read, Integers | Seconds | Words | Form) or read.__module__ == flag_values.__name__:
        return read
    return read_text


def _flag_row(name: str, flag: ServerFlag) -> str:
    written = getattr(flag.read, "__name__", repr(flag.read))
    parts = [written, repr(flag.metavar), *([repr(flag.bare)] if flag.bare else [])]
    return f"    {name!r}: ServerFlag({', '.join(parts)}),\n"


def write() -> None:
    rows = [_flag_row(name, flag) for name, flag in flags().items()]
    names = sorted(
        {"ServerFlag"} | {row.partition("ServerFlag(")[2].replace(",", "(").partition("(")[0] for row in rows}
    )
    head = _FLAGS_HEAD.replace("import *", f"import {', '.join(names)}")
    _write("server_flag_table.py", head + "".join(rows) + "}\n")


def _write(name: str, text: str) -> None:
    path = _FOLDER / name
    path.write_text(text)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", path], check=True)


if __name__ == "__main__":
    write()
