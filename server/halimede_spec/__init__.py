"""What the server and the operator must agree on: conditions, the flow of tensors, URIs of models, the fetch plan.

Pure, and of the standard library alone. Both packages import it, and it imports neither. Each side words what is wrong
for its own users: the server in Triton's terms, the operator in those of an object's field.
"""
