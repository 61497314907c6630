"""The paper "Attention Is All You Need" as a research codebase, in JAX and Flax."""


def __getattr__(name: str):
    """`Run` and `restore`, loaded when they are asked for: JAX takes seconds, and `--help` should not."""
    if name in ("Run", "restore"):
        from transformer_flax import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
