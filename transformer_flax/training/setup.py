"""Makes all that training needs from a config: devices, tokenizer, corpora, batches."""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator

import jax
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.allocator import keep_memory
from transformer_flax.console import Progress
from transformer_flax.data.batches import Batches, training_batches
from transformer_flax.data.bpe_dropout import BpeDropout
from transformer_flax.data.classes import Classes
from transformer_flax.data.corpus import Corpus, load_corpus
from transformer_flax.data.filtering import select_training_pairs
from transformer_flax.data.sources import Pairs, load_pairs
from transformer_flax.data.tokenizer import (
    Tokenizer,
    find_tokenizer,
    keep_tokenizer,
    sample_texts,
)
from transformer_flax.errors import UserError
from transformer_flax.model.config import ModelConfig
from transformer_flax.model.flops import count_parameters
from transformer_flax.model.registry import find_kind, init_params
from transformer_flax.relatives.embeddings import Vectors
from transformer_flax.training.compilation_cache import keep_compiled
from transformer_flax.training.config_checks import check, device_dtype, given_tokenizer, model_config
from transformer_flax.training.fields import AUTO, complete, require_run
from transformer_flax.training.fine_tuning import are_trained, initial_tokenizer, load_embeddings, load_start
from transformer_flax.training.multihost import first_ahead, from_first, is_first, share
from transformer_flax.training.run_directory import RunDirectory
from transformer_flax.training.saved_model import SavedModel, checksum, parse_name
from transformer_flax.training.sharding import Parallel, divide_cpu, make_parallel


@dataclasses.dataclass(frozen=True)
class Data:
    """The text of a run, by split."""

    tokenizer: Tokenizer
    pairs: dict[str, Pairs]  # of the splits that are evaluated
    corpora: dict[str, Corpus]  # of all
    train: Batches
    classes: Classes | None = None  # that the targets name, where they are labels
    embeddings: Vectors | None = None  # that its embeddings start from
    start: SavedModel | None = None  # the trained model that it starts from


DETERMINISTIC = "--xla_gpu_deterministic_ops=true"  # read when the backend starts


def checked_config(config: ConfigDict, *workdirs: RunDirectory) -> ConfigDict:
    """Completes and checks a copy of a run's config, and resolves the type "auto".

    "auto" becomes the type of the run that a directory holds already. Without one, it becomes what suits the device.

    Args:
      config: of the run.
      workdirs: of the run and of those that are trained with it.

    Raises:
      UserError: naming the field; or a directory's run cannot be read.
    """
    require_run(config)
    config = complete(config)
    if config.init_from:
        config.data.vocab_size = initial_tokenizer(config).vocab_size
    check(config)
    if config.deterministic and DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
    keep_memory()
    divide_cpu(config.parallel.cpu_devices)
    if config.model.dtype == AUTO:
        runs = [workdir.load_config() for workdir in workdirs if workdir.config_file.exists()]
        config.model.dtype = runs[0].model.dtype if runs else device_dtype()
    return config


def set_up_devices(config: ConfigDict, progress: Progress, note: str = "") -> Parallel:
    """The devices of a checked config; says what is trained, and on what.

    Args:
      config: of the run.
      progress: to say it.
      note: goes behind what is said of the devices.

    Raises:
      UserError: there are no such devices.
    """
    model = model_config(config, config.data.vocab_size)
    compiled = keep_compiled(config.data.cache_dir)
    parallel = make_parallel(
        config.parallel, config.data.rows_multiple_of, config.accumulation_steps, config.loss_chunks
    )
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    progress.say(
        f"{config.name}: {_describe(model)}\n"
        f"on {parallel.num_devices} x {jax.devices()[0].device_kind}{processes}, {config.parallel.mode}, "
        f"{config.model.dtype}{note}\n"
        f"compiled programs: {compiled}"
    )
    if config.train_only:
        params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
        trained = are_trained(config.train_only, params)
        count = sum(leaf.size for leaf, keep in zip(*map(jax.tree.leaves, (params, trained)), strict=True) if keep)
        progress.say(f"training {config.train_only} alone: {count:,} of the parameters")
    return parallel


def say_vocabulary(config: ConfigDict, data: Data, progress: Progress) -> None:
    """Says how large the model is where the text has fewer words than its vocabulary may have."""
    if data.tokenizer.vocab_size != config.data.vocab_size:
        progress.say(f"the text's own vocabulary: {_describe(model_config(config, data.tokenizer.vocab_size))}")


def _describe(model: ModelConfig) -> str:
    parameters = count_parameters(model)
    rest = sum(count for module, count in parameters.items() if not module.endswith("embedding"))
    return f"{sum(parameters.values()):,} parameters with a vocabulary of {model.vocab_size:,}, {rest:,} without"


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


def prepare_data(config: ConfigDict, workdir: RunDirectory, progress: Progress) -> Data:
    """Reads the text, makes tokenizer, corpora and batches, and then claims the working directory for them.

    Of several processes the first does so; the others then read what it has written.

    Raises:
      UserError: about the text, or because the working directory holds another run, or is not the first process's.
    """
    index, size = share()
    if from_first(config.to_json) != config.to_json():
        raise UserError(f"process {index} of {size} has another config than process 0; give all the same flags")

    def prepare() -> Data:
        if not (is_first() or workdir.config_file.exists()):
            raise UserError(
                f"process {index} of {size}, on {socket.gethostname()}, does not see {workdir.config_file}, which "
                "process 0 has written; --workdir must lie in a file system that all processes share"
            )
        return _prepare_data(config, workdir, progress)

    return first_ahead(prepare)


def _prepare_data(config: ConfigDict, workdir: RunDirectory, progress: Progress) -> Data:
    splits = ["train", "valid", *(["test"] if config.eval.test else [])]
    with progress.aside():  # TFDS shows its own while it prepares a set
        pairs = {split: load_pairs(config.data, split) for split in splits}
    for split in splits:
        if not len(pairs[split]):
            held_out = config.data.held_out if split == "valid" else 0
            held = f" ({held_out} of the different texts of train were to be held out)" if held_out else ""
            raise UserError(f"the {split} split is empty{held}: look at {config.data.path or config.data.name}")
    fingerprints = {split: pairs[split].fingerprint for split in splits}
    given = given_tokenizer(config)
    embeddings = load_embeddings(config, given)
    if embeddings:
        fingerprints["embedding_init"] = embeddings.fingerprint
    start = load_start(config)
    if start:
        fingerprints["init_from"] = f"{checksum(start.params):08x}"
        progress.say(f"starting from {start.parameters} of {parse_name(config.init_from)[0]}")
        there, here = (f"{data.source_language}-{data.target_language}" for data in (start.config.data, config.data))
        if there != here and not find_kind(config.model.kind).classifies:
            progress.say(f"WARNING: that model translates {there}, and this run is {here}")
    workdir.check(config, fingerprints, given)
    if added := workdir.added_fields():
        fields = ", ".join(f"config.{name}={value!r}" for name, value in added.items())
        progress.say(f"this run is older than some config fields, which have their defaults: {fields}")
    classes = _find_classes(pairs["train"], config)
    if start and classes and start.classes and classes.names != start.classes.names:
        raise UserError(f"config.init_from tells the classes {start.classes} apart, and this text has {classes}")

    if workdir.tokenizer_file.exists():
        tokenizer = workdir.load_tokenizer()
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
    selection = select_training_pairs(corpora["train"], config.data)
    if any(selection.dropped.values()):
        rows = [[reason, f"{count:,}"] for reason, count in selection.dropped.items()]
        rows.append(["trained on", f"{len(selection.indices):,} of {len(corpora['train']):,}"])
        progress.table("training pairs left out", ["with", "pairs"], rows)
    dropout = _bpe_dropout(corpora["train"], selection.indices, tokenizer, config, progress)
    train = training_batches(
        corpora["train"], selection.indices, config.data, seed=config.seed, share=share(), dropout=dropout
    )
    with workdir.lock():  # or a run that trains here would find another config than its own
        workdir.claim(config, fingerprints, tokenizer, classes)  # now that nothing about it can be refused any more
        workdir.save_selection({"used": len(selection.indices), "left out": selection.dropped})
    sizes = ", ".join(f"{len(corpora[split]):,} {split}" for split in splits)
    if classes:
        progress.say(f"{len(classes):,} classes: {classes}")
    progress.say(
        f"{sizes} pairs; vocabulary {tokenizer.vocab_size:,}\n"
        f"{train.batches_per_epoch:,} batches an epoch, {config.steps / train.batches_per_epoch:,.1f} epochs; "
        "shapes (rows x tokens) " + " ".join(f"{rows}x{length}" for rows, length in train.shapes)
    )
    return Data(tokenizer, pairs, corpora, train, classes, embeddings, start)


def _bpe_dropout(
    corpus: Corpus, indices: np.ndarray, tokenizer: Tokenizer, config: ConfigDict, progress: Progress
) -> BpeDropout | None:
    """Prepares BPE-dropout of the training text; None without `config.data.bpe_dropout`."""
    rate = config.data.bpe_dropout
    if not rate:
        return None
    with progress.bar("spelling words"):
        dropout = BpeDropout(corpus, tokenizer, rate, config.data.max_length, config.data.seed)
    count = dropout.too_long(indices, config.seed)
    progress.say(
        f"BPE-dropout: {count:,} of {2 * len(indices):,} sentences would be too long for their rows in the first epoch "
        "and keep the tokenizer's pieces"
    )
    return dropout


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
