"""A container's last words, which Kubernetes shows in `kubectl describe pod`, and the operator in its status."""

import logging
import os
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
MAX_BYTES = 4096
"""What kubelets keep of each container."""

log = logging.getLogger(__name__)


def tell(text: str, path: Path | None = None) -> None:
    """Leave a text for whoever asks why the container ended: in `path`, or in TERMINATION_LOG where that can be
    written."""
    if path is None:
        if not (TERMINATION_LOG.is_file() and os.access(TERMINATION_LOG, os.W_OK)):
            return
        path = TERMINATION_LOG
    try:
        path.write_bytes(text.encode()[:MAX_BYTES])
    except OSError as error:
        # The exit code counts more than its text.
        log.warning("%s: %s", path, error.strerror)
