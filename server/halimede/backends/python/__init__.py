"""Python models: the code that completes and starts them in the server, and the code that hosts them in a process.

`runner` and `utils` are imported in the model's process, whose environment may have only numpy. Therefore they, and
this file, import only the standard library, numpy, `core.types` and `backends.hosting`.
"""
