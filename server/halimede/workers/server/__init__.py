"""The server's end of the channel to one worker process. The other end is `workers.child`.

| module | contents |
|---|---|
| `connection` | all modules of one process put together; start and end, readiness, log, metrics |
| `starting` | the answer of a process to START |
| `channel` | frames: sent, received, bounded |
| `memory` | the two arenas: tensors for the worker, tensors of the worker |
| `shared_segments` | segments of other workers that this worker may read |
| `batches` | the batches that the worker has |
| `calls` | inferences that the model's code requests |
| `answers` | their answers |
| `services` | other requests of the model's code to the server |

What a worker sends is not trusted. A frame that cannot be read, a location that is not the worker's, an answer that was
not requested, or more of anything than a correct worker sends is a FrameError: the connection ends, and the process is
killed.
"""
