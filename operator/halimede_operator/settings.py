"""The operator's command line. Every flag is also an environment variable, HALIMEDE_<FLAG>."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import click

from halimede_operator.command_line import pods_namespace, run_command
from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.field import Field
from halimede_operator.core.spec.peers import read_peer
from halimede_operator.core.spec.types import Json

PULL_POLICIES = click.Choice(["Always", "IfNotPresent", "Never"])


@dataclass(frozen=True, slots=True)
class Settings:
    platform: Platform
    lease_namespace: str
    lease_name: str
    health_port: int
    metrics_port: int
    log_format: str
    kubeconfig: str | None
    """None: use the pod's service account."""


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the settings from a command line (None: the process's own) and the environment.

    Exits as click does, for --help and for invalid flags.
    """
    return run_command(_command, Settings, arguments, "halimede-operator")


def _peers(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[Json, ...]:
    """The peers that the values of an option describe; BadParameter with all problems."""
    peers = []
    for text in values:
        try:
            given = json.loads(text)
        except ValueError as error:
            raise click.BadParameter(f"is not JSON: {error}", context, option) from None
        field = Field("peer", given, {})
        peers.append(read_peer(field))
        if field.problems:
            what = "; ".join(f"{problem.path} {problem.message}" for problem in field.problems)
            raise click.BadParameter(what, context, option)
    return tuple(peers)


@click.command(context_settings={"auto_envvar_prefix": "HALIMEDE", "show_default": True})
@click.option("--server-image", required=True, help="Image of models without an accelerator.")
@click.option("--gpu-server-image", help="Image of models with GPUs or MIG devices; --server-image by default.")
@click.option("--image-pull-policy", type=PULL_POLICIES, default="IfNotPresent", help="Pull policy of --server-image.")
@click.option(
    "--gpu-image-pull-policy", type=PULL_POLICIES, default="IfNotPresent", help="Pull policy of --gpu-server-image."
)
@click.option("--image-pull-secret", multiple=True, help="Name of a Secret in the models' namespaces; repeatable.")
@click.option("--scheme", multiple=True, help="Allowed scheme of model URIs; repeatable; all but `file` by default.")
@click.option("--file-root", multiple=True, help="Folder of the nodes below which `file` URIs may be; repeatable.")
@click.option(
    "--cache-host-path", default="/var/lib/halimede/cache", help="Folder of the nodes for caches of medium HostPath."
)
@click.option("--s3-endpoint", help="Endpoint of a store other than AWS, reachable from pods.")
@click.option("--s3-region")
@click.option("--s3-secret", help="Name of a Secret in the models' namespaces, for models that name none.")
@click.option(
    "--node-lost-toleration-seconds",
    type=click.IntRange(min=0),
    help="Seconds until Kubernetes replaces the pods of a lost node; Kubernetes' 300 s by default.",
)
@click.option(
    "--max-replicas",
    type=click.IntRange(min=1),
    default=500,
    help="Most replicas of one object. The status of each is computed from its pods, twice as many at most.",
)
@click.option("--watch-namespace", multiple=True, help="Watch only this namespace; repeatable; all by default.")
@click.option("--operator-namespace", help="Where the operator runs; the pod's by default.")
@click.option(
    "--metrics-collector",
    multiple=True,
    callback=_peers,
    help="Peer of NetworkPolicies, as JSON, that may read the metrics of all pods; repeatable.",
)
@click.option("--prometheus-address", help="URL of Prometheus for KEDA, for objects that name none.")
@click.option("--lease-namespace", help="Where the operator's Lease is; its own namespace by default.")
@click.option("--lease-name", default="halimede-operator")
@click.option("--health-port", type=click.IntRange(0, 65535), default=8080, help="For /healthz and /readyz.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=9090, help="For /metrics.")
@click.option("--log-format", type=click.Choice(["json", "text"]), default="json")
@click.option(
    "--kubeconfig", envvar="KUBECONFIG", help="Credentials outside of a cluster; the pod's service account by default."
)
def _command(
    server_image: str,
    gpu_server_image: str | None,
    image_pull_policy: str,
    gpu_image_pull_policy: str,
    image_pull_secret: tuple[str, ...],
    scheme: tuple[str, ...],
    file_root: tuple[str, ...],
    cache_host_path: str,
    s3_endpoint: str | None,
    s3_region: str | None,
    s3_secret: str | None,
    node_lost_toleration_seconds: int | None,
    prometheus_address: str | None,
    max_replicas: int,
    watch_namespace: tuple[str, ...],
    operator_namespace: str | None,
    metrics_collector: tuple[Json, ...],
    lease_namespace: str | None,
    lease_name: str,
    health_port: int,
    metrics_port: int,
    log_format: str,
    kubeconfig: str | None,
) -> Settings:
    """Creates serving pods for InferenceModels and ModelEnsembles.

    `halimede-operator metrics-api` is another process: it serves the metrics of HorizontalPodAutoscalers.
    """
    own_namespace = operator_namespace or pods_namespace()
    schemes = frozenset(scheme) if scheme else Platform("", "").schemes
    platform = Platform(
        server_image=server_image,
        gpu_server_image=gpu_server_image or server_image,
        image_pull_policy=image_pull_policy,
        gpu_image_pull_policy=gpu_image_pull_policy,
        image_pull_secrets=image_pull_secret,
        schemes=schemes | {"file"} if file_root else schemes,
        file_roots=file_root,
        cache_host_path=cache_host_path,
        s3_endpoint=s3_endpoint,
        s3_region=s3_region,
        s3_secret=s3_secret,
        node_lost_toleration_seconds=node_lost_toleration_seconds,
        operator_namespace=own_namespace,
        metrics_collectors=metrics_collector,
        watch_namespaces=watch_namespace,
        max_replicas=max_replicas,
        prometheus_address=prometheus_address,
    )
    return Settings(
        platform=platform,
        lease_namespace=lease_namespace or own_namespace,
        lease_name=lease_name,
        health_port=health_port,
        metrics_port=metrics_port,
        log_format=log_format,
        kubeconfig=kubeconfig,
    )
