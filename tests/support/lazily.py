"""Libraries that are imported when a test first uses them: a process that runs none of these tests does not wait for them."""

import importlib
from typing import Any


class Lazily:
    """A module; it is imported by the first use of an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest asks each global of a file of tests for `__test__` and the like; no test uses a private name.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
