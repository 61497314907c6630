"""From a config to everything that training needs, checked before any of it takes long."""

import contextlib
import dataclasses
import functools
import operator
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.console import Progress
from transformer_flax.data.batches import BATCHING, Batches, training_batches
from transformer_flax.data.classes import Classes
from transformer_flax.data.corpus import Corpus, load_corpus
from transformer_flax.data.filtering import select_training_pairs
from transformer_flax.data.sources import TRANSLATED, Pairs, load_pairs
from transformer_flax.data.tokenizer import (
    KINDS,
    LOSSLESS,
    Tokenizer,
    find_tokenizer,
    keep_tokenizer,
    sample_texts,
    smallest_vocabulary,
)
from transformer_flax.decoding.search import LengthPenalty
from transformer_flax.errors import UserError
from transformer_flax.model.config import LARGEST, ModelConfig
from transformer_flax.model.registry import find_kind, kind_of, make_config
from transformer_flax.relatives.embeddings import Vectors  # and registers all kinds of models
from transformer_flax.training.averaging import UnreadableError, require_vocabulary, saved_steps
from transformer_flax.training.fields import require_fields
from transformer_flax.training.multihost import first_ahead, from_first, is_first, share
from transformer_flax.training.optimizer import make_optimizer
from transformer_flax.training.pretrained_embeddings import load_initial
from transformer_flax.training.run_directory import Workdir


@dataclasses.dataclass(frozen=True)
class Data:
    """The text of a run, by split."""

    tokenizer: Tokenizer
    pairs: dict[str, Pairs]  # of the splits that are evaluated
    corpora: dict[str, Corpus]  # of all
    train: Batches
    classes: Classes | None = None  # that the targets name, where they are labels
    initial: Vectors | None = None  # that its embeddings start from


AT_LEAST_1 = (
    "steps",
    "accumulation_steps",
    "loss_chunks",
    "data.tokens_per_batch",
    "data.num_buckets",
    "data.rows_multiple_of",
    "decode.beam_size",
    "decode.batch_size",
    "decode.window",
    "eval.average",
    "eval.final_average",
    "checkpoint.every",
    "checkpoint.keep",
    "log.every",
    "max_skipped",
)
AT_LEAST_0 = ("decode.min_length", "decode.max_extra_length", "eval.every", "eval.sentences", "eval.patience")


def check(config: ConfigDict) -> None:
    """Checks all that can be without reading the text.

    Raises:
      UserError: naming the field.
    """
    require_run(config)
    require_fields(config)
    require = functools.partial(_require, config)
    check_text(config)
    source, target = config.data.source_language, config.data.target_language
    if config.data.source in TRANSLATED and source == target:
        raise UserError(
            f"config.data.source_language and config.data.target_language are both {source!r}; set one of them to "
            "another language"
        )
    model = model_config(config, config.data.vocab_size)
    make_optimizer(config.optimizer, config.model.d_model)
    LengthPenalty(config.decode.length_penalty, config.decode.alpha)
    for name in AT_LEAST_1:
        require(name, lambda value: value >= 1, "at least 1")
    for name in AT_LEAST_0:
        require(name, lambda value: value >= 0, "at least 0")
    require("data.tokens_per_batch", lambda value: value <= LARGEST, f"at most {LARGEST:,}")
    require(
        "eval.patience",
        lambda value: value == 0 or config.eval.every > 0,
        "0 where config.eval.every is 0: patience counts evaluations during training",
    )
    require("on_write_failure", lambda value: value in ("stop", "go on"), "stop or go on")
    if share()[1] > 1:
        require("on_write_failure", lambda value: value == "stop", "stop with several processes")
    require("data.batching", lambda value: value in BATCHING, f"one of {', '.join(BATCHING)}")
    kind = kind_of(model)
    if not (kind.segments or kind.classifies):
        require(
            "data.batching",
            lambda value: value != "packed",
            f"bucketed: a model of kind {config.model.kind} cannot keep several pairs in a row apart",
        )
    require("data.max_length_ratio", lambda value: value == 0 or value >= 1, "0, or at least 1")
    for name in ("data.max_length", "decode.max_input_length"):
        require(name, lambda value: value >= 2, "at least 2: a token and the end symbol")
    load_initial(config, given_tokenizer(config))
    for name in ("label_smoothing", "ema_decay"):
        require(name, lambda value: 0 <= value < 1, "from 0 to below 1")
    averaged = max(config.eval.average, config.eval.final_average)
    require(
        "checkpoint.keep",
        lambda value: value >= averaged,
        f"at least {averaged}: what config.eval.average or final_average takes must be kept",
    )
    if kind.classifies:
        for name, only in (("loss_chunks", 1), ("data.batching", "bucketed"), ("data.max_length_ratio", 0)):
            require(name, lambda value, only=only: value == only, f"{only!r} where texts are classified")
    else:
        require("data.tokenizer", lambda value: value in LOSSLESS, f"{' or '.join(LOSSLESS)}, to translate every word")
    if config.data.batching == "packed":
        least = config.data.rows_multiple_of * config.data.max_length
        require(
            "data.tokens_per_batch",
            lambda value: value >= least,
            f"at least {least:,} when packed: config.data.rows_multiple_of rows of config.data.max_length tokens",
        )
    if model.most_positions is not None:
        extra = 0 if kind.classifies else config.decode.max_extra_length
        longest = max(config.data.max_length, config.decode.max_input_length + extra)
        require(
            "model.max_length",
            lambda value: value >= longest,
            f"at least {longest} with learned positions: config.data.max_length, and config.decode.max_input_length + "
            "max_extra_length",
        )


def require_run(config: ConfigDict) -> None:
    """Raises:
    UserError: the config is of no run, but of word vectors.
    """
    if "model" not in config:
        raise UserError(
            "the config has no section config.model; configs/vectors.py is for python -m transformer_flax.vectors train"
        )


def check_text(config: ConfigDict) -> None:
    """Checks what the config says of the text and its tokenizer, which need not be those of a run.

    Raises:
      UserError: naming the field.
    """
    require = functools.partial(_require, config)
    require("data.tokenizer_sample", lambda value: value >= 1, "at least 1")
    for name in ("seed", "data.seed"):
        require(name, lambda value: 0 <= value < 2**32, "from 0 to 2^32 - 1")
    require("data.tokenizer", lambda value: value in KINDS, f"one of {', '.join(KINDS)}")
    if given_tokenizer(config) is None:
        least = smallest_vocabulary(config.data.tokenizer)
        require("data.vocab_size", lambda value: value >= least, f"at least {least}")


def _require(config: ConfigDict, name: str, is_valid: Callable[[Any], bool], requirement: str) -> None:
    value = functools.reduce(operator.getitem, name.split("."), config)
    if not is_valid(value):
        raise UserError(f"config.{name} is {value!r}; it must be {requirement}")


def given_tokenizer(config: ConfigDict) -> Tokenizer | None:
    """The one that the config names a file of, or None if one is to be trained.

    Raises:
      UserError: it cannot be used, or is not of the size that the config says: whatever is told of the model before
        the text is read, such as its parameters, is told from there.
    """
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


def train_tokenizer(pairs: Pairs, config: ConfigDict, progress: Progress, *, sources_only: bool = False) -> Tokenizer:
    """The tokenizer that `config.data` has trained on these pairs, from where it was kept the last time if it was."""
    found = find_tokenizer(pairs, config.data, sources_only=sources_only)
    if found is not None:
        return found
    progress.say("training the tokenizer")
    with contextlib.ExitStack() as merging:

        def texts() -> Iterator[str]:
            with progress.bar("reading text for the tokenizer") as update:
                most, seed = config.data.tokenizer_sample, config.data.seed
                yield from sample_texts(pairs, most, seed, sources_only=sources_only, progress=update)
            # From here on the library works alone and does not say how far it is: a bar without an end.
            merging.enter_context(progress.bar("making the vocabulary"))

        tokenizer = Tokenizer.train(texts(), config.data.vocab_size, config.data.tokenizer)
    keep_tokenizer(tokenizer, pairs, config.data, sources_only=sources_only)
    return tokenizer


def prepare_data(config: ConfigDict, workdir: Workdir, progress: Progress) -> Data:
    """Reads the text, makes tokenizer, corpora and batches, and then claims the working directory for them.

    Of several processes the first does so; the others then read what it has written.

    Raises:
      UserError: about the text, or because the working directory holds another run, or is not the first process's.
    """
    index, size = share()
    if from_first(config.to_json) != config.to_json():
        raise UserError(f"process {index} of {size} has another config than process 0; give all the same flags")
    with first_ahead():
        if not (is_first() or workdir.config_file.exists()):
            raise UserError(
                f"process {index} of {size}, on {socket.gethostname()}, does not see {workdir.config_file}, which "
                "process 0 has written; --workdir must lie in a file system that all processes share"
            )
        return _prepare_data(config, workdir, progress)


def _prepare_data(config: ConfigDict, workdir: Workdir, progress: Progress) -> Data:
    splits = ["train", "valid", *(["test"] if config.eval.test else [])]
    with progress.aside():  # TFDS shows its own while it prepares a set
        pairs = {split: load_pairs(config.data, split) for split in splits}
    for split in splits:
        if not len(pairs[split]):
            raise UserError(f"the {split} split is empty")
    fingerprints = {split: pairs[split].fingerprint for split in splits}
    given = given_tokenizer(config)
    initial = load_initial(config, given)
    if initial:
        fingerprints["embedding_init"] = initial.fingerprint
    workdir.check(config, fingerprints, given)
    if added := workdir.added_fields():
        fields = ", ".join(f"config.{name}={value!r}" for name, value in added.items())
        progress.say(f"this run is older than some config fields, which have their defaults: {fields}")
    classes = _find_classes(pairs["train"], config)

    if workdir.tokenizer_file.exists():
        tokenizer = workdir.load_tokenizer()
        for step in saved_steps(workdir.checkpoints):
            with contextlib.suppress(UnreadableError):  # whoever goes on from it will tell
                require_vocabulary(workdir.checkpoints, step, tokenizer.vocab_size)
    elif given:
        tokenizer = given
    else:
        tokenizer = train_tokenizer(pairs["train"], config, progress, sources_only=classes is not None)

    corpora = {}
    for split in splits:
        with progress.bar(f"tokenising {split}") as update:
            corpora[split] = load_corpus(
                pairs[split], tokenizer, config.data.cache_dir, labels=classes, progress=update
            )
    del pairs["train"]  # whose text nobody reads again, and which takes memory and room on the disk
    selection = select_training_pairs(
        corpora["train"],
        config.data.max_length,
        max_length_ratio=config.data.max_length_ratio,
        drop_duplicates=config.data.drop_duplicates,
    )
    if any(selection.dropped.values()):
        rows = [[reason, f"{count:,}"] for reason, count in selection.dropped.items()]
        rows.append(["trained on", f"{len(selection.indices):,} of {len(corpora['train']):,}"])
        progress.table("training pairs left out", ["with", "pairs"], rows)
    train = training_batches(corpora["train"], selection.indices, config.data, seed=config.seed, share=share())
    with workdir.lock():  # or a run that trains here would find another config than its own
        workdir.claim(config, fingerprints, tokenizer, classes)  # now that nothing about it can be refused any more
        workdir.save_selection({"used": len(selection.indices), "left out": selection.dropped})
    sizes = ", ".join(f"{len(corpora[split]):,} {split}" for split in splits)
    if classes:
        progress.say(f"{len(classes):,} classes: {classes}")
    progress.say(
        f"{sizes} pairs; vocabulary {tokenizer.vocab_size:,}; {train.batches_per_epoch:,} batches an epoch, shapes "
        + " ".join(f"{rows}x{length}" for rows, length in train.shapes)
    )
    return Data(tokenizer, pairs, corpora, train, classes, initial)


def _find_classes(pairs: Pairs, config: ConfigDict) -> Classes | None:
    """The classes that the targets of the train split name, if the model is to tell them apart.

    Raises:
      UserError: there are not as many as the model has.
    """
    if not find_kind(config.model.kind).classifies:
        return None
    classes = Classes.of(pairs)
    if len(classes) < 2:
        raise UserError(f"all texts of the train split are of one class, {classes}: there is nothing to tell apart")
    if len(classes) != config.model.num_classes:
        raise UserError(
            f"config.model.num_classes is {config.model.num_classes}, and the train split has {len(classes):,} classes "
            f"({classes}); set --config.model.num_classes={len(classes)}"
        )
    return classes


def model_config(config: ConfigDict, vocab_size: int) -> ModelConfig:
    """The model of a run's config, for a vocabulary of that size."""
    return make_config(vocab_size, config.model)


def load_setup(place: Workdir) -> tuple[ConfigDict, Tokenizer, ModelConfig]:
    """What a run is, checked: its config, its tokenizer and its model, without parameters.

    Raises:
      UserError: there is no run, or one that cannot be read.
    """
    config, tokenizer = place.load_config(), place.load_tokenizer()
    try:
        require_run(config)
        require_fields(config, saved=True)
        model = model_config(config, tokenizer.vocab_size)
        for name in ("eval.final_average", "checkpoint.every"):
            section, field = name.split(".")
            if config[section][field] < 1:
                raise UserError(f"config.{name} is {config[section][field]}; it must be at least 1")
    except UserError as error:
        raise UserError(f"{place.config_file}: {error}") from error
    return config, tokenizer, model
