"""For any array of a model, the sent tensor has exactly the bytes that datatype and shape give."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from halimede.backends.python.utils.errors import TritonModelException
from halimede.backends.python.utils.tensor import Tensor
from halimede.core.types import DataType

DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    arrays.complex_number_dtypes(),
    arrays.byte_string_dtypes(),
    arrays.unicode_string_dtypes(),
    arrays.datetime64_dtypes(),
)
SHAPES = arrays.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=4)


@given(st.data())
def test_a_tensor_is_sent_whole_or_refused(data):
    array = data.draw(arrays.arrays(DTYPES, SHAPES))
    if array.ndim:
        array = array[data.draw(arrays.basic_indices(array.shape, allow_ellipsis=False))]
    array = np.asarray(array).T
    if array.dtype.kind in "cM":
        with pytest.raises(TritonModelException, match="Tensor 'OUT' has"):
            Tensor("OUT", array)
        return
    if array.dtype.kind == "U" and any("\ud800" <= letter <= "\udfff" for text in array.flat for letter in text):
        with pytest.raises(TritonModelException, match="UTF-8 cannot hold"):
            Tensor("OUT", array)
        return
    core = Tensor("OUT", array)._core
    assert core.shape == array.shape
    if core.datatype is DataType.BYTES:
        text = [e if isinstance(e, bytes) else e.encode() for e in array.reshape(-1).tolist()]
        assert core.array().reshape(-1).tolist() == text
        return
    assert len(core.data) == core.datatype.itemsize * int(np.prod(core.shape))
    assert core.array().tobytes() == array.astype(core.datatype.dtype).tobytes()
