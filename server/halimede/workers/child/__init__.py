"""Code that runs in a worker process: standard library and numpy only, for any CPython from 3.10 on."""
