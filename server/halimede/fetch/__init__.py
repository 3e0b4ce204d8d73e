"""Models out of stores: what a plan or a URI names becomes folders of a model repository.

Pure are `uri`, `plan`, `tree`, `layout`, `merge`, `digest`, `faults`, `secrets` and `report`: values in, values out.
Around them: `source` and `http` read a store, `download` brings files, `archive` unpacks them, `cache` keeps them,
`place` makes the model's folder, and `fetcher` puts all of it in order.
"""
