"""Stand-ins for a third party's store, and calls that raise."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*given: Any, **named: Any) -> Any:
        raise error

    return fail


class GoodStore(StorageBackend):
    """A store that has every page, and keeps none."""

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [True] * len(keys)

    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        return ReadStatus.HIT

    def write(self, key: PageKey, page: memoryview) -> bool:
        return True

    def remove(self, key: PageKey) -> None:
        return

    def flush(self) -> bool:
        return True

    def clear(self) -> bool:
        return True

    def close(self) -> None:
        return
