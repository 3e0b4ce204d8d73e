"""The output of C++ libraries in the server's process (mainly ONNX Runtime), for the log.

ONNX Runtime writes its lines to `std::clog`; its Python API has no callback for them. A pipe in place of descriptor 2
would catch them too, but the last lines of a crash (of the C library, of C++, of Python) would then be lost in a pipe
without a reader. So only the two C++ streams are diverted: the one buffer behind `std::cerr` and `std::clog` has
a `FILE *`, which is C's `stderr`; it gets another one. If the memory does not have exactly this layout, nothing is
changed, and such libraries continue to print to stderr.
"""

import ctypes
import os

_LINE_BUFFERED = 1
# Itanium C++ ABI: the offset of the virtual base is three words before the start of the virtual table.
_BASE_OFFSET = -3 * ctypes.sizeof(ctypes.c_void_p)
# `basic_streambuf` is a virtual table, six pointers and a locale; the `FILE *` follows.
_FILE_OFFSET = 8 * ctypes.sizeof(ctypes.c_void_p)

_INIT = ctypes.create_string_buffer(16)


def divert_cxx_streams() -> int | None:
    """A non-blocking descriptor that receives the output of C++'s error streams; None if the streams have an unknown
    layout. Call it at most once."""
    try:
        cxx, libc = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
        # `std::ios_base::Init`: the streams do not exist before the first one.
        cxx["_ZNSt8ios_base4InitC1Ev"](_INIT)
        holder = _file_of_clog(cxx)
        stderr = ctypes.c_void_p.in_dll(libc, "stderr")
    except (OSError, AttributeError, ValueError):
        return None
    if holder.value != stderr.value:
        return None
    reader, writer = os.pipe2(os.O_CLOEXEC)
    libc.fdopen.restype = ctypes.c_void_p
    file = libc.fdopen(writer, b"w")
    libc.setvbuf(ctypes.c_void_p(file), None, _LINE_BUFFERED, ctypes.c_size_t(0))
    holder.value = file
    os.set_blocking(reader, False)
    return reader


def _file_of_clog(cxx: ctypes.CDLL) -> ctypes.c_void_p:
    """The place of the `FILE *` of the buffer of `std::clog`."""
    address = ctypes.addressof(ctypes.c_char.in_dll(cxx, "_ZSt4clog"))
    table = ctypes.c_size_t.from_address(address).value
    base = address + ctypes.c_ssize_t.from_address(table + _BASE_OFFSET).value
    get_buffer = cxx["_ZNKSt9basic_iosIcSt11char_traitsIcEE5rdbufEv"]
    get_buffer.restype, get_buffer.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return ctypes.c_void_p.from_address(get_buffer(base) + _FILE_OFFSET)
