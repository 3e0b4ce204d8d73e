"""Clients that call about 50 times a second each, with the results of their calls."""

import http.client
import json
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Self

import numpy as np
import tritonclient.grpc as grpcclient

from support.calls import ones

PAUSE_S = 0.02
CALL_LIMIT_S = 20
CLIENTS = 2
"""Number of clients of each protocol that keep their connection."""


class SteadyClients:
    """Calls a model that takes FP32 `IN` until the end of the `with`, without retries."""

    def __init__(self, grpc_url: str, http_url: str, model: str, columns: int, *, with_fresh: bool = False) -> None:
        """with_fresh: also a client of each protocol that makes a connection for each call."""
        self._grpc_url, self._http_url, self._model, self._columns = grpc_url, http_url, model, columns
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.answered = {"gRPC": 0, "HTTP": 0}
        self.lost: list[str] = []
        kept = (self._over_grpc, self._over_http) * CLIENTS
        fresh = (self._over_fresh_grpc, self._over_fresh_http) if with_fresh else ()
        self._threads = [threading.Thread(target=each) for each in (*kept, *fresh)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, protocol: str, call: Callable[[], object]) -> None:
        while not self._is_over.wait(PAUSE_S):
            try:
                call()
            except Exception as error:
                with self._lock:
                    self.lost.append(f"{protocol}: {error!r} {error}")
            else:
                with self._lock:
                    self.answered[protocol] += 1

    def _over_grpc(self) -> None:
        with self._grpc_client() as client:
            self._call("gRPC", lambda: self._infer(client))

    def _over_fresh_grpc(self) -> None:
        def call() -> None:
            with self._grpc_client() as client:
                self._infer(client)

        self._call("gRPC", call)

    def _grpc_client(self) -> grpcclient.InferenceServerClient:
        # By default all channels of a process share one connection, and calls that no server has begun are sent again.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        return grpcclient.InferenceServerClient(self._grpc_url, channel_args=options)

    def _infer(self, client: grpcclient.InferenceServerClient) -> None:
        tensor = grpcclient.InferInput("IN", [1, self._columns], "FP32")
        tensor.set_data_from_numpy(np.ones((1, self._columns), np.float32))
        client.infer(self._model, [tensor], client_timeout=CALL_LIMIT_S)

    def _over_http(self) -> None:
        with closing(self._http_connection()) as connection:
            self._call("HTTP", lambda: self._post(connection))

    def _over_fresh_http(self) -> None:
        def call() -> None:
            with closing(self._http_connection()) as connection:
                self._post(connection)

        self._call("HTTP", call)

    def _http_connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._http_url, timeout=CALL_LIMIT_S)

    def _post(self, connection: http.client.HTTPConnection) -> None:
        connection.request("POST", f"/v2/models/{self._model}/infer", json.dumps(ones(self._columns)))
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
