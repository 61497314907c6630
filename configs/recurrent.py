"""The recurrent rival of configs/multi30k.py's Transformer, on the same data.

    python train.py --config=configs/recurrent.py --config.data.path=FOLDER
    python train.py --config=configs/recurrent.py --config.data.path=FOLDER --config.model.attention=none

With additive attention it has 3.52 million parameters, the Transformer 3.48 million.
Its recipe is that of an earlier version of configs/multi30k.py. To compare scores, use configs/rivals_small.py.
"""

from ml_collections import ConfigDict

from configs import multi30k


def get_config() -> ConfigDict:
    config = multi30k.get_config()
    config.name = "recurrent"
    config.model = ConfigDict()
    config.model.kind = "recurrent"
    config.model.num_layers = 2  # N, of the encoder and of the decoder
    config.model.d_model = 288  # width of embeddings and states; even, as each direction of the encoder has half of it
    config.model.cell = "gru"  # or "lstm"
    config.model.attention = "additive"  # or "dot"; "scaled_dot", over sqrt(d_model); "none": the encoder's last state
    config.model.dropout = 0.2  # on embeddings, after each layer, and on the features that logits are computed from
    config.model.tie_embeddings = True  # one matrix for source, target and output; False: three
    config.model.dtype = "auto"  # as in base.py; the states between time steps are float32
    config.steps = 5_500
    config.optimizer.update(factor=0.35, warmup_steps=400, cooldown=0.0)
    config.optimizer.clip_norm = 1.0  # some gradients through many time steps are huge
    return config
