"""OpenVINO's errors in words for the author of a model. Pure."""

import re

from halimede.core.types import InferenceError, internal

TEXT_LIMIT = 1024

# The places in OpenVINO's own source that its texts begin with.
_ORIGIN = re.compile(
    r"Exception from \S+:\d+:|.*Check '.*' failed at \S+:\d+:|FrontEnd API failed with \w+:|"
    r"While validating node .*|\s*"
)


def openvino_error(error: Exception, context: str = "") -> InferenceError:
    """INTERNAL with the lines of OpenVINO's text that are not places in its source; `context` says what failed."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if _ORIGIN.fullmatch(line) is None] or [line for line in lines if line][-1:]
    text = " ".join(kept) or type(error).__name__
    text = text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "..."
    return internal(f"openvino error{context and ' '}{context}: {text}")
