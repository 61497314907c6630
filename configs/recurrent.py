"""The recurrent rival of configs/multi30k.py's Transformer, on the same data.

    python train.py --config=configs/recurrent.py --config.data.path=FOLDER
    python train.py --config=configs/recurrent.py --config.data.path=FOLDER --config.model.attention=none

With additive attention it has 3.52 million parameters, the Transformer 3.48 million.
Its recipe is that of an earlier configs/multi30k.py: compare scores by configs/rivals_small.py.
"""

from ml_collections import ConfigDict

from configs import multi30k


def get_config() -> ConfigDict:
    config = multi30k.get_config()
    config.name = "recurrent"
    config.model = ConfigDict()
    config.model.kind = "recurrent"
    config.model.num_layers = 2  # N, of the encoder and of the decoder
    config.model.d_model = 288  # of embeddings and states; even, as each direction of the encoder has a half of it
    config.model.cell = "gru"  # or "lstm"
    config.model.attention = "additive"  # or "dot", "scaled_dot", over sqrt(d_model); "none": the encoder's last state
    config.model.dropout = 0.2  # on embeddings, behind each layer, and on what the logits are made of
    config.model.tie_embeddings = True  # one matrix for source, target and output; False: three
    # "float32", "bfloat16" or "auto": bfloat16 on a GPU or TPU that has it, float32 elsewhere; config.json has which.
    # Parameters, states and loss are float32.
    config.model.dtype = "auto"  # of the computation
    config.steps = 5_500
    config.optimizer.update(factor=0.35, warmup_steps=400)
    config.optimizer.clip_norm = 1.0  # of gradients through many steps of time, some are huge
    return config
