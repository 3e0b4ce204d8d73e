"""Calls that must fail."""

from collections.abc import Callable

import pytest

from halimede.core.types import InferenceError


def error_of(call: Callable[..., object], /, *arguments: object, **options: object) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        call(*arguments, **options)
    return caught.value
