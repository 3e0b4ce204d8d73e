"""The steps of a fetch: list the store, select the files, download them, check them, and make the model's directory."""

import hashlib
import logging
import shutil
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import orjson

from halimede.core.config.read import ParsedConfig
from halimede.core.config.write import to_json
from halimede.fetch.archive import files_below, unpack
from halimede.fetch.cache import Cache, CachedContent, content_digest, file_hash
from halimede.fetch.credentials import has_credentials, read_credentials
from halimede.fetch.digest import listing_name
from halimede.fetch.download import FILES, Download, full_disk_reported
from halimede.fetch.errors import ChangedError, FetchError, cause_of
from halimede.fetch.layout import (
    FILES_OF_VERSION,
    UNSEEN,
    Layout,
    archive_root,
    check_files,
    folder_layout,
    is_archive,
    is_empty_version,
    is_of_other_version,
    selected_versions,
    single_file,
)
from halimede.fetch.merge import MadeConfig, make_config, pbtxt, read_own
from halimede.fetch.plan import FetchPlan, PlannedModel
from halimede.fetch.report import FetchedModel
from halimede.fetch.repository import FetchedRepository
from halimede.fetch.retry import RetryPolicy
from halimede.fetch.source import Source, open_source
from halimede.fetch.tree import MAX_FILES, RemoteFile, safe_tree
from halimede.runtime.file_look import look_at
from halimede_spec.fetch_exit import OF_CA_BUNDLE, FetchExit
from halimede_spec.fetch_plan import S3Defaults
from halimede_spec.uri import Scheme

log = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 4 << 20
MAX_STARTS = 5
"""How often a fetch may start, as it restarts if the store's objects change meanwhile."""


def fetch_plan(plan: FetchPlan, into: Path, environment: Mapping[str, str], retries: RetryPolicy) -> list[FetchedModel]:
    """Make the plan's repository; FetchError at the first model that cannot be fetched."""
    with _file_errors_reported():
        into.mkdir(parents=True, exist_ok=True)
        repository = FetchedRepository(into)
        fetcher = Fetcher(repository, _cache(plan), plan.s3, environment, retries)
        fetched = [fetcher.fetch(model) for model in plan.models]
        fetcher.clean_up()
        for ensemble in plan.ensembles:
            config = pbtxt(ensemble.config.config, ensemble.config.locations)
            repository.forget(ensemble.name)
            repository.make(ensemble.name, {}, config=config, versions=(1,))
    return fetched


def _cache(plan: FetchPlan) -> Cache | None:
    return Cache(Path(plan.cache.path), plan.cache.size_limit_bytes) if plan.cache is not None else None


@contextmanager
def _file_errors_reported() -> Iterator[None]:
    """Turn errors of unusable directories in the plan into FetchError."""
    try:
        with full_disk_reported("the models"):
            yield
    except OSError as error:
        raise FetchError(FetchExit.BAD_PLAN, f"{error.filename or 'the file system'}: {cause_of(error)}") from error


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a model's directory: files by their paths; `single` is the name of a single file."""

    paths: tuple[str, ...]
    locate: Callable[[str], Path]
    single: str | None = None


class Fetcher:
    """Fetches models into one repository; without a shared cache, it uses a cache directory of its own."""

    def __init__(
        self,
        repository: FetchedRepository,
        cache: Cache | None,
        s3: S3Defaults,
        environment: Mapping[str, str],
        retries: RetryPolicy,
    ) -> None:
        self._repository = repository
        self._is_shared = cache is not None
        self._cache = cache if cache is not None else Cache(repository.hidden / "contents")
        self._s3 = s3
        self._environment = environment
        self._retries = retries

    def fetch(self, model: PlannedModel) -> FetchedModel:
        """Make the model's directory, unless it already exists as planned; FetchError, OSError."""
        if model.uri.scheme in (Scheme.FILE, Scheme.PVC):
            return self._retries.try_until_repaired(lambda: self._link(model))
        for _ in range(MAX_STARTS):
            try:
                return self._retries.try_until_repaired(lambda: self._fetch_one(model))
            except ChangedError:
                log.warning("%s changes while it is fetched: starting anew", model.uri.display)
        raise FetchError(
            FetchExit.UNREACHABLE, f"{model.uri.display} was replaced {MAX_STARTS} times while it was fetched"
        )

    def clean_up(self) -> None:
        """Remove what was kept for retries, once all models are complete."""
        if not self._is_shared:
            shutil.rmtree(self._cache.root, ignore_errors=True)

    def _open(self, model: PlannedModel) -> Source:
        folder = credentials_folder(model, self._s3)
        try:
            credentials = read_credentials(folder) if folder is not None else None
        except FetchError as error:
            raise FetchError(error.code, f"{model.uri.display}: {error.message}") from None
        bundle = _read_ca_bundle(Path(model.ca_bundle), model.uri.display) if model.ca_bundle is not None else None
        return open_source(model.uri, credentials, self._environment, bundle, self._s3, self._retries)

    def _fetch_one(self, model: PlannedModel) -> FetchedModel:
        if model.digest is not None:
            # A digest identifies the content, so a cached entry can be used without asking the store.
            name = model.digest.replace(":", "-")
            if (made := self._unchanged(model, name) or self._from_cache(model, name)) is not None:
                return made
        source, files, single = self._list(model)
        listing = listing_name(model.uri.display, files)
        if model.digest is None:
            name = listing
            if (made := self._unchanged(model, name)) is not None:
                return made
        cached = True
        while True:
            made = self._from_cache(model, name, cached=cached)
            if made is not None:
                return made
            with self._cache.fetching(name, self._retries):
                if self._cache.find(name) is None:
                    self._download(model, source, files, single, listing, name)
                    cached = False

    def _ask(self, model: PlannedModel) -> tuple[Source, RemoteFile | None, list[RemoteFile]]:
        """The content of the store at the URI: a single file, or a directory's list of files.

        Each try reads credentials and CA bundle again, because they may be the cause of the failure.
        """
        source = self._open(model)
        single = source.single()
        # Some tools create an empty object to represent a directory.
        if single is not None and single.size != 0:
            return source, single, []
        listed = [file for file in safe_tree(source.listing(), model.uri.display) if not is_empty_version(file)]
        if not listed:
            raise FetchError(FetchExit.NOT_FOUND, f"{model.uri.display}: no file exists under it")
        return source, None, listed

    def _list(self, model: PlannedModel) -> tuple[Source, tuple[RemoteFile, ...], str | None]:
        """The files to download, and the name of a single file. A directory without a digest is reduced to the files
        that are served."""
        where = model.uri.display
        source, single, listing = self._retries.try_until_done(where, lambda: self._ask(model))
        if single is not None:
            if not is_archive(single.path):
                single_file(single.path, model.format, where)
            return source, (single,), single.path
        files = tuple(listing)
        layout = folder_layout({file.path for file in files}, where)
        if model.digest is not None:
            return source, files, None
        own = None
        if layout.config:
            file = next(file for file in files if file.path == layout.config)
            own = read_own(layout.config, self._read_small(source, file, where), where)
        config = make_config(own, model.config, model.name, model.format).config
        versions = selected_versions(layout, config, where)
        wanted = tuple(
            file
            for file in files
            if layout.target(file.path) is not None and not is_of_other_version(file.path, layout, versions)
        )
        return source, wanted, None

    def _read_small(self, source: Source, file: RemoteFile, where: str) -> bytes:
        if (file.size or 0) > MAX_CONFIG_BYTES:
            raise FetchError(FetchExit.NOT_A_MODEL, f"{where}: {file.path} is larger than {MAX_CONFIG_BYTES} bytes")
        if file.size == 0:
            return b""
        return self._retries.try_until_done(where, lambda: b"".join(source.read(file, 0, file.size)))

    def _download(
        self,
        model: PlannedModel,
        source: Source,
        files: Sequence[RemoteFile],
        single: str | None,
        listing: str,
        name: str,
    ) -> None:
        """Download the content into the cache; the caller holds the entry's lock."""
        folder = self._cache.partial(name)
        total = sum(file.size or 0 for file in files)
        self._cache.check_possible(total, f"model '{model.name}'")
        download = Download(source, files, listing, folder, model.name, model.uri.display, self._retries)
        self._cache.make_room(name, total, download.missing_bytes, f"model '{model.name}'")
        log.info("model '%s': fetching %d files, %d bytes, from %s", model.name, len(files), total, model.uri.display)
        brought = download.run()
        content = folder / FILES
        hashes = {}
        for file in brought:
            if (content / file.path).stat().st_size != file.size:
                raise ChangedError
            hashes[file.path] = file_hash(content / file.path)
        digest = content_digest(hashes, single)
        if model.digest is not None and digest != model.digest:
            self._cache.drop(name)
            raise _wrong_digest(model, digest)
        is_packed = single is not None and is_archive(single)
        if is_packed:
            content = self._unpacked(folder, content / str(single), model)
            hashes = {path: file_hash(content / path) for path in files_below(content)}
            size = sum((content / path).stat().st_size for path in hashes)
            self._cache.make_room(name, size, 0, f"model '{model.name}', unpacked,")
        self._cache.commit(name, content, digest, hashes, is_single=single is not None and not is_packed)

    def _unpacked(self, folder: Path, archive: Path, model: PlannedModel) -> Path:
        target = folder / "unpacked"
        self._cache.remove(target)
        log.info("model '%s': unpacking %s", model.name, archive.name)
        with full_disk_reported(f"model '{model.name}'"):
            unpack(archive, target, model.uri.display)
        root = archive_root(list(files_below(target)))
        return target / root if root else target

    def _from_cache(self, model: PlannedModel, name: str, *, cached: bool = True) -> FetchedModel | None:
        """The model's directory, made from a cache entry; None if there is no such entry."""
        with self._cache.reading(name, self._retries):
            entry = self._cache.find(name)
            if entry is not None and cached and model.digest is not None:
                entry = self._checked(entry, model)
            if entry is None:
                return None
            self._cache.use(entry)
            single = model.uri.name if entry.is_single else None
            content = Content(tuple(entry.hashes), lambda path: entry.files / path, single)
            self._install(model, content, link=False)
        fetched = FetchedModel(model.name, entry.digest, entry.size_bytes, len(entry.hashes), _now(), cached)
        self._note(model, name, fetched)
        if not self._is_shared:
            self._cache.drop(name)
        return fetched

    def _checked(self, entry: CachedContent, model: PlannedModel) -> CachedContent | None:
        """The entry, if no file has changed: other processes may write to a shared cache."""
        hashes = {path: file_hash(entry.files / path) for path in entry.hashes}
        if hashes == entry.hashes and entry.digest == model.digest:
            return entry
        log.warning("model '%s': its files in the cache were changed, and are fetched again", model.name)
        self._cache.spoil(entry)
        return None

    def _install(self, model: PlannedModel, content: Content, *, link: bool) -> list[str]:
        """Make the model's directory. Returns the paths of the content that are in it."""
        where = model.uri.display
        if content.single is not None:
            layout = FILES_OF_VERSION
            (only,) = content.paths
            look = look_at(content.locate(only)) or UNSEEN
            targets = {f"{layout.into}{single_file(content.single, model.format, where, look)}": only}
        else:
            layout = folder_layout(set(content.paths), where)
            targets = {at: path for path in content.paths if (at := layout.target(path)) is not None}
            if layout.root:
                log.info("model '%s': its files are in %s", model.name, f"{where.rstrip('/')}/{layout.root}")
        made = self._config(model, layout, content)
        versions = selected_versions(layout, made.config, where)
        wanted = {at: path for at, path in targets.items() if not is_of_other_version(path, layout, versions)}
        if made.text is not None:
            wanted = {at: path for at, path in wanted.items() if at != layout.config}
        check_files(made.config, model.name, list(wanted), versions)
        self._repository.forget(model.name)
        self._repository.make(
            model.name,
            {at: content.locate(path) for at, path in wanted.items()},
            config=made.text,
            versions=() if versions else (1,),
            link=link,
        )
        return list(wanted.values())

    def _config(self, model: PlannedModel, layout: Layout, content: Content) -> MadeConfig:
        own: ParsedConfig | None = None
        where = model.uri.display
        if layout.config:
            path = content.locate(layout.config)
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise FetchError(
                    FetchExit.NOT_A_MODEL, f"{where}: {layout.config} is larger than {MAX_CONFIG_BYTES} bytes"
                )
            own = read_own(layout.config, path.read_bytes(), where)
        return make_config(own, model.config, model.name, model.format)

    def _link(self, model: PlannedModel) -> FetchedModel:
        """Make a directory of links to mounted files."""
        base = _mounted(model)
        single = base.name if base.is_file() else None
        if single is not None:
            content = Content((single,), lambda _: base, single)
        elif base.is_dir():
            paths = tuple(islice(files_below(base), MAX_FILES + 1))
            if len(paths) > MAX_FILES:
                raise FetchError(FetchExit.NOT_A_MODEL, f"{model.uri.display} holds more than {MAX_FILES} files")
            content = Content(paths, base.joinpath)
        else:
            raise FetchError(FetchExit.NOT_FOUND, f"{model.uri.display}: {base} does not exist")
        digest = None
        if model.digest is not None:
            digest = content_digest({path: file_hash(content.locate(path)) for path in content.paths}, single)
            if digest != model.digest:
                raise _wrong_digest(model, digest)
        linked = self._install(model, content, link=True)
        size = sum(content.locate(path).stat().st_size for path in linked)
        return FetchedModel(model.name, digest, size, len(linked), _now(), cached=False)

    def _unchanged(self, model: PlannedModel, name: str) -> FetchedModel | None:
        """The record of the model's directory, if a fetch would make the same again: then this is a restart."""
        record = self._repository.record(model.name)
        if record is None:
            return None
        document = orjson.loads(record)
        if document["recipe"] != _recipe(model, name):
            return None
        return FetchedModel(**{**document["fetched"], "cached": True})

    def _note(self, model: PlannedModel, name: str, fetched: FetchedModel) -> None:
        record = {"recipe": _recipe(model, name), "fetched": asdict(fetched)}
        self._repository.note(model.name, orjson.dumps(record))


def _read_ca_bundle(file: Path, where: str) -> bytes:
    """UNREACHABLE if it cannot be used: like a store's certificate, a person repairs it while the fetch retries."""
    try:
        bundle = file.read_bytes()
        ssl.create_default_context().load_verify_locations(cadata=bundle.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        why = f"{where}: its {OF_CA_BUNDLE} holds no certificate"
    except OSError as error:
        why = f"{where}: its {OF_CA_BUNDLE} {file}: {cause_of(error)}"
    else:
        return bundle
    raise FetchError(FetchExit.UNREACHABLE, why)


def credentials_folder(model: PlannedModel, s3: S3Defaults) -> str | None:
    """The directory with the model's credentials; None without any."""
    if model.credentials is not None or model.uri.scheme is not Scheme.S3 or s3.credentials is None:
        return model.credentials
    return s3.credentials if has_credentials(s3.credentials) else None


def _recipe(model: PlannedModel, name: str) -> str:
    """A text of everything that determines a model's directory."""
    config = to_json(model.config.config).decode() if model.config is not None else ""
    given = sorted(model.config.locations) if model.config is not None else []
    parts = [name, model.uri.display, model.format or "", config, *given]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _mounted(model: PlannedModel) -> Path:
    """Where the files are: below a claim's mount, or at the mount of the directory or file itself."""
    if model.uri.scheme is Scheme.PVC and model.mount is not None:
        return Path(model.mount, model.uri.path)
    return Path(model.mount if model.mount is not None else f"/{model.uri.path}")


def _wrong_digest(model: PlannedModel, found: str) -> FetchError:
    return FetchError(FetchExit.DIGEST, f"{model.uri.display} has the digest {found}, but {model.digest} was requested")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
