"""The server's end of a channel."""
