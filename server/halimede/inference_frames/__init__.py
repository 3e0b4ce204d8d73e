"""Inferences that a process asks of the server, for its model or its clients: their frames, and the server's end.

| module | contents |
|---|---|
| `kinds` | the frames and their limits, numbers of errors |
| `texts`, `tensors` | parts of descriptions |
| `requests` | requests, one or several |
| `calls` | INFER and CALL_ANSWER |
| `inferences` | those in flight: the server's end |
| `answers` | sends their answers: the server's end |

Batches of workers have the same requests and tensors in their frames. A body with tensors begins with their
description: shapes and places. The bytes of tensors in the frame itself follow at multiples of 16 from the frame's
start; those of other tensors lie in segments (`channel.segments`).

The description of a frame is nearly always equal to that of an earlier frame. So the numbers that differ in every frame
(keys, times) stand outside of the description, and a decoded description is cached by its bytes. The cached value is a
form, from which requests and tensors over the frame's own bytes are made.

Frames of a process are not trusted: every field is checked against the length of the frame, and FrameError names the
error. What both ends use needs the standard library and numpy only, for any CPython from 3.10 on.
"""
