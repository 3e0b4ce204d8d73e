"""Subcommands of `halimede`, found through the entry point group `halimede.commands`, and the parts of `serve`:

flags (the table of all flags), readers (of their values), parse (arguments to values), assemble (values to Settings).
"""
