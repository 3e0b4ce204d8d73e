"""`python -m halimede` is `halimede`."""

from halimede.cli import main

main(prog_name="halimede")
