"""The server's end of a channel, on its event loop."""
