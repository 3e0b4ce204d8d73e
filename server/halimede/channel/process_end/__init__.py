"""The process's end of a channel."""
