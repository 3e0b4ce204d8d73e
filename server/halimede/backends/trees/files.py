"""Names and signs of the file formats. Pure."""

from collections.abc import Collection, Mapping

FILENAMES: Mapping[str, str] = {
    "xgboost_ubj": "xgboost.ubj",
    "xgboost_json": "xgboost.json",
    "xgboost": "xgboost.model",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
"""The default file by `model_type`, with Triton's names."""

HEAD_SIZE = 64
"""How many bytes at the start of a file `looks_like` needs."""

PICKLE = "a pickle"

_SUFFIXES = {".ubj": "xgboost_ubj", ".json": "xgboost_json", ".txt": "lightgbm", ".tl": "treelite_checkpoint"}
_BLANKS = b" \t\r\n"
_CHECKPOINT_MAJORS = (3, 4)


def looks_like(head: bytes) -> str | None:
    """The `model_type` of a file that begins with `head`, or PICKLE; None if nothing is known about it.

    The old binary format of XGBoost has no sign of its own, except for an optional one.
    """
    text = head.lstrip(_BLANKS)
    if text.startswith(b"{"):
        return "xgboost_json" if text[1:].lstrip(_BLANKS)[:1] in (b'"', b"}") else "xgboost_ubj"
    if head.startswith((b"tree\n", b"tree\r\n")):
        return "lightgbm"
    if head.startswith((b"binf", b"bs64")):
        return "xgboost"
    if len(head) >= 12 and int.from_bytes(head[:4], "little") in _CHECKPOINT_MAJORS and head[5:8] == b"\0\0\0":
        return "treelite_checkpoint"
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return PICKLE
    return None


def default_type(files: Collection[str]) -> str | None:
    """The `model_type` of a version with these files, by their default names."""
    return next((kind for kind, name in FILENAMES.items() if name in files), None)


def type_of(filename: str, head: bytes) -> str:
    """The `model_type` of a file whose configuration names none: that of a well-known name, else what it looks like.

    XGBoost's old format is Triton's default.
    """
    known = next((kind for kind, name in FILENAMES.items() if name == filename), None)
    if known is not None:
        return known
    by_name = next((kind for suffix, kind in _SUFFIXES.items() if filename.endswith(suffix)), "xgboost")
    found = looks_like(head)
    return by_name if found is None or found == PICKLE else found


def mismatch(model_type: str, head: bytes) -> str:
    """A hint for the text of a failed load: which type the file looks like; "" if that is the one or unknown."""
    found = looks_like(head)
    if found is None or found == model_type:
        return ""
    if found == PICKLE:
        return "; the file looks like a pickle, which only the backend 'sklearn' can load"
    return f"; the file looks like one of model_type '{found}'"
