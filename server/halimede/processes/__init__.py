"""Processes of the server: zygotes start them, their output is read, and those that hang are found."""
