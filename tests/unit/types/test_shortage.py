"""Which errors say that the server lacks memory or a thread."""

import errno

import numpy as np
import pytest

from halimede.core.types import ErrorCode, InferenceError, shortage_of

MEMORY = InferenceError(ErrorCode.UNAVAILABLE, "the server has not enough memory for this")
THREAD = InferenceError(ErrorCode.UNAVAILABLE, "the server cannot start a thread for this")


class HostileError(Exception):
    """An exception of a model's code."""

    def __getattribute__(self, name: str) -> object:
        raise SystemError("no")


@pytest.mark.parametrize(
    ("error", "shortage"),
    [
        pytest.param(MemoryError(), MEMORY, id="memory"),
        pytest.param(np.exceptions.AxisError(1), None, id="a fault"),
        pytest.param(OSError(errno.ENOMEM, "Cannot allocate memory"), MEMORY, id="memory of the kernel"),
        pytest.param(OSError(errno.EIO, "Input/output error"), None, id="another error of the kernel"),
        pytest.param(RuntimeError("can't start new thread"), THREAD, id="a thread"),
        pytest.param(RuntimeError("boom"), None, id="another RuntimeError"),
        pytest.param(HostileError(), None, id="an exception that fails to answer"),
        pytest.param(None, None, id="none"),
    ],
)
def test_what_the_server_lacks_is_unavailable(error: BaseException | None, shortage: InferenceError | None) -> None:
    assert shortage_of(error) == shortage


def test_an_array_that_is_too_large_is_a_lack_of_memory() -> None:
    with pytest.raises(MemoryError) as raised:
        np.empty(1 << 60, np.uint8)
    assert shortage_of(raised.value) == MEMORY
