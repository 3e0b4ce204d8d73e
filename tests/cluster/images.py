"""Images: a base from Debian's packages, others built on it by buildah, and archives of them for the nodes."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.node import PAUSE, PAUSE_ARCHIVE
from cluster.programs import cache
from cluster.spaces import run
from support.image import BASE, attempt, one_build_at_a_time, provide_base
from support.phases import only_one

BUILD_LIMIT_S = 1800
KEPT_ARCHIVES = 8


def provide_pause(programs: Path) -> None:
    """The image that holds every pod's namespaces, one program, as a file beside that."""
    with only_one(cache() / "pause.lock", "the image of pause"):
        if (programs / PAUSE_ARCHIVE).exists():
            return
        container = run("buildah", "from", "scratch").strip()
        try:
            run("buildah", "copy", "--quiet", container, str(programs / "pause"), "/pause")
            run("buildah", "config", "--entrypoint", '["/pause"]', container)
            run("buildah", "commit", "--quiet", container, PAUSE)
        finally:
            run("buildah", "rm", container)
        _push(PAUSE, PAUSE, programs / PAUSE_ARCHIVE)


def build_image(dockerfile: Path, tag: str, context: Path, *arguments: str) -> None:
    """Build `tag`; what did not change comes from buildah's own storage. `arguments` are more of `buildah build`'s."""
    provide(BASE)
    with one_build_at_a_time():
        run(
            *("buildah", "build", "--quiet", "--layers", "--isolation=chroot", "--format=docker", "--pull-never"),
            *(f"--file={dockerfile}", f"--tag={tag}", *arguments, str(context)),
            limit_s=BUILD_LIMIT_S,
        )


def provide(tag: str) -> None:
    """Have the image in buildah's storage: the base can be made any time, others were built."""
    if tag == BASE and attempt("buildah", "inspect", "--type=image", BASE).returncode:
        with one_build_at_a_time():
            provide_base()


def archived(tag: str) -> Path:
    """A file with the image, named as pods name it; made once per content. It waits for nobody's build."""
    provide(tag)
    described = json.loads(run("buildah", "inspect", "--type=image", tag))
    folder = cache() / "images"
    folder.mkdir(exist_ok=True)
    name = full_name(tag)
    path = folder / f"{described['FromImageID']}-{name.replace('/', '_')}.tar"
    with only_one(folder / "lock", "archives of images"):
        if not path.exists():
            _push(tag, name, path)
        path.touch()
        for old in sorted(folder.glob("*.tar"), key=lambda each: each.stat().st_mtime)[:-KEPT_ARCHIVES]:
            old.unlink()
    return path


def _push(tag: str, name: str, archive: Path) -> None:
    with TemporaryDirectory(dir=archive.parent) as scratch:
        partial = Path(scratch) / "image"
        run("buildah", "push", "--quiet", tag, f"docker-archive:{partial}:{name}", limit_s=BUILD_LIMIT_S)
        partial.rename(archive)


def full_name(tag: str) -> str:
    """The name in containerd of what a pod calls `tag`."""
    host, slash, _ = tag.partition("/")
    if slash and ("." in host or ":" in host or host == "localhost"):
        return tag
    return f"docker.io/{tag}" if slash else f"docker.io/library/{tag}"
