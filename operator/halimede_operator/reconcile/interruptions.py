"""Why a reconcile ends before its last step, other than by an error of the API server."""


class Stale(Exception):
    """The decision was made from a state that has changed since."""


class NameTaken(Stale):
    """Another object has the name of a child that was to be created."""


class OwnerUnknown(Stale):
    """The API server does not know the kind of the children's owner yet."""


class Vanished(Exception):
    """The object or its namespace is deleted or being deleted; its children are deleted with it."""
