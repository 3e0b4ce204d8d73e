"""Writes the reference pages that follow from the code: `python docs/generate.py`. A test compares them with it."""

from pathlib import Path

from halimede.commands.flags import GROUPS, Flag
from halimede.commands.flags import Treatment as FlagTreatment
from halimede.core.config.schema import FieldDescription, MessageDescription, descriptions
from halimede.core.config.support import Treatment

PAGES = Path(__file__).parent / "pages"

FLAGS_HEAD = """\
# Flags

`halimede serve` and `tritonserver` take the same flags, under Triton's names. A value is written `--flag=value` or
`--flag value`; booleans are `true`, `on`, `1`, `false`, `off` or `0`. A mistake ends the command with code 2 and a text
that names the flag.

Flags without effect are accepted, and a line of the log says why they do nothing. Flags that are not supported yet are
refused, but for the value that leaves their feature off.
"""

CONFIGURATION_HEAD = """\
# Model configuration

A model's `config.pbtxt` is Triton's, in protobuf's text format. `config.yaml` has the same fields under the same names,
with lists as lists and maps as maps; a model has one of the two. What is not said is taken from the model file, or is a
default: `halimede explain-config MODEL_DIR` shows all of it, and where each value came from.

Whatever is wrong is reported at once, with line and column. Fields without effect are accepted, because every answer is
the same without them, and one warning per load names them. Fields that are not supported yet and can change an answer
make the load fail.
"""


def flags_page() -> str:
    """All flags, by group and treatment."""
    lines = [FLAGS_HEAD]
    for group, flags in GROUPS.items():
        lines += [f"## {group}", "", "| flag | default | meaning |", "|---|---|---|"]
        lines += [_flag_row(flag) for flag in flags]
        lines.append("")
    return "\n".join(lines)


def _flag_row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    value = f" `{_cell(flag.metavar)}`" if flag.metavar else ""
    meaning = _cell(flag.help)
    if flag.treatment is FlagTreatment.NO_EFFECT:
        meaning += f" *No effect: {_cell(flag.why)}.*"
    elif flag.treatment is FlagTreatment.NOT_YET:
        meaning += f" *Not supported yet: {_cell(flag.why)}.*"
    if flag.repeatable:
        meaning += " Repeatable."
    return f"| {names}{value} | {f'`{flag.default}`' if flag.default else ''} | {meaning} |"


def configuration_page() -> str:
    """All messages and fields of the configuration, `ModelConfig` first."""
    lines = [CONFIGURATION_HEAD]
    for message in descriptions():
        lines += [*_message_lines(message), ""]
    return "\n".join(lines)


def _message_lines(message: MessageDescription) -> list[str]:
    head = [f"## {message.name}", ""]
    if not message.fields:
        return [*head, "Has no fields."]
    return [*head, "| field | type | default | meaning |", "|---|---|---|---|", *map(_field_row, message.fields)]


def _field_row(field: FieldDescription) -> str:
    kind = _cell(field.type)
    if field.message:
        kind = kind.replace(field.message, f"[{field.message}](#{field.message.lower()})")
    meaning = _cell(field.meaning)
    if field.values:
        meaning += " One of " + ", ".join(f"`{value}`" for value in field.values) + "."
    if field.oneof:
        meaning += " At most one of " + ", ".join(f"`{name}`" for name in field.oneof) + "."
    if field.treatment is Treatment.NO_EFFECT:
        meaning += f" *No effect: {_cell(field.why)}.*"
    elif field.treatment is Treatment.NOT_YET:
        meaning += " *Not supported yet.*"
    return f"| `{field.name}` | {kind} | {f'`{field.default}`' if field.default else ''} | {meaning} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


GENERATED = {"flags.md": flags_page, "configuration.md": configuration_page}

if __name__ == "__main__":
    for name, page in GENERATED.items():
        (PAGES / name).write_text(page())
