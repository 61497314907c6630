"""The paper "Attention Is All You Need" as a research codebase, in JAX and Flax."""
