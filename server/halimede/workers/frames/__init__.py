"""The messages between the server and a worker process: an explicit codec, little-endian, the same on both sides.

| module | contents |
|---|---|
| `kinds` | the header, the kinds and their limits, the layout of frames that consist of a few numbers |
| `json_frames` | JSON, errors, lists of blocks |
| `batches` | EXECUTE |
| `answers` | DONE, RESPONSE |
| `calls` | INFER, CALL_ANSWER |
| `groups` | INFERS, ANSWERS |
| `services` | SERVICE_CALL, SERVICE_RESULT |
| `tensors`, `texts` | parts of the descriptions of batches, answers and calls |

A frame is its length and kind, four bytes each, and a body. A body with tensors begins with their description: shapes
and locations. The bytes of tensors in the frame itself follow at multiples of 16 from the frame's start; those of other
tensors lie in segments (`channel.segments`). Names of inputs and outputs are sent as positions in the configuration,
but those of calls, which belong to another model, as text. Control messages are JSON.

The description of a frame is nearly always equal to that of an earlier frame. So the numbers that differ in every frame
(keys, times) stand outside of the description, and a decoded description is cached by its bytes. The cached value is a
form, from which requests and tensors over the frame's own bytes are made.

Frames of a worker are not trusted: every field is checked against the length of the frame, and FrameError names the
error. Standard library and numpy only, for any CPython from 3.10 on.
"""
