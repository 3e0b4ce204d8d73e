"""Shared rules of the server and the operator: conditions, the flow of tensors, URIs of models, the fetch plan.

Pure, with the standard library only. Both packages import it, and it imports neither. Each side words problems for its
own users: the server in Triton's terms, the operator in terms of an object's fields.
"""
