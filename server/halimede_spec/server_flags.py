"""What can be said about a flag of `halimede serve` without the server: whether it exists, and the form of its value.

The server's own table of flags has more: help, treatment, and readers that look at files or need its libraries.
"""

from difflib import get_close_matches

from halimede_spec.server_flag_table import FLAGS


def flag_problem(argument: str) -> str | None:
    """What is wrong with an argument `--name=value` or `--name`; None for a valid one.

    Abbreviated names are refused. A message repeats only values that a reader of `flag_values` refuses: other values
    may have secrets.
    """
    name, equals, text = argument.partition("=")
    flag = FLAGS.get(name)
    if flag is None:
        near = get_close_matches(name[:80], FLAGS, 1, 0.85)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{name[:80]!r} is not a flag of the server{hint}"
    if not equals and not flag.bare:
        return f"{name} needs a value, as {name}={flag.metavar}"
    try:
        flag.read(text if equals else flag.bare)
    except ValueError as error:
        return f"{name}: {error}"
    return None
