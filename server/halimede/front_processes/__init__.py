"""Front ends in processes of their own, so that parsing, checking and encoding use more than one core.

    client --HTTP, gRPC--> front-end process --INFERS--> core process --batches--> instances
                                            <--ANSWERS--

| module | process | contents |
|---|---|---|
| `services` | both | the HTTP and gRPC servers of the settings |
| `page` | both | numbers that all processes share: the state of the server, beats, and parts of totals |
| `asks` | both | the table of questions: what a front end asks the core besides inferences |
| `values` | both | the codec of arguments, answers and the order to start, by their types |
| `pool` | core | all front-end processes: ports, start, drain, end |
| `process` | core | one of them: its starts and restarts |
| `link` | core | the channel to one process: its requests, and the answers to them |
| `remote` | front end | `facade.server.Server` over the channel |
| `questions` | front end | questions to the core, and the models that it knows of |
| `outgoing` | front end | requests on their way to the core |
| `core_life` | front end | whether the core hangs |
| `main` | front end | the program |

The core binds the ports and passes the listening sockets on; each process accepts from them. The channel and the shared
memory are those of worker processes (`inference_frames`, `channel.segments`). A front end that dies costs its own
connections, and is started again.
"""
