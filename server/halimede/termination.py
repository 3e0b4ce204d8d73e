"""A container's last words, which Kubernetes shows in `kubectl describe pod`, and the operator in its status."""

import logging
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
MAX_BYTES = 2048
"""Kubelets keep 4,096 of each container and 12 KiB of a pod."""

log = logging.getLogger(__name__)


def tell(text: str, path: Path = TERMINATION_LOG) -> None:
    """Leave a text for whoever asks why the container ended; nothing where no such file is."""
    if not path.is_file():
        return
    try:
        path.write_bytes(text.encode()[:MAX_BYTES])
    except OSError as error:
        # The exit code counts more than its text.
        log.warning("%s: %s", path, error.strerror)
