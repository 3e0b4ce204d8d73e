"""The conformance kit for backends: holds any installed backend to the rules of `halimede.backends.api`.

`halimede check-backend` is its command. Each check loads a model and runs requests as the server's workers do, but in
one process and one step at a time, so that a wrong result can be traced to one rule.
"""
