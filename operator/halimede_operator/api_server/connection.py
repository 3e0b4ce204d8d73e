"""Address of the API server and our credentials: from the pod's service account, or outside a cluster from a
kubeconfig."""

import ssl

from kubernetes.aio import config as kubeconfig
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject


class Connection:
    """Keeps the credentials current: in a cluster they are read again every minute, and `refresh` reads them when the
    API server refuses them."""

    def __init__(self, kubeconfig_path: str | None) -> None:
        """kubeconfig_path: None for the pod's service account."""
        self._path = kubeconfig_path
        self.configuration = Configuration()

    async def refresh(self) -> None:
        """Read the credentials from their files. Raises kubernetes' ConfigException or OSError if that fails."""
        if self._path is None:
            # The library's loaders have no types.
            kubeconfig.load_incluster_config(self.configuration)  # type: ignore[no-untyped-call]
        else:
            await kubeconfig.load_kube_config(  # type: ignore[no-untyped-call]
                self._path, client_configuration=self.configuration, persist_config=False
            )

    @property
    def host(self) -> str:
        return str(self.configuration.host).rstrip("/")

    def ssl_context(self) -> ssl.SSLContext:
        context: ssl.SSLContext = RESTClientObject(self.configuration).ssl_context
        return context

    async def headers(self) -> dict[str, str]:
        token = await self.configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": token} if token else {}
