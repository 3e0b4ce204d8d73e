"""The subcommands of `halimede`, found through the entry point group `halimede.commands`, and the parts of `serve`.

The parts: flag (the description of one flag), flags (the table of all flags), flag_kinds (the forms of values),
readers (of flag values), parse (arguments to values), assemble (values to Settings).
"""
