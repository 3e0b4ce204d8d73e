"""Halimede installed in a cluster: images, chart, a store of models, and the actions of a user."""

import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster import resources
from cluster.control import ADDRESS
from cluster.images import archived
from cluster.own import OwnCluster
from cluster.programs import cache
from cluster.spaces import LIMIT_S, eventually, python
from support.described import check_is_short
from support.image import BASE, REPOSITORY_ROOT, image_id, install_programs, one_build_at_a_time, provide_base, run
from support.phases import phase

CHART = REPOSITORY_ROOT / "helm" / "halimede"
NAMESPACE = "halimede"
SERVER_IMAGE = "localhost/halimede:test-cpu"
OPERATOR_IMAGE = "localhost/halimede-operator:test"
STORE_PORT = 9000
BUCKET = "models"
S3_SECRET = "models-s3"
"""Of the Secret for models that name none. Namespaces are made without it."""
BUILD_LIMIT_S = 1800.0
CONNECT_LIMIT_S = 20.0

Object = dict[str, Any]


def provide_images() -> None:
    """Both images, built as a user builds them, and their archives."""
    with one_build_at_a_time():
        install_programs()
        provide_base()
        _provide_image("server", SERVER_IMAGE, "image", "IMAGE")
        _provide_image("operator", OPERATOR_IMAGE, "image-operator", "OPERATOR_IMAGE")
    for image in (SERVER_IMAGE, OPERATOR_IMAGE):
        archived(image)


def _provide_image(whose: str, tag: str, target: str, variable: str) -> None:
    """Build it by a target of the Makefile, unless it was built from the same files.

    A build of which every layer is in the cache takes some seconds of a processor, since buildah reads all files.
    """
    kept = cache() / "images" / f"{tag.replace('/', '_')}.built"
    inputs = _inputs(REPOSITORY_ROOT / f"Dockerfile.{whose}")
    if kept.exists() and kept.read_text() == f"{inputs} {image_id(tag)}":
        return
    with phase(f"Building the {whose}'s image", "the first time some 100 MB are downloaded, in a minute or more"):
        run("make", target, "ENGINE=buildah", f"{variable}={tag}", timeout_s=BUILD_LIMIT_S)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(f"{inputs} {image_id(tag)}")


def _inputs(dockerfile: Path) -> str:
    """A digest of all that an image is built from."""
    digest = hashlib.sha256(image_id(BASE).encode())
    entries = [line[1:] for line in (REPOSITORY_ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    for path in (dockerfile, REPOSITORY_ROOT / "Makefile", *(REPOSITORY_ROOT / entry for entry in entries)):
        for file in sorted([path] if path.is_file() else path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(REPOSITORY_ROOT)} {file.stat().st_mode}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


class Store:
    """An S3 server that pods reach, with one bucket that anybody may list."""

    def __init__(self, cluster: OwnCluster) -> None:
        self.endpoint = f"http://{ADDRESS}:{STORE_PORT}"
        program = cluster.control.space.start("store", *python("store", ADDRESS, STORE_PORT))
        door = f"http://{cluster.forward_address(ADDRESS, STORE_PORT)}"
        eventually(lambda: _answers(door), "the store", check=program.check)
        self._bucket = f"{door}/{BUCKET}"
        _put(self._bucket, b"")

    def put(self, prefix: str, folder: Path, *, is_public: bool = True) -> str:
        """The URI of a folder's files. Those that are not public can be read with any signature."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                _put(f"{self._bucket}/{prefix}/{path.relative_to(folder)}", path.read_bytes(), is_public=is_public)
        return f"s3://{BUCKET}/{prefix}"


def _put(url: str, data: bytes, *, is_public: bool = True) -> None:
    """Tried again, since the store closes connections that it has not read to their end."""
    acl = "public-read" if is_public else "private"
    headers = {"x-amz-acl": acl, "Content-Type": "application/octet-stream"}

    def put() -> bool:
        try:
            urllib.request.urlopen(urllib.request.Request(url, data, headers, method="PUT"), timeout=LIMIT_S).close()
        except urllib.error.HTTPError:
            raise
        except OSError:
            return False
        return True

    eventually(put, f"the store to take {url}")


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=LIMIT_S).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@dataclass
class Platform:
    """The operator, installed by helm, and what it needs."""

    cluster: OwnCluster
    store: Store

    @classmethod
    def install(cls, cluster: OwnCluster) -> "Platform":
        """The images have been provided."""
        with phase("Loading the images into the nodes"):
            for image in (SERVER_IMAGE, OPERATOR_IMAGE):
                cluster.load_image(image)
        with phase("Installing the operator"):
            return cls._install(cluster)

    @classmethod
    def _install(cls, cluster: OwnCluster) -> "Platform":
        platform = cls(cluster, Store(cluster))
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
        try:
            cluster.helm("install", "halimede", str(CHART), *platform.values(), "--wait", "--timeout=2m", limit_s=150)
        except AssertionError as error:
            found = cluster.kubectl("describe", "pods", f"--namespace={NAMESPACE}")
            logs = cluster.kubectl(
                "logs", "--selector=app.kubernetes.io/name=halimede-operator", f"--namespace={NAMESPACE}"
            )
            raise AssertionError(f"{error}\n{found[-3000:]}\n{logs[-3000:]}") from None
        return platform

    def upgrade(self, *values: str) -> None:
        """Let helm give the operator these values, as `--set=NAME=VALUE`, beside its first ones, and no others."""
        arguments = ("upgrade", "halimede", str(CHART), *self.values(), *values, "--wait", "--timeout=2m")
        self.cluster.helm(*arguments, limit_s=150)

    def values(self) -> list[str]:
        """What is different from the chart's own: where it is, and what it gives."""
        chosen = {
            "operator.image.repository": OPERATOR_IMAGE.rpartition(":")[0],
            "operator.image.tag": OPERATOR_IMAGE.rpartition(":")[2],
            "server.image.repository": SERVER_IMAGE.rpartition(":")[0],
            "server.image.tag": SERVER_IMAGE.rpartition(":")[2],
            # The GPUs are played: the server without CUDA does.
            "server.gpuImage.repository": SERVER_IMAGE.rpartition(":")[0],
            "server.gpuImage.tag": SERVER_IMAGE.rpartition(":")[2],
            "stores.s3.endpoint": self.store.endpoint,
            "stores.s3.region": "us-east-1",
            "stores.s3.secretName": S3_SECRET,
        }
        return [f"--namespace={NAMESPACE}", *(f"--set={name}={value}" for name, value in chosen.items())]


@dataclass
class Tenant:
    """Somebody with a namespace."""

    cluster: OwnCluster
    namespace: str

    def kubectl(self, *arguments: str, given: str | None = None, limit_s: float = LIMIT_S) -> str:
        return self.cluster.kubectl(f"--namespace={self.namespace}", *arguments, given=given, limit_s=limit_s)

    def apply(self, text: str) -> None:
        self.kubectl("apply", "-f", "-", given=text)

    def get(self, *what: str) -> Object:
        return resources.get(self.cluster.api, self.namespace, *what)

    def names(self, kinds: str, *arguments: str) -> set[str]:
        return resources.names(self.cluster.api, self.namespace, kinds, *arguments)

    def check_is_described_shortly(self, what: str) -> None:
        check_is_short(self.kubectl("describe", what))

    def wait_ready(self, what: str, limit_s: float = LIMIT_S) -> None:
        """As a person would wait; the AssertionError has what the object says."""
        try:
            self.kubectl("wait", "--for=condition=Ready", what, f"--timeout={limit_s:.0f}s", limit_s=limit_s + 10)
        except AssertionError as error:
            status = yaml.safe_dump(self.get(what).get("status"))
            pods = self.kubectl("get", "pods", "-o", "wide")
            raise AssertionError(f"{error}\n{status}\n{pods}") from None

    def condition(self, what: str, kind: str = "Ready") -> Object:
        """{} while there is none."""
        conditions = self.get(what).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def wait_for_reason(self, what: str, reason: str, limit_s: float = LIMIT_S, text: str = "") -> str:
        """The message of Ready, once it says False for this reason, with this text."""

        def look() -> str | None:
            ready = self.condition(what)
            is_it = (ready.get("status"), ready.get("reason")) == ("False", reason) and text in ready["message"]
            return str(ready["message"]) if is_it else None

        try:
            return eventually(look, f"{what} to say {reason}", limit_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{yaml.safe_dump(self.get(what).get('status'))}") from None

    def infer(self, name: str, inputs: Mapping[str, tuple[str, list[int], list[Any]]], served: str = "") -> Object:
        """The answer's outputs by name, through the Service; inputs are datatype, shape, data."""
        address = self.cluster.forward(f"service/{name}", 8000, self.namespace)
        body = {
            "inputs": [
                {"name": each, "datatype": datatype, "shape": shape, "data": data}
                for each, (datatype, shape, data) in inputs.items()
            ]
        }
        request = urllib.request.Request(
            f"http://{address}/v2/models/{served or name}/infer", json.dumps(body).encode(), method="POST"
        )

        def ask() -> Object | None:
            # A node's kube-proxy hears of a ready pod a moment after the API server has: nothing is connected till then.
            try:
                with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                    return {each["name"]: each["data"] for each in json.load(answer)["outputs"]}
            except urllib.error.HTTPError:
                raise
            except (urllib.error.URLError, ConnectionError):
                return None

        return eventually(ask, f"the Service {name} to lead to a pod", CONNECT_LIMIT_S)
