"""The paper's big model on WMT14 English-German (table 2; table 3, row "big").

    python train.py --config=configs/big.py

In the paper: 8 P100 for 3.5 days, 28.4 BLEU on newstest2014, perplexity 4.33 and 26.4 BLEU on newstest2013.
"""

from ml_collections import ConfigDict

from configs import base
from transformer_flax.ablation import table3


def get_config() -> ConfigDict:
    config = table3.apply(table3.ROWS["big"], base.get_config())
    config.name = "big"
    config.eval.final_average = 20
    config.checkpoint.every = 600  # 10 minutes of the paper's big model
    config.checkpoint.keep = 20
    return config
