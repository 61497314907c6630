"""A small model that learns English to German number words: twenty-one is einundzwanzig. No download.

python train.py
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.name = "numbers"
    config.steps = 3_000
    config.model.update(num_layers=2, d_model=128, d_ff=256, num_heads=4, d_k=32, d_v=32, dropout=0.05)
    config.data.update(source="numbers", name="", vocab_size=320, max_length=64, tokens_per_batch=2048, num_buckets=3)
    config.optimizer.warmup_steps = 500
    config.eval.update(every=1_000, sentences=200, final_average=1)
    config.checkpoint.update(every=1_000, keep=2)
    return config
