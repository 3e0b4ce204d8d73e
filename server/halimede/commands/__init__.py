"""The subcommands of `halimede`, found through the entry point group `halimede.commands`, and the parts of `serve`.

The parts: flags (the table of all flags), readers (of flag values), parse (arguments to values), assemble (values to
Settings).
"""
