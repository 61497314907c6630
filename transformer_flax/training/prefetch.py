"""Prepares the batches of the next steps while the device works on the current step."""

import collections
import concurrent.futures
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def prefetch(make: Callable[[Key], Value], keys: Iterable[Key], ahead: int = 2) -> Generator[Value, None, None]:
    """Yields `make(key)` of each key, in order. A thread computes up to `ahead` values before they are requested."""
    pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        under_way = collections.deque()
        for key in keys:
            under_way.append(pool.submit(make, key))
            if len(under_way) > ahead:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:  # also if the consumer stops before the last key
        pool.shutdown(cancel_futures=True)
