"""A row of table 3, or a row beyond table 3, on the paper's base model; the row's name follows the colon.

    python train.py --config=configs/table3.py:A-h16
    python train.py --config=configs/table3.py:rotary

The rows, with the paper's results, are in transformer_flax/ablation/table3.py. As in the paper, the final step's raw
parameters are scored.
"""

from ml_collections import ConfigDict

from configs import base
from transformer_flax.ablation import table3


def get_config(row: str = "base") -> ConfigDict:
    config = table3.apply(table3.find(row), base.get_config())
    config.name = f"table3-{row}"
    config.eval.final_average = 1
    return config
