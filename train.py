"""Trains a Transformer: python train.py --config=configs/base.py; the same as python -m transformer_flax.train."""

import runpy

if __name__ == "__main__":
    runpy.run_module("transformer_flax.train", run_name="__main__", alter_sys=True)
