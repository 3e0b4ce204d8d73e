"""Where the API server is and who we are: from the pod's service account, or from a kubeconfig outside of a cluster."""

import ssl

from kubernetes.aio import config as kubeconfig
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject


class Connection:
    """Credentials are read again every minute in a cluster, and by `refresh` when the API server does not know them
    any more."""

    def __init__(self, kubeconfig_path: str | None) -> None:
        """kubeconfig_path: None for the service account."""
        self._path = kubeconfig_path
        # The environment's proxies and passwords are not for the API server, and aiohttp would look for them in threads
        # before every request.
        self.configuration = Configuration(client_session_kwargs={"trust_env": False})

    async def refresh(self) -> None:
        """Read the credentials from where they lie; raises kubernetes' ConfigException or OSError where they cannot
        be read."""
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

    def rest(self) -> RESTClientObject:
        return RESTClientObject(self.configuration)

    def ssl_context(self) -> ssl.SSLContext:
        context: ssl.SSLContext = self.rest().ssl_context
        return context

    async def headers(self) -> dict[str, str]:
        token = await self.configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": token} if token else {}
