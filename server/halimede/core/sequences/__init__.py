"""What a model of sequences gets in addition to a request's inputs: control inputs, implicit state, null rows.

Standard library and numpy only, for any CPython from 3.10 on, because state is kept where the model runs.
"""
