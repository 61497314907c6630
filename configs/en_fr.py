"""The paper's models on WMT14 English-French (table 2).

    pip install -e ".[wmt]"
    python train.py --config=configs/en_fr.py        # base
    python train.py --config=configs/en_fr.py:big

The first run downloads 6.7 GB of archives. In the paper: 36M pairs, 32,000 word-pieces; base has 38.1 BLEU on
newstest2014, and big, with dropout 0.1, 41.8 (41.0 in the text).
"""

from ml_collections import ConfigDict

from configs import base, big
from transformer_flax.errors import look_up

SIZES = {"base": base, "big": big}


def get_config(size: str = "base") -> ConfigDict:
    config = look_up("the size behind the colon", size, SIZES).get_config()
    config.name = "en_fr" if size == "base" else "en_fr_big"
    config.data.update(name="wmt14_translate/fr-en", target_language="fr", tokenizer="wordpiece", vocab_size=32_000)
    config.model.dropout = 0.1  # of big, too (section 6.1)
    return config
