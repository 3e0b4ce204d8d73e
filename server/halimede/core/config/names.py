"""The rules for names of models and for paths of their files."""

import unicodedata

from halimede.core.types.error import clip


def model_name_problem(name: str) -> str | None:
    """Why this cannot be a model name; None for a valid one. A name is one safe path component and one line of text."""
    if not name:
        return "a model name must not be empty"
    problem = None
    if "/" in name:
        problem = "must not contain '/'"
    elif name in (".", ".."):
        problem = "must not be '.' or '..'"
    elif is_unprintable(name):
        problem = "must be valid UTF-8 without control characters"
    elif len(name.encode()) > 255:
        problem = "must be at most 255 bytes long"
    return f"model name {clip(name)!a} {problem}" if problem else None


def path_problem(path: str) -> str | None:
    """Why a model's files may not have this path; None for a valid one. Links are checked when the file is read."""
    if path.startswith("/"):
        return "must not be an absolute path"
    if ".." in path.split("/"):
        return "must not contain '..'"
    if is_unprintable(path):
        return "must be valid UTF-8 without control characters"
    if len(path.encode()) > 4095:
        return "must be at most 4095 bytes long"
    return None


def is_unprintable(text: str) -> bool:
    """Whether the text contains a control character or a lone surrogate (from a file name that is not UTF-8)."""
    return any(unicodedata.category(c) in ("Cc", "Cs") for c in text)
