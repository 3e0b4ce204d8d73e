"""Words that no output may hold: the values of credentials, and what addresses carry beside the place they name."""

import json
import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

SHORTEST = 4
"""Shorter values would be found in every second word, and hide what the text says."""

_QUERY = re.compile(r"(https?://[^\s?#'\"<>]*)[?#][^\s'\"<>,)]*", re.IGNORECASE)
_USER = re.compile(r"(\w+://)[^\s/@]*@")
HIDDEN = "***"


class Secrets:
    """The values, and `hide`, which takes them out of a text."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        forms = {form for value in values for form in _forms(value) if len(form) >= SHORTEST}
        # The longest first: one may be a part of another.
        self._forms = sorted(forms, key=len, reverse=True)

    def hide(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, HIDDEN)
        return _USER.sub(rf"\1{HIDDEN}@", _QUERY.sub(rf"\1?{HIDDEN}", text))


def _forms(value: str) -> Iterable[str]:
    """The value as it may turn up: as it is, line by line, encoded for an address; of a JSON document each string."""
    value = value.strip()
    for each in {value, *value.splitlines()}:
        yield each
        yield quote(each, safe="")
        yield quote(each)
        yield quote_plus(each)
        # As a debugger's or a JSON text has it.
        yield json.dumps(each)[1:-1]
    if value.startswith("{"):
        try:
            document = json.loads(value)
        except (ValueError, RecursionError):
            return
        for key, part in document.items():
            if isinstance(part, str) and key not in _PUBLIC:
                yield from _forms(part)


_PUBLIC = frozenset({"type", "auth_uri", "token_uri", "universe_domain", "gcs_base_url", "project_id"})
