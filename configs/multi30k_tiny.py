"""The published small Transformer of Multi30k, `transformer_tiny` of Wu et al. (2021), as far as its recipe is known.

    python train.py --config=configs/multi30k_tiny.py --config.data.path=FOLDER

4 + 4 layers of width 128, lower-cased text in Moses' tokens, 8,000 updates (131 epochs) with large dropout, and
the mean of the last ten checkpoints. Published: 41.02 BLEU on test_2016_flickr, of lower-cased tokens. Here: 40.9, the
mean of three seeds with packed batches, in minutes on a GPU; 40.5, one seed, in two and a half hours of one core, with
`--config.eval.every=1000` (docs/results.md).
`python -m transformer_flax.fetch multi30k` downloads the text.
"""

from ml_collections import ConfigDict

from configs import multi30k


def get_config() -> ConfigDict:
    config = multi30k.get_config()
    config.name = "multi30k_tiny"
    config.steps = 8_000
    config.model.update(num_layers=4, d_model=128, d_ff=256, num_heads=4, d_k=32, d_v=32, dropout=0.3)
    config.model.update(start="fairseq", branch_init=1.0)  # theirs, as they used fairseq
    config.data.update(vocab_size=10_000, tokens_per_batch=8_192, lowercase=True, tokenized=True)
    config.optimizer.update(factor=2.5, warmup_steps=2_000, cooldown=0.0)  # peak: 0.005
    config.optimizer.update(eps=1e-8, clip_norm=25.0)
    config.decode.update(beam_size=5, length_penalty="length", alpha=1.0)
    config.eval.update(every=500, final_average=10, patience=10)
    config.checkpoint.update(every=61, keep=10)  # every epoch
    return config
