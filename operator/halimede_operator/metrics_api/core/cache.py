"""A cache with a bound and an age."""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ExpiringCache(Generic[K, V]):
    """At most `capacity` values, each for `age_s` seconds. The oldest one makes room for a new one."""

    def __init__(self, capacity: int, age_s: float) -> None:
        self._capacity, self._age_s = capacity, age_s
        self._entries: dict[K, tuple[float, V]] = {}
        """In the order of their expiry, because all live equally long."""

    def get(self, key: K, now_s: float) -> V | None:
        entry = self._entries.get(key)
        return entry[1] if entry is not None and now_s < entry[0] else None

    def put(self, key: K, value: V, now_s: float) -> None:
        self._entries.pop(key, None)
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest][0] > now_s and len(self._entries) < self._capacity:
                break
            del self._entries[oldest]
        self._entries[key] = now_s + self._age_s, value

    def __len__(self) -> int:
        return len(self._entries)
