"""Where things lie that can be made again."""

import os
import pathlib


def cache_root(cache_dir: str) -> pathlib.Path:
    """`cache_dir`, or where caches are kept by custom."""
    if cache_dir:
        return pathlib.Path(cache_dir)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "transformer_flax"
