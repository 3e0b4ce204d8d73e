"""Small batching strategies for tests, and the source of one that can be installed."""

from dataclasses import dataclass, field

from halimede.core.config.model_config import ModelConfig
from halimede.core.schedule.strategy import BatchedRequest


@dataclass(slots=True)
class Group:
    """A batch whose requests have `total` bytes at most together."""

    strategy: "Groups"
    total: int = 0

    def takes(self, size_bytes: int) -> bool:
        self.total += size_bytes
        return self.total <= self.strategy.most_bytes

    def include(self, request: BatchedRequest) -> bool:
        if request.size_bytes == self.strategy.bad_bytes:
            raise ValueError(request.size_bytes)
        return self.takes(request.size_bytes)

    def end(self) -> None:
        self.strategy.ended.append(self.total)


@dataclass(slots=True)
class Groups:
    """Bounds the bytes of a batch. Fails for a request of `bad_bytes`."""

    config: ModelConfig = field(default_factory=ModelConfig)
    most_bytes: int = 20
    bad_bytes: int = 13
    ended: list[int] = field(default_factory=list)

    def begin(self) -> Group:
        return Group(self)


STRATEGY_GROUP = "halimede.batching_strategies"
TENANTS = '''
"""Requests of one tenant, which is a parameter of the request, share a batch."""


class Tenants:
    def __init__(self, config):
        if "bad_strategy" in config.parameters:
            raise RuntimeError("no tenants here")

    def begin(self):
        return Batch()


class Batch:
    tenant = None

    def include(self, request):
        tenant = request.parameters.get("tenant", "")
        if tenant == "bad":
            raise ValueError("no such tenant")
        if self.tenant is None:
            self.tenant = tenant
        return tenant == self.tenant

    def end(self):
        pass
'''
