"""The settings of translators and classifiers of text, each with the values it allows."""

import dataclasses
import math

import numpy as np

from transformer_flax.checked_fields import CheckedConfig, at_least, checked, one_of
from transformer_flax.errors import UserError

LENGTH_PENALTIES = ("gnmt", "length", "none")


class _Settings(CheckedConfig):
    """Settings that may also be numbers of NumPy."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                object.__setattr__(self, name, value.item())
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class Sampling(_Settings):
    """Settings to draw tokens from softmax(logits / temperature), restricted to the likeliest and normalised again."""

    # 0 is greedy search.
    temperature: float = checked(lambda v: 0 <= v < math.inf, "a number from 0", default=1.0)
    # Only the k likeliest tokens; 0: all tokens.
    top_k: int = checked(lambda v: v >= 0, "a whole number from 1, or 0 for all tokens", default=0)
    # Only the fewest likeliest tokens that together reach this probability; 1: all tokens.
    top_p: float = checked(lambda v: 0 < v <= 1, "a number above 0 and at most 1", default=1.0)
    seed: int = checked(lambda v: 0 <= v < 2**32, "a whole number from 0 to 2^32 - 1", default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig(_Settings):
    """The settings that `config.decode` has. `configs/base.py` explains each."""

    beam_size: int = at_least(1)  # K; 1 is greedy search
    length_penalty: str = one_of(LENGTH_PENALTIES)
    alpha: float = checked(math.isfinite, "finite")
    min_length: int = at_least(0)  # fewest tokens of an output, the end symbol included
    max_extra_length: int = at_least(0)  # how many more tokens an output may have than its input
    max_input_length: int = at_least(2)  # in tokens, the end symbol included; longer lines are cut
    batch_size: int = at_least(1)  # rows of a batch on each device
    window: int = at_least(1)  # lines to read and sort by length at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(DecodeConfig):
    """All settings of a translator. A classifier has those in `READING`, and ignores the others."""

    nbest: int = at_least(1, default=1)  # hypotheses for each line; with `sampling`, samples for each line
    # How to draw samples; None: search with a beam instead.
    sampling: Sampling | None = checked(  # noqa: RUF009 (it is a field)
        lambda v: v is None or isinstance(v, Sampling), "a Sampling, as in Sampling(temperature=0.7)", default=None
    )
    refuse_long: bool = False  # raise an error for lines beyond `max_input_length` instead of cutting them
    # The maximum number of local devices.
    num_devices: int = checked(lambda v: v >= 0, "at least 0, which stands for all", default=0)

    def __post_init__(self):
        super().__post_init__()
        if self.sampling is None and self.nbest > self.beam_size:
            raise UserError(
                f"nbest is {self.nbest} and beam_size {self.beam_size}: a beam holds from 1 to beam_size hypotheses"
            )


SETTINGS = tuple(field.name for field in dataclasses.fields(Settings))
READING = ("max_input_length", "batch_size", "window", "refuse_long", "num_devices")
