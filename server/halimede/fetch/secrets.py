"""Texts that must not appear in any output: credentials, and the parts of URLs other than the location."""

import json
import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

SHORTEST = 4
"""Minimum length of a secret: shorter values occur in ordinary words, and hiding them would garble the text."""

_QUERY = re.compile(r"(https?://[^\s?#'\"<>]*)[?#][^\s'\"<>,)]*", re.IGNORECASE)
_USER = re.compile(r"(\w+://)[^\s/@]*@")
HIDDEN = "***"


class Secrets:
    """The secret values; `hide` removes them from a text."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        forms = {form for value in values for form in _forms(value) if len(form) >= SHORTEST}
        # The longest first, because one value may contain another.
        self._forms = sorted(forms, key=len, reverse=True)

    def hide(self, text: str) -> str:
        for form in self._forms:
            text = text.replace(form, HIDDEN)
        return _USER.sub(rf"\1{HIDDEN}@", _QUERY.sub(rf"\1?{HIDDEN}", text))


def _forms(value: str) -> Iterable[str]:
    """The forms in which the value may appear: unchanged, by line, URL-encoded; each string of a JSON document."""
    value = value.strip()
    for each in {value, *value.splitlines()}:
        yield each
        yield quote(each, safe="")
        yield quote(each)
        yield quote_plus(each)
        # As in a debugger's output or in JSON.
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
