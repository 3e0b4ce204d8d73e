"""The module of this name in a process that a model spawns, which imports the model's file again.

It has the module's classes, and all functions that need no server. The others raise an error: they work only in the
model's own process. This file makes `halimede` importable from its own tree, as the interpreter may be a foreign one.
"""

import sys
from pathlib import Path
from types import ModuleType

if "halimede" not in sys.modules:
    _package = ModuleType("halimede")
    _package.__path__ = [str(Path(__file__).resolve().parents[3])]
    sys.modules["halimede"] = _package

from halimede.backends.python.utils.module import CONTENTS

globals().update(CONTENTS)
