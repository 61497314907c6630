"""The convolutional rival of configs/multi30k.py's Transformer, on the same data.

    python train.py --config=configs/convolutional.py --config.data.path=FOLDER

It has 3.39 million parameters, the Transformer 3.48 million.
Its recipe is that of an earlier version of configs/multi30k.py. To compare scores, use configs/rivals_small.py.
"""

from ml_collections import ConfigDict

from configs import multi30k


def get_config() -> ConfigDict:
    config = multi30k.get_config()
    config.name = "convolutional"
    config.model = ConfigDict()
    config.model.kind = "convolutional"
    config.model.num_layers = 5  # N, of the encoder and of the decoder
    config.model.d_model = 184  # width of the embeddings and of the gates' outputs
    config.model.kernel_width = 3  # k, odd; N layers see N (k - 1) words around a word (encoder) or before it (decoder)
    config.model.max_length = 320  # number of learned positions; no sentence may be longer
    config.model.dropout = 0.2  # on embeddings, on the input of each convolution, and on the decoder's output
    config.model.tie_embeddings = True  # one matrix for source, target and output; False: three
    config.model.dtype = "auto"  # as in base.py
    config.steps = 5_500
    config.optimizer.update(factor=0.35, warmup_steps=400, cooldown=0.0)
    config.optimizer.clip_norm = 1.0
    return config
