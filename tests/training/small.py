"""A run that takes seconds."""

from ml_collections import ConfigDict

from configs import numbers


def small_config(**overrides) -> ConfigDict:
    """`numbers`, shrunk; overrides are {"model.dropout": 0.0, ...} with dots as double underscores."""
    config = numbers.get_config()
    config.steps = 6
    config.model.update(num_layers=1, d_model=16, d_ff=16, num_heads=2, d_k=8, d_v=8, dropout=0.2)
    config.data.update(num_pairs=1_000, vocab_size=300, tokens_per_batch=512, num_buckets=2)
    config.decode.update(beam_size=2, max_extra_length=5, max_input_length=40)
    config.eval.update(every=3, sentences=4, test=False)
    config.checkpoint.update(every=3, keep=2)
    config.log.every = 2
    config.parallel.num_devices = 1
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return config
