"""The server's end of one worker process. The other end is `workers.host`.

| module | contents |
|---|---|
| `worker_connection` | all modules of one process put together; start and end, readiness, log, metrics |
| `batches` | the batches that the worker has |
| `calls` | inferences that the model's code requests |
| `services` | other requests of the model's code to the server |
| `states` | the bytes that the worker may keep for sequences |

What a worker sends is not trusted. A frame that cannot be read, a place that is not the worker's, an answer that was
not requested, or more of anything than a correct worker sends is a FrameError: the connection ends, and the process is
killed.
"""
