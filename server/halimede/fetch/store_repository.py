"""Repositories in stores, as the server reads them: a model is fetched when it is loaded.

Fetched models are in a temporary directory, which is a repository like any other. Each load checks the store again, and
unchanged files are not fetched again.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from halimede.core.config.names import model_name_problem
from halimede.core.repository.layout import NOT_MODELS, is_model_directory, is_version
from halimede.core.types import unavailable
from halimede.fetch.credentials import secrets_of_environment
from halimede.fetch.downloads import Downloads
from halimede.fetch.errors import FetchError, cause_of
from halimede.fetch.fetcher import Fetcher
from halimede.fetch.layout import models_in
from halimede.fetch.repository import FetchedRepository
from halimede.fetch.retry import RetryPolicy
from halimede.fetch.secrets import Secrets
from halimede.fetch.source import open_source
from halimede.fetch.tree import safe_tree
from halimede.runtime.repository import READ_LIMIT_SECS, UNWATCHED, Listing, ModelEntry, ModelRepository, ReadProgress
from halimede_spec.fetch_exit import FetchExit
from halimede_spec.fetch_plan import PlannedModel, S3Defaults
from halimede_spec.uri import Uri

log = logging.getLogger(__name__)


class StoreRepository(ModelRepository):
    """Repository directories, and stores, each of which has a local directory for its fetched models."""

    def __init__(
        self,
        roots: tuple[Path, ...],
        stores: tuple[Uri, ...],
        config_name: str,
        environment: Mapping[str, str],
        limit_secs: float = READ_LIMIT_SECS,
    ) -> None:
        """Reads of a store fail when it has failed for `limit_secs`."""
        self._limit_secs = limit_secs
        self._downloads = Downloads()
        self._stores = {self._downloads.folder / str(number): uri for number, uri in enumerate(stores)}
        self._environment = environment
        self._secrets = Secrets(secrets_of_environment(environment))
        self._repositories: dict[Path, FetchedRepository] = {}
        for root in self._stores:
            root.mkdir()
            self._repositories[root] = FetchedRepository(root)
        super().__init__((*roots, *self._stores), config_name=config_name)

    def scan(self, progress: ReadProgress = UNWATCHED) -> Listing:
        """List directories, and the current contents of stores; InferenceError if a store cannot be listed."""
        local = super().scan(progress)
        names, warnings = set(local.names), [*local.warnings]
        for uri in self._stores.values():
            try:
                with _own_limit(progress, uri), self._file_errors_hidden():
                    paths = self._list(uri)
            except FetchError as error:
                raise unavailable(self._secrets.hide(error.message)) from None
            found = {name for name in models_in(paths) if not name.startswith(".") and name not in NOT_MODELS}
            warnings += _likely_mistake(uri, paths, found)
            names |= found
        return replace(local, names=tuple(sorted(names)), warnings=tuple(warnings))

    def find(self, name: str, progress: ReadProgress = UNWATCHED) -> ModelEntry:
        """Fetch the model and return its directory; LookupError if no store has it, OSError if one fails."""
        if model_name_problem(name) is None and not name.startswith("."):
            for root, uri in self._stores.items():
                with _own_limit(progress, uri):
                    self._fetch(name, self._repositories[root], uri)
        return super().find(name, progress)

    def close(self) -> None:
        """Remove all fetched models."""
        self._downloads.close()

    def _fills_later(self, root: Path) -> bool:
        return root in self._stores

    def _list(self, uri: Uri) -> list[str]:
        retries = RetryPolicy(self._limit_secs)
        source = open_source(uri, None, self._environment, None, S3Defaults(), retries)
        files = safe_tree(retries.try_until_done(uri.display, source.listing), uri.display)
        return [file.path for file in files]

    def _fetch(self, name: str, repository: FetchedRepository, uri: Uri) -> None:
        fetcher = Fetcher(repository, None, S3Defaults(), self._environment, RetryPolicy(self._limit_secs))
        try:
            with self._file_errors_hidden():
                fetcher.fetch(PlannedModel(name, uri.child(name)))
        except FetchError as error:
            if error.code is not FetchExit.NOT_FOUND:
                raise OSError(self._secrets.hide(error.message)) from None
            # It may be in another repository now, but not in this one.
            repository.remove(name)

    @contextmanager
    def _file_errors_hidden(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise FetchError(
                FetchExit.NO_SPACE, f"{error.filename or self._downloads.folder}: {cause_of(error)}"
            ) from None


def _likely_mistake(uri: Uri, paths: list[str], found: set[str]) -> list[str]:
    """A warning about a store without models, or one that is a model: most likely another folder was meant."""
    signs = sorted({top for path in paths if is_model_directory((top := path.partition("/")[0],))})
    # The folder of a version is found as a model with the number as its name.
    if signs and all(map(is_version, found)):
        text = f"contains '{signs[0]}' and looks like a model itself; give the folder above as the repository"
    elif not found:
        example = f"{uri.display.rstrip('/')}/MODEL/1/model.onnx"
        text = f"contains no model: a model is a folder with a version in it, such as {example}"
    else:
        return []
    return [f"repository '{uri.display}' {text}"]


@contextmanager
def _own_limit(progress: ReadProgress, uri: Uri) -> Iterator[None]:
    """The requests of the block have time limits of their own, and may rightly take long: a model may be large."""
    progress.begin(uri.display)
    progress.has_own_limit = True
    try:
        yield
    finally:
        progress.has_own_limit = False
