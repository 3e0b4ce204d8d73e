"""The command `halimede-operator`: the operator, or with `metrics-api` as first argument the metrics API."""

import sys
from collections.abc import Sequence

METRICS_API = "metrics-api"


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    # Each process imports its own parts alone: those of the other one take memory and time.
    if arguments[:1] == [METRICS_API]:
        from halimede_operator.metrics_api.main import main as metrics_api

        sys.exit(metrics_api(arguments[1:]))
    from halimede_operator.operator import main as operator

    sys.exit(operator(arguments))
