"""The messages between the server and a worker process: an explicit codec, little-endian, the same on both sides.

| module | what is in it |
|---|---|
| `kinds` | the header, the kinds and their limits, the layout of frames that are a few numbers |
| `control` | JSON, errors, lists of blocks |
| `batches` | EXECUTE |
| `answers` | DONE, RESPONSE |
| `calls` | INFER, CALL_ANSWER |
| `services` | SERVICE_CALL, SERVICE_RESULT |
| `tensors`, `texts` | what the descriptions of batches, answers and calls are made of |

A frame is its length and kind, four bytes each, and a body. Bodies that carry tensors have a part with their shapes and
places, and then the bytes of those that travel in the frame itself, at multiples of 16 from the frame's start; the
others lie in segments (`workers.segments`). Names of inputs and outputs travel as positions in the configuration, but
those of calls, which are another model's, as text. Control messages are JSON.

What a frame says of its requests and tensors is nearly always what one before it said. So numbers of a frame's own
(keys, times) stand apart from this description, and what was read of one is remembered by its bytes: a form, which
becomes requests and tensors over the frame's own bytes.

What comes from a worker is not trusted: everything is held against the length of the frame, and FrameError says what is
wrong. Standard library and numpy only, for any CPython from 3.10 on.
"""
