"""The numbers of every error code."""

import grpc

from halimede.core.types import ErrorCode
from halimede.core.wire.status_map import GRPC_STATUS, HTTP_STATUS


def test_every_code_has_the_number_that_triton_gives_it() -> None:
    assert {code.name: number for code, number in HTTP_STATUS.items()} == {
        "UNKNOWN": 400,
        "INTERNAL": 500,
        "NOT_FOUND": 404,
        "INVALID_ARG": 400,
        "UNAVAILABLE": 503,
        "UNSUPPORTED": 501,
        "ALREADY_EXISTS": 400,
        "CANCELLED": 400,
    }
    assert set(HTTP_STATUS) == set(ErrorCode)


def test_grpc_numbers_are_those_of_the_library() -> None:
    names = {"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"}
    library = {code: grpc.StatusCode[names.get(code.name, code.name)].value[0] for code in ErrorCode}
    assert library == GRPC_STATUS
