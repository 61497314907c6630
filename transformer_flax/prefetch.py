"""Computes the next values in threads while the current value is used."""

import collections
import concurrent.futures
from collections.abc import Callable, Generator, Iterable
from typing import Any


def prefetch(make: Callable[[Any], Any], keys: Iterable[Any], *, threads: int = 1) -> Generator[Any, None, None]:
    """Yields `make(key)` of each key, in order. Up to `threads` + 1 values are computed before they are requested."""
    pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    try:
        under_way = collections.deque()
        for key in keys:
            under_way.append(pool.submit(make, key))
            if len(under_way) > threads + 1:  # one is ready while each thread computes another
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:  # also if the consumer stops before the last key
        pool.shutdown(cancel_futures=True)
