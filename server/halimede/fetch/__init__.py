"""Download models from stores: what a plan or a URI names becomes directories of a model repository.

Pure modules: `plan`, `tree`, `layout`, `merge`, `digest`, `errors`, `store_errors`, `secrets` and `report`. Around
them: `source` and `http` read a store, `retry` decides when to try again, `download` downloads files, `archive` unpacks
them, `cache` stores them, `repository` makes the model's directory, and `fetcher` runs all of this in order.
"""
