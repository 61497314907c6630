"""Checks a run's config before any long work starts."""

import functools
import pathlib

import jax
from ml_collections import ConfigDict

from transformer_flax.data.batches import round_up
from transformer_flax.data.sources import ONE_LANGUAGE, SOURCES
from transformer_flax.data.tokenizer import LOSSLESS, TOKENIZERS, Tokenizer, smallest_vocabulary
from transformer_flax.errors import UserError
from transformer_flax.model.config import ModelConfig
from transformer_flax.model.registry import find_kind, make_config, param_shapes
from transformer_flax.training.config_fields import AUTO, flatten, needs_bfloat16, require_fields, require_only
from transformer_flax.training.fine_tuning import are_trained, initial_setup, load_embeddings, require_alike
from transformer_flax.training.multihost import share
from transformer_flax.training.optimizer import SCHEDULE_FREE, keeps_average
from transformer_flax.training.wandb_run import require_wandb


def check(config: ConfigDict) -> None:
    """Checks everything that can be checked without reading the text. The config must come from `complete_run`."""
    check_text(config)
    require = functools.partial(_require, config)
    fields, kind = flatten(config.to_dict()), find_kind(config.model.kind)
    model = model_config(config, config.data.vocab_size)
    given = given_tokenizer(config)

    # The text and its tokenizer.
    source, target = config.data.source_language, config.data.target_language
    if config.data.source not in ONE_LANGUAGE and source == target:
        raise UserError(
            f"config.data.source_language and config.data.target_language are both {source!r}; set one of them to "
            "another language"
        )
    if kind.classifies:
        only = {"loss_chunks": 1, "r_drop": 0, "data.bpe_dropout": 0}
        only |= {"data.batching": "bucketed", "data.max_length_ratio": 0}
        require_only(config, only, "where texts are classified")
    else:
        tokenizer = config.data.tokenizer
        require("data.tokenizer", tokenizer in LOSSLESS, f"{' or '.join(LOSSLESS)}, to translate every word")
        if config.data.bpe_dropout and given:
            given.merges()
        elif config.data.bpe_dropout:
            require("data.tokenizer", tokenizer == "bpe", "bpe with config.data.bpe_dropout")

    # The shapes of batches.
    if config.data.batching == "packed":
        must = f"bucketed: a model of kind {config.model.kind} cannot keep several pairs in a row apart"
        require("data.batching", kind.segments, must)
        least = config.data.rows_multiple_of * config.data.max_length
        must = f"at least {least:,} when packed: config.data.rows_multiple_of rows of config.data.max_length tokens"
        require("data.tokens_per_batch", config.data.tokens_per_batch >= least, must)
    least = max(1, config.parallel.num_devices) * config.accumulation_steps * config.loss_chunks
    must = f"a multiple of {least}: of config.parallel.num_devices x accumulation_steps x loss_chunks"
    require("data.rows_multiple_of", config.data.rows_multiple_of % least == 0, must)
    if needs_bfloat16(config):
        width = "data.max_length" if config.data.batching == "packed" else "data.length_multiple_of"
        require(width, fields[width] % 2 == 0, "even for cuDNN's attention, which takes no odd widths")
    extra = 0 if kind.classifies else config.decode.max_extra_length
    multiple = config.data.length_multiple_of
    widest = round_up(max(config.data.max_length, config.decode.max_input_length), multiple)
    longest = max(widest, config.decode.max_input_length + extra)
    must = (
        f"at least {longest} with learned positions: config.data.max_length and config.decode.max_input_length, as "
        f"multiples of {multiple} (config.data.length_multiple_of), and max_input_length + max_extra_length"
    )
    require("model.max_length", model.most_positions >= longest, must)

    # What the parameters start from, and which of them are trained.
    if config.init_from:
        require_alike(config, model)
        only = {"data.tokenizer_file": "", "embedding_init": ""}
        require_only(config, only, "with config.init_from, which has its own")
    load_embeddings(config, given)
    if config.train_only:
        are_trained(config.train_only, param_shapes(model))

    # The optimizer, processes and devices.
    if config.optimizer.name == SCHEDULE_FREE:
        only = {"ema_decay": 0.0, "optimizer.cooldown": 0.0}
        require_only(config, only, "with schedule_free, which keeps an average of its own at a constant rate")
    if share()[1] > 1:
        require_only(config, {"parallel.mode": "jit", "on_write_failure": "stop"}, "with several processes")
    if config.parallel.mode == "pmap":
        require_only(config, {"parallel.shard_params": False}, "with pmap, which copies the parameters to each device")

    # Evaluations, checkpoints and logs.
    must = "0 where config.eval.every is 0: patience counts evaluations during training"
    require("eval.patience", config.eval.patience == 0 or config.eval.every > 0, must)
    averaged = 1 if keeps_average(config) else max(config.eval.average, config.eval.final_average)
    must = f"at least {averaged}: what config.eval.average or final_average takes must be kept"
    require("checkpoint.keep", config.checkpoint.keep >= averaged, must)
    if config.log.wandb:
        require_wandb()


def check_text(config: ConfigDict) -> None:
    """Checks each field by itself, and the settings of the text and its tokenizer.

    The config need not be a run's: it may be one of word vectors.
    """
    require_fields(config)
    require = functools.partial(_require, config)
    require("data.source", config.data.source in SOURCES, f"one of {', '.join(SOURCES)}")
    require("data.tokenizer", config.data.tokenizer in TOKENIZERS, f"one of {', '.join(TOKENIZERS)}")
    if given_tokenizer(config) is None:
        least = smallest_vocabulary(config.data.tokenizer)
        require("data.vocab_size", config.data.vocab_size >= least, f"at least {least}")


def _require(config: ConfigDict, name: str, is_valid: bool, requirement: str) -> None:
    if not is_valid:
        raise UserError(f"config.{name} is {flatten(config.to_dict())[name]!r}; it must be {requirement}")


def given_tokenizer(config: ConfigDict) -> Tokenizer | None:
    """Returns the tokenizer of `config.init_from` or `config.data.tokenizer_file`, or None if one must be trained.

    The vocabulary in tokenizer_file must have config.data.vocab_size tokens. What is reported before the text is read,
    such as the number of parameters, follows from vocab_size.
    """
    if config.get("init_from"):
        return initial_setup(config)[1]
    if not config.data.tokenizer_file:
        return None
    tokenizer = Tokenizer.load(pathlib.Path(config.data.tokenizer_file))
    if tokenizer.vocab_size != config.data.vocab_size:
        raise UserError(
            f"config.data.vocab_size is {config.data.vocab_size}, and config.data.tokenizer_file "
            f"{config.data.tokenizer_file} has {tokenizer.vocab_size} tokens; "
            f"set --config.data.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def model_config(config: ConfigDict, vocab_size: int) -> ModelConfig:
    """Returns the model's config for a vocabulary of this size.

    "auto" counts as bfloat16 if the model needs bfloat16 (`needs_bfloat16`), and as float32 otherwise.
    """
    fields = config.model.to_dict()
    if fields.get("dtype") == AUTO:
        fields["dtype"] = "bfloat16" if needs_bfloat16(config) else "float32"
    return make_config(vocab_size, fields)


def device_dtype() -> str:
    """Returns the dtype for the device: bfloat16 on a TPU or on a GPU that multiplies bfloat16, otherwise float32."""
    device = jax.devices()[0]
    # NVIDIA's GPUs report a number such as "7.5" and multiply bfloat16 from 8.0 on. AMD's GPUs report a name such as
    # "gfx90a", and all of them multiply bfloat16.
    old = getattr(device, "compute_capability", "")[:2] in ("5.", "6.", "7.")
    return "bfloat16" if device.platform == "tpu" or (device.platform == "gpu" and not old) else "float32"
