"""Runs the test cluster by hand: `python tests/cluster/run.py up`, `down` or `status`."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

import click

from cluster.installed import Platform, Tenant, provide_images
from cluster.own import STANDING, OwnCluster, is_alive, stop_standing
from cluster.programs import TOOLS, check_machine, folder_of
from support.image import Unavailable
from support.models import add_scaled
from support.phases import phase, say

EXAMPLE = """
apiVersion: halimede.dev/v1alpha1
kind: InferenceModel
metadata: {name: twice}
spec: {model: {uri: "%s"}}
"""

FIRST_START = (
    "The first start downloads about 1 GB, compiles Kubernetes and builds two images. It takes ten minutes on two idle "
    "cores, twenty on busy ones, and 8 GB of disk. Each step prints what it does."
)


@click.group()
def main() -> None:
    """A whole Kubernetes in namespaces of this machine."""


@main.command()
def up() -> None:
    """Start it with the operator and a model that serves, unless it runs; it stays until `down`."""
    if not is_alive(STANDING):
        begun = time.monotonic()
        try:
            check_machine()
            if not folder_of(TOOLS).exists():
                say(FIRST_START)
            # The images are mostly downloads and the programs mostly computing, so both together take little longer.
            with ThreadPoolExecutor() as pool:
                images = pool.submit(provide_images)
                cluster = OwnCluster.start(standing=True)
                images.result()
        except Unavailable as reason:
            raise click.ClickException(str(reason)) from None
        platform = Platform.install(cluster)
        with phase("Serving a model"):
            serve_example(platform)
        say(f"It runs after {time.monotonic() - begun:.0f} s.")
    tell()


@main.command()
def down() -> None:
    """End it, with everything that was made in it."""
    click.echo("It is gone." if stop_standing() else "There is none.")


@main.command()
def status() -> None:
    """Say whether it runs; exit code 1 when it does not."""
    if not is_alive(STANDING):
        click.echo("There is none.")
        sys.exit(1)
    tell()


def serve_example(platform: Platform) -> None:
    with TemporaryDirectory() as folder:
        add_scaled(Path(folder), "twice", 2)
        uri = platform.store.put("twice", Path(folder, "twice"))
    tenant = Tenant(platform.cluster, "default")
    tenant.apply(EXAMPLE % uri)
    tenant.wait_ready("im/twice")


def tell() -> None:
    click.echo(f"export KUBECONFIG={STANDING / 'kubeconfig'}")
    click.echo(f"export PATH={(STANDING / 'programs').resolve()}:$PATH  # kubectl and helm of the same version")
    click.echo(f"# logs: {STANDING / 'logs'}, audit log: {STANDING / 'audit.log'}")


if __name__ == "__main__":
    main()
