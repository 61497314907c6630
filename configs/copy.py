"""Copies lines of random letters, to test a model on lines longer than any it was trained on. No download.

    python train.py --config=configs/copy.py
    python -m transformer_flax.sweep --config=configs/copy.py --grid model.positions=sinusoidal,learned --seeds=3
    python docs/length.py --output=copy_length.png runs/sweep-copy/*/seed?

Training and validation lines have at most 20 letters. Test lines are longer, up to 40 letters. docs/length.md shows
the results.
"""

from ml_collections import ConfigDict

from configs import numbers


def get_config() -> ConfigDict:
    config = numbers.get_config()
    config.name = "copy"
    config.steps = 2_000
    config.label_smoothing = 0.0  # the right output is never uncertain
    config.model.update(d_model=64, d_ff=128, d_k=16, d_v=16, dropout=0.0)
    config.model.max_length = 64  # learned positions; those beyond the longest text of training are never trained
    config.data.update(source="copy", vocab_size=285)  # 259, and a piece for each letter with a blank before it
    config.data.update(longest_trained=20, longest_tested=40)
    config.decode.update(beam_size=1, max_input_length=48, max_extra_length=10)
    config.eval.update(every=0, final_average=1)
    config.checkpoint.update(every=500, keep=1)
    config.optimizer.factor = 0.4
    return config
