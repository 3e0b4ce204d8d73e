"""The container's termination message: Kubernetes shows it in `kubectl describe pod`, the operator in its status."""

import logging
import os
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
MAX_BYTES = 4096
"""The kubelet's limit for each container."""

log = logging.getLogger(__name__)


def write_message(text: str, path: Path | None = None) -> None:
    """Write why the container ends: to `path`, or to TERMINATION_LOG if that is writable."""
    if path is None:
        if not (TERMINATION_LOG.is_file() and os.access(TERMINATION_LOG, os.W_OK)):
            return
        path = TERMINATION_LOG
    try:
        path.write_bytes(text.encode()[:MAX_BYTES])
    except OSError as error:
        # The exit code is more important than the text.
        log.warning("%s: %s", path, error.strerror)
