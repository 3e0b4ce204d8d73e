"""The type of one field of a model configuration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ConfigField:
    """`kind` is `string`, `bool`, `float`, an integer such as `int32`, or the name of an enum or of a message.

    `keys` is the kind of a map's keys, "" for a field that is no map. At most one of the fields in `one_of`, which
    include this one, may be set; () if there is no such rule.
    """

    kind: str
    is_list: bool = False
    keys: str = ""
    one_of: tuple[str, ...] = ()
