"""The documents, and the blocks of code in them.

A block of commands (`sh`, `console`) or of Python (`python`) is run by tests/docs/test_commands.py, unless the line before it says

- `<!-- run by FILE -->`: another test runs it, or
- `<!-- not run: REASON -->`: it needs something that is not on every machine, such as a cluster.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "CONTRIBUTING.md", *sorted(PAGES.glob("*.md"))]
DECISIONS = ROOT / "docs" / "decisions"
MAPS = {"halimede": ROOT / "server" / "DESIGN.md", "halimede_operator": ROOT / "operator" / "DESIGN.md"}
"""By package, the document that says where things are."""
RECORDS = [*MAPS.values(), ROOT / "docs" / "limits.md", ROOT / "docs" / "figures.md", *sorted(DECISIONS.glob("*.md"))]
"""For those who change Halimede. They are not on the site."""
RUN = frozenset({"sh", "python", "console"})
"""Languages of blocks that are run."""
SHOWN = frozenset({"text", "json", "yaml", "protobuf", "dockerfile"})
"""Languages of outputs, files and parts of them."""
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>(?:run by|not run:) [^\n]+) -->\n)?```(?P<language>\S*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """`mark` is why tests/docs/test_commands.py does not run it; "" if it does."""

    language: str
    text: str
    mark: str = ""


def blocks(document: Path) -> Iterator[Block]:
    """In the order of the document."""
    for found in _BLOCK.finditer(document.read_text()):
        yield Block(found["language"], found["text"], found["mark"] or "")
