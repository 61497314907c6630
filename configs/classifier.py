"""A classifier of texts, made of the encoder alone, for tab-separated files of your own.

    python train.py --config=configs/classifier.py --config.data.path=FOLDER --config.model.num_classes=3

FOLDER holds train.tsv and test.tsv. Each line is a label, a tab and a text, unless `data.label_column` and
`data.text_column` name other columns. A tenth of train becomes the valid split. If FOLDER has a valid.tsv, set
--config.data.held_out=0.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    config = base.get_config()
    config.name = "classifier"
    config.steps = 2_000
    config.model.kind = "classifier"
    # A text's vector, which has dropout: the "mean" or "max" of the encoder's outputs, the "first" one, or "attention":
    # by a learned query.
    config.model.pooling = "mean"
    config.model.num_classes = 2  # the number of labels in train
    config.model.embedding_deviation = 0.2  # standard deviation of initial embeddings x sqrt(d_model); 1 in translators
    del config.model.tie_embeddings  # there is one embedding matrix
    config.model.update(num_layers=2, d_model=128, d_ff=256, num_heads=4, d_k=32, d_v=32, dropout=0.3)
    config.data.update(source="tsv", name="", held_out=0.1, tokenizer="words", vocab_size=20_000)
    config.data.update(max_length=128, tokens_per_batch=1024, num_buckets=4, length_multiple_of=1)
    config.optimizer.update(factor=0.3, warmup_steps=300)
    config.optimizer.eps = 1e-4  # meant to damp updates of rare words; no difference on TREC (docs/classification.md)
    config.decode.max_input_length = 128
    config.eval.update(every=250, final_average=5)
    config.checkpoint.update(every=100, keep=5)
    return config
