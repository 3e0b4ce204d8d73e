"""`python -m halimede.backends.check NAME [MODEL...]`: hold an installed backend to the rules of `backends.api`.

The checks use workers and the runtime, which are above backends, so they are a subcommand that is found by its name.
"""

from importlib.metadata import entry_points

if __name__ == "__main__":
    (point,) = entry_points(group="halimede.commands", name="check-backend")
    point.load()(prog_name="python -m halimede.backends.check")
