"""Error codes as HTTP and gRPC numbers; the only place that knows them."""

from halimede.core.types import ErrorCode

HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARG: 400,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 400,
}
"""HTTP status by error code."""

GRPC_STATUS: dict[ErrorCode, int] = {
    ErrorCode.UNKNOWN: 2,
    ErrorCode.INTERNAL: 13,
    ErrorCode.NOT_FOUND: 5,
    ErrorCode.INVALID_ARG: 3,
    ErrorCode.UNAVAILABLE: 14,
    ErrorCode.UNSUPPORTED: 12,
    ErrorCode.ALREADY_EXISTS: 6,
    ErrorCode.CANCELLED: 1,
}
"""Number of grpc.StatusCode by error code."""
