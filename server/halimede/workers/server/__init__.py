"""The server's end of the channel to one worker process. The other end, `workers.child`, has rooms of the same names.

| room | what is in it |
|---|---|
| `connection` | the rooms of one process put together; its start and end, readiness, log, metrics |
| `channel` | frames: sent, received, bounded |
| `memory` | the two arenas: where tensors for the worker are put, where those from it lie |
| `lending` | what the worker reads in place of other workers' memory |
| `batches` | the batches that the worker has |
| `calls` | inferences that the model's code asks for |
| `services` | what else it asks for |

What a worker sends is not trusted: a frame that makes no sense, bytes that it may not name, an answer to what was not
asked, or more of anything than an honest worker sends is a FrameError, and the worker is given up.
"""
