"""The channel between the server and a process of it: frames over a socket, and tensors in shared memory.

| module | contents |
|---|---|
| `frames` | the header, tables of frames, and the frames that every channel has: start, end, memory |
| `json_frames` | JSON, errors, lists of blocks |
| `segments` | segments of shared memory, mapped in both processes |
| `server_end` | the end of the server's event loop |
| `process_end` | the end of the process, which blocks or reads on a loop; standard library only |

A frame is its length and kind, four bytes each, and a body. A kind has a name, a number and a limit, and is defined
once, in the `FrameKind` of its subject. A protocol is a `FrameTable` of some of these: both ends get it when they are
made, and refuse or never see frames that it does not have. The tables are `workers.frames.kinds.WORKER_FRAMES` and
`front_processes.frames.FRONT_FRAMES`.
"""
