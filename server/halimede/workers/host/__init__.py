"""What runs in a worker process around its model: standard library and numpy only, for any CPython from 3.10 on."""
