"""What a process that a model spawns finds under this name, once it imports the model's file anew.

The module's classes are there, and so is what needs no server. The rest says that it works in the model's own process
only. `halimede` becomes importable from the tree that this file is in: the interpreter may be a foreign one.
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
