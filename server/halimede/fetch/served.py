"""Repositories that lie in a store, as the server reads them: a model is fetched when it is asked for.

What is fetched lies in a temporary folder, and is a repository like any other. A load looks into the store again: what
has not changed there is not fetched again.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from halimede.core.repository.layout import NOT_MODELS, model_name_problem
from halimede.core.types import ErrorCode, InferenceError
from halimede.fetch.credentials import secrets_of_environment
from halimede.fetch.faults import Exit, FetchError
from halimede.fetch.fetcher import Fetcher
from halimede.fetch.layout import models_in
from halimede.fetch.patience import Patience
from halimede.fetch.place import Repository
from halimede.fetch.plan import ModelPlan, S3Defaults
from halimede.fetch.secrets import Secrets
from halimede.fetch.source import open_source
from halimede.fetch.tree import safe_tree
from halimede.fetch.uri import Uri
from halimede.runtime.repository import Listing, ModelEntry, ModelRepository

log = logging.getLogger(__name__)

LIST_SECS = 60.0
"""How long a store may fail to say what it holds."""
FETCH_SECS = 900.0


class StoreRepository(ModelRepository):
    """Repository directories, and stores of which each has a directory of its own for what is fetched."""

    def __init__(
        self, roots: tuple[Path, ...], stores: tuple[Uri, ...], config_name: str, environment: Mapping[str, str]
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="halimede-models-"))
        self._stores = {self._folder / str(number): uri for number, uri in enumerate(stores)}
        self._environment = environment
        self._secrets = Secrets(secrets_of_environment(environment))
        self._repositories: dict[Path, Repository] = {}
        for root in self._stores:
            root.mkdir()
            self._repositories[root] = Repository(root)
        super().__init__((*roots, *self._stores), config_name=config_name)

    def scan(self) -> Listing:
        """As of directories, and of the stores what they list now; InferenceError where one of them cannot."""
        local = super().scan()
        names = set(local.names)
        for uri in self._stores.values():
            try:
                with self._told():
                    names |= self._list(uri)
            except FetchError as error:
                raise InferenceError(ErrorCode.UNAVAILABLE, self._secrets.hide(error.message)) from None
        return replace(local, names=tuple(sorted(names)))

    def find(self, name: str) -> ModelEntry:
        """The model's directory, after it was fetched; LookupError where no store has it, OSError where one fails."""
        if model_name_problem(name) is None and not name.startswith("."):
            for root, uri in self._stores.items():
                self._fetch(name, self._repositories[root], uri)
        return super().find(name)

    def close(self) -> None:
        """Remove what was fetched."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fills_later(self, root: Path) -> bool:
        return root in self._stores

    def _list(self, uri: Uri) -> set[str]:
        patience = Patience(LIST_SECS)
        source = open_source(uri, None, self._environment, None, S3Defaults(), LIST_SECS)
        files = safe_tree(patience.try_until_done(uri.display, source.listing), uri.display)
        names = models_in(file.path for file in files)
        return {each for each in names if not each.startswith(".") and each not in NOT_MODELS}

    def _fetch(self, name: str, repository: Repository, uri: Uri) -> None:
        fetcher = Fetcher(repository, None, S3Defaults(), self._environment, Patience(FETCH_SECS))
        try:
            with self._told():
                fetcher.fetch(ModelPlan(name, uri.child(name)))
        except FetchError as error:
            if error.code is not Exit.NOT_FOUND:
                raise OSError(self._secrets.hide(error.message)) from None
            # It may be in another repository, and is no more in this one.
            repository.remove(name)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FetchError(Exit.NO_SPACE, f"{error.filename or self._folder}: {error.strerror}") from None
