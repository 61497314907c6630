"""The paper's base model on WMT14 English-French (table 2).

    pip install -e ".[wmt]"
    python train.py --config=configs/en_fr.py

The first run downloads 6.7 GB of archives. In the paper: 36M pairs, 32,000 word-pieces, 38.1 BLEU on newstest2014.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.name = "en_fr"
    config.data.update(name="wmt14_translate/fr-en", target_language="fr", tokenizer="wordpiece", vocab_size=32_000)
    return config
