"""Python models: what completes and starts them in the server, and what hosts them in a process of their own.

`runner` and `utils` are imported in the model's process, whose environment may have nothing but numpy: they import the
standard library, numpy, `core.types` and `backends.hosting` only, and so does this file.
"""
