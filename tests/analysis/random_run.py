"""A run with random parameters, at once: all its heads attend somewhere."""

import dataclasses
import functools

from tests.conftest import TINY
from tests.model.parameters import random_params
from tests.training.small import small_config
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.model.config import ModelConfig
from transformer_flax.model.registry import make_model
from transformer_flax.run import Run

SOURCE, TARGET = "The tired animal sleeps.", "Das müde Tier schläft."


@functools.cache
def random_run(config: ModelConfig = TINY, **changes) -> Run:
    tokenizer = Tokenizer.train([SOURCE, TARGET] * 3, 280)
    config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size, **changes)
    return Run(small_config(), tokenizer, make_model(config), random_params(config), "random", {})
