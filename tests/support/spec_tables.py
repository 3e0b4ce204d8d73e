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
from halimede.core.config.message_types import FieldKind, FieldType, ValueType, message_type
from halimede.core.config.model_config import ModelConfig
from halimede_spec import flag_values
from halimede_spec.config_field import ConfigField
from halimede_spec.flag_values import Form, Integers, Seconds, ServerFlag, Words, read_text

REGENERATE = "PYTHONPATH=tests python -m support.spec_tables"
_FOLDER = Path(halimede_spec.__file__).parent
_FLAGS_HEAD = f'''\
"""The server's flags by name. `{REGENERATE}` writes this file."""

from collections.abc import Mapping

from halimede_spec.flag_values import *

FLAGS: Mapping[str, ServerFlag] = {{
'''
_CONFIG_HEAD = f'''\
"""The fields of a model configuration under their JSON names.

`{REGENERATE}` writes this file.
"""

from collections.abc import Mapping

from halimede_spec.config_field import ConfigField

MESSAGES: Mapping[str, Mapping[str, ConfigField]] = {{
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


def messages() -> tuple[Mapping[str, Mapping[str, ConfigField]], Mapping[str, tuple[str, ...]]]:
    """The server's messages of a model configuration, ModelConfig first, and the names of its enums' values."""
    found: dict[str, Mapping[str, ConfigField]] = {}
    enums: dict[str, tuple[str, ...]] = {}
    waiting: list[type] = [ModelConfig]
    while waiting:
        message = waiting.pop(0)
        if message.__name__ in found:
            continue
        targets = message_type(message).by_name.values()
        found[message.__name__] = {_camel(each.name): _config_field(each) for each in targets}
        enums |= {_kind(each.value): tuple(each.value.members) for each in targets if each.value.members}
        waiting += [each.value.message for each in targets if each.value.message is not None]
    return found, enums


def _config_field(target: FieldType) -> ConfigField:
    keys = _kind(target.entry.by_name["key"].value) if target.entry is not None else ""
    return ConfigField(_kind(target.value), target.repeated, keys, tuple(map(_camel, target.oneof)))


def _kind(value: ValueType) -> str:
    match value.kind:
        case FieldKind.MESSAGE:
            return str(value.message.__name__)
        case FieldKind.INTEGER:
            return ("uint" if value.low == 0 else "int") + str((value.high - value.low).bit_length())
        case FieldKind.ENUM:
            return type(value.zero).__name__
    return value.kind.name.lower()


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _config_row(name: str, field: ConfigField) -> str:
    named = {"is_list": field.is_list, "keys": field.keys, "one_of": field.one_of}
    parts = [repr(field.kind), *(f"{key}={value!r}" for key, value in named.items() if value)]
    return f"{name!r}: ConfigField({', '.join(parts)})"


def write() -> None:
    rows = [_flag_row(name, flag) for name, flag in flags().items()]
    names = sorted(
        {"ServerFlag"} | {row.partition("ServerFlag(")[2].replace(",", "(").partition("(")[0] for row in rows}
    )
    head = _FLAGS_HEAD.replace("import *", f"import {', '.join(names)}")
    _write("server_flag_table.py", head + "".join(rows) + "}\n")
    found, enums = messages()
    parts = [
        f"    {message!r}: {{{', '.join(_config_row(*each) for each in fields.items())}}},\n"
        for message, fields in found.items()
    ]
    values = "".join(f"    {name!r}: {members!r},\n" for name, members in enums.items())
    text = f"}}\n\nENUMS: Mapping[str, tuple[str, ...]] = {{\n{values}}}\n"
    _write("config_table.py", _CONFIG_HEAD + "".join(parts) + text)


def _write(name: str, text: str) -> None:
    path = _FOLDER / name
    path.write_text(text)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", path], check=True)


if __name__ == "__main__":
    write()
