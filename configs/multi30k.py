"""A small model for a folder of the size of Multi30k (29,000 pairs of about 12 words).

python train.py --config=configs/multi30k.py --config.data.path=FOLDER
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.name = "multi30k"
    config.steps = 6_000
    config.model.update(num_layers=4, d_model=128, d_ff=256, num_heads=4, d_k=32, d_v=32, dropout=0.2)
    config.data.update(source="folder", name="", vocab_size=5_000, max_length=80, tokens_per_batch=1536, num_buckets=6)
    config.optimizer.warmup_steps = 1000
    config.eval.update(every=1_000, final_average=5)
    config.checkpoint.update(every=250, keep=5)
    return config
