"""Event loops that finish what they have begun, so that a failed read of Orbax leaves nothing to complain later."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = 60  # seconds that pending tasks have


@contextlib.contextmanager
def settled_loops() -> Iterator[None]:
    """A context in which new event loops finish their pending tasks before they close."""
    makers: list[Any] = [asyncio, *filter(None, [sys.modules.get("uvloop")])]  # Orbax's, the second where one runs
    functions = [module.new_event_loop for module in makers]
    try:
        for module, function in zip(makers, functions, strict=True):
            module.new_event_loop = _settling(function)
        yield
    finally:
        for module, function in zip(makers, functions, strict=True):
            module.new_event_loop = function


def _settling(new_event_loop: Callable[[], Any]) -> Callable[[], Any]:
    def make() -> Any:
        loop = new_event_loop()
        close = loop.close

        def settle_and_close() -> None:
            if not loop.is_closed():
                loop.run_until_complete(_others())
            close()

        loop.close = settle_and_close
        return loop

    return make


async def _others() -> None:
    """Waits for all other tasks of its loop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.gather(*others, return_exceptions=True)
