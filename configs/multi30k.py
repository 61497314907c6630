"""A small model for a folder of the size of Multi30k (29,000 pairs of about 12 words).

    python train.py --config=configs/multi30k.py --config.data.path=FOLDER

39.6 BLEU on the 1,000 sentences of test_2016_flickr, the mean of three seeds. These took 37 minutes each, on one core
of a recent server with `--config.parallel.cpu_devices=1` (docs/results.md).
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.name = "multi30k"
    config.steps = 10_000  # 27 epochs
    config.model.update(num_layers=3, d_model=192, d_ff=512, num_heads=4, d_k=48, d_v=48, dropout=0.3)
    config.model.branch_init = 0.5  # docs/initial_values.md explains why
    config.data.update(source="folder", name="", vocab_size=5_000, max_length=80, tokens_per_batch=1536, num_buckets=12)
    config.data.length_multiple_of = 1  # a CPU gains nothing from larger multiples
    config.optimizer.update(factor=0.7, warmup_steps=800)  # the paper's rate is for batches 16 times as large
    config.optimizer.cooldown = 0.4
    config.decode.update(length_penalty="length", alpha=1.0)  # the paper's leaves translations 5 % too short here
    config.parallel.cpu_devices = 2  # about 1.4 times as fast as one device on two cores (docs/performance.md)
    config.eval.every = 2_000
    config.checkpoint.every = 250
    return config
