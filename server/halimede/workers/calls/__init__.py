"""Inferences that a process requests, of its model's code or of its clients: the server's end."""
