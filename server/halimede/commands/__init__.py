"""Subcommands of `halimede`, one module each, found through the entry point group `halimede.commands`."""
