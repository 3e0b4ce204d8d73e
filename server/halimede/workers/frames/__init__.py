"""The frames of batches and services between the server and a worker process, and the table of all its frames.

| module | contents |
|---|---|
| `kinds` | the frames and their limits, the layout of frames that consist of a few numbers |
| `batches` | EXECUTE |
| `answers` | DONE, RESPONSE |
| `services` | SERVICE_CALL, SERVICE_RESULT |

Requests and tensors are those of `inference_frames`, which also says how descriptions are cached and checked. Names of
a batch's inputs and outputs are sent as positions in the configuration. Control messages are JSON.

Standard library and numpy only, for any CPython from 3.10 on.
"""
