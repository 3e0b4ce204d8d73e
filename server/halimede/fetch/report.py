"""The report at the end of a fetch, small enough for a container's termination message. Pure."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from halimede.termination_message import MAX_BYTES

MAX_FAILURE_BYTES = 1500


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """`digest` is None for a mounted model for which none was requested; `files` and `size_bytes` then count the
    linked files. `fetched_at` is RFC 3339. `cached` means that no content was downloaded."""

    name: str
    digest: str | None
    size_bytes: int
    files: int
    fetched_at: str
    cached: bool


def failure_text(text: str) -> str:
    """The cause, at most MAX_FAILURE_BYTES of UTF-8, without control characters for terminals."""
    shown = "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text.strip())
    raw = shown.encode("utf-8", "replace")
    if len(raw) <= MAX_FAILURE_BYTES:
        return shown
    return raw[: MAX_FAILURE_BYTES - 3].decode("utf-8", "ignore") + "..."


def done_lines(models: Sequence[FetchedModel], into: Path) -> list[str]:
    """Where the models are, and how to serve them, for people."""
    lines = [
        f"model '{model.name}': {model.files} file{'' if model.files == 1 else 's'}, {_size(model.size_bytes)}, in "
        f"{into / model.name}{' (nothing was downloaded)' if model.cached else ''}"
        for model in models
    ]
    return [*lines, f"Serve them by: halimede serve --model-repository {shlex.quote(str(into))}"]


def _size(size: int) -> str:
    return f"{size} bytes" if size < 1_000_000 else f"{size / 1e6:.1f} MB"


def success_text(models: Sequence[FetchedModel]) -> str:
    """JSON of at most MAX_BYTES; models that do not fit are counted as `omitted`."""
    entries = [asdict(model) for model in models]
    for shown in range(len(entries), -1, -1):
        document: dict[str, object] = {"models": entries[:shown]}
        if shown < len(entries):
            document["omitted"] = len(entries) - shown
        text = json.dumps(document, separators=(",", ":"))
        if len(text.encode()) <= MAX_BYTES:
            return text
    raise AssertionError("unreachable: a report without models is short")
