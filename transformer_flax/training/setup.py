"""Prepares a run for its first step: a checked config, devices, tokenizer, corpora and batches."""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from transformer_flax.console import Progress, counted
from transformer_flax.data.batches import Batches, training_batches
from transformer_flax.data.bpe_dropout import BpeDropout
from transformer_flax.data.classes import Classes
from transformer_flax.data.corpus import Corpus, load_corpus, select_training_pairs
from transformer_flax.data.sentence_pairs import CHUNK, Pairs
from transformer_flax.data.sources import MADE, load_pairs
from transformer_flax.data.tokenizer import Tokenizer, cached_tokenizer, sample_texts
from transformer_flax.decoding.scoring import warning_of_pieces
from transformer_flax.errors import UserError
from transformer_flax.malloc import keep_memory
from transformer_flax.model.config import ModelConfig
from transformer_flax.model.flops import count_parameters
from transformer_flax.model.registry import find_kind, param_shapes
from transformer_flax.relatives.vector_files import Vectors
from transformer_flax.training.compilation_cache import keep_compiled
from transformer_flax.training.config_checks import check, device_dtype, given_tokenizer, model_config
from transformer_flax.training.config_fields import AUTO, needs_bfloat16, require_only
from transformer_flax.training.fine_tuning import are_trained, complete_run, load_embeddings
from transformer_flax.training.multihost import first_ahead, from_first, is_first, share
from transformer_flax.training.optimizer import depends_on_steps
from transformer_flax.training.run_directory import RunDirectory, final_splits
from transformer_flax.training.sharding import Parallel, divide_cpu, make_parallel
from transformer_flax.training.trained_model import TrainedModel, checksum, load_model, parse_name

LOST_SHARE = 0.01  # a run warns if its tokenizer does not restore a larger share of the targets
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"  # XLA reads this flag when the backend starts


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run before its first step: its config, its working directory, its data, and what its parameters start from."""

    config: ConfigDict
    directory: RunDirectory
    tokenizer: Tokenizer
    pairs: dict[str, Pairs]  # the evaluated splits
    corpora: dict[str, Corpus]  # all splits
    train: Batches  # batches of the train split; batch k is for step k + 1
    classes: Classes | None = None  # the classes, if the targets are labels
    embeddings: Vectors | None = None  # the vectors that the embeddings start from
    start: TrainedModel | None = None  # the trained model that the run starts from


def checked_config(config: ConfigDict, *directories: RunDirectory) -> ConfigDict:
    """Returns a completed and checked copy of a run's config, in which the type "auto" is resolved.

    Also sets what must be set before JAX uses a device: the allocator, XLA's flags and the number of CPU devices.

    If a working directory already holds a run, "auto" becomes that run's type. Otherwise, "auto" becomes the type that
    suits the device. Runs that are trained together have several working directories.
    """
    keep_memory()  # first, because threads that read a tokenizer keep their arenas, and lend them to JAX's
    config = complete_run(config)
    check(config)
    begun = [directory for directory in directories if directory.config_file.exists()]
    if not begun and config.data.source not in ("folder", "tsv"):  # older versions trained such runs
        require_only(config, {"data.held_out": 0.0}, f"with source {config.data.source}, whose splits are given")
    if not begun and config.data.source in MADE and config.data.path:
        raise UserError(
            f"config.data.path has no effect with source {config.data.source}, which makes its text; to train on a "
            "folder, choose another --config, such as configs/multi30k.py"
        )
    if not begun and config.data.source == "tsv" and not find_kind(config.model.kind).classifies:  # and such runs
        raise UserError(
            "config.data.source is 'tsv', whose targets are labels; to translate, make a folder of its columns"
        )
    if config.deterministic and DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
    divide_cpu(config.parallel.cpu_devices)
    if config.model.dtype == AUTO:
        if begun:
            config.model.dtype = begun[0].load_config().model.dtype
        else:
            config.model.dtype = "bfloat16" if needs_bfloat16(config) else device_dtype()
    return config


def set_up_devices(config: ConfigDict, progress: Progress, note: str = "") -> Parallel:
    """Returns the devices of a checked config. Prints the model's size and the devices, followed by `note`."""
    model = model_config(config, config.data.vocab_size)
    compiled = keep_compiled(config.data.cache_dir)
    parallel = make_parallel(
        config.parallel, config.data.rows_multiple_of, config.accumulation_steps, config.loss_chunks
    )
    devices = f"{parallel.num_devices} x {jax.devices()[0].device_kind}"
    devices += f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    progress.say(f"{config.name}: {_describe(model)}")
    progress.say(f"on {devices}, {config.parallel.mode}, {config.model.dtype}{note}")
    progress.say(f"compiled programs: {compiled}")
    if config.train_only:
        params = param_shapes(model)
        trained = are_trained(config.train_only, params)
        count = sum(leaf.size for leaf, keep in zip(*map(jax.tree.leaves, (params, trained)), strict=True) if keep)
        progress.say(f"training {config.train_only} alone: {count:,} of the parameters")
    return parallel


def _describe(model: ModelConfig) -> str:
    parameters = count_parameters(model)
    rest = sum(count for module, count in parameters.items() if not module.endswith("embedding"))
    return f"{sum(parameters.values()):,} parameters with a vocabulary of {model.vocab_size:,}, {rest:,} without"


def prepare_run(config: ConfigDict, directory: RunDirectory, progress: Progress) -> PreparedRun:
    """Reads the text, makes the tokenizer, corpora and batches, and then claims the working directory for the run.

    With several processes, the first process does this first. The other processes then read what it has written, so all
    must have the same config and see the same working directory.
    """
    return prepare_seeds([config], [directory], progress)[0]


def prepare_seeds(
    configs: Sequence[ConfigDict], directories: Sequence[RunDirectory], progress: Progress
) -> list[PreparedRun]:
    """Does what `prepare_run` does for runs that differ only in their seed.

    They share all but their config, directory and batches.
    """
    index, size = share()
    if from_first(configs[0].to_json) != configs[0].to_json():
        raise UserError(f"process {index} of {size} has another config than process 0; give all the same flags")
    return first_ahead(lambda: _prepare(configs, directories, progress))


def _prepare(
    configs: Sequence[ConfigDict], directories: Sequence[RunDirectory], progress: Progress
) -> list[PreparedRun]:
    config, file, (index, size) = configs[0], directories[0].config_file, share()
    if not (is_first() or file.exists()):
        raise UserError(
            f"process {index} of {size}, on {socket.gethostname()}, does not see {file}, which process 0 has written; "
            "--workdir must lie in a file system that all processes share"
        )
    pairs = _load_splits(config, progress)
    given = given_tokenizer(config)
    embeddings = load_embeddings(config, given)
    start = _load_start(config, progress)
    fingerprints = {split: pairs[split].fingerprint for split in pairs}
    if embeddings:
        fingerprints["embedding_init"] = embeddings.fingerprint
    if start:
        fingerprints["init_from"] = f"{checksum(start.params):08x}"
    for own, directory in zip(configs, directories, strict=True):
        directory.check(own, fingerprints, given)
    _say_changes(configs, directories, progress)
    classes = _find_classes(pairs["train"], config, start)
    if known := [directory for directory in directories if directory.tokenizer_file.exists()]:
        tokenizer = known[0].load_tokenizer()
    else:
        tokenizer = given or train_tokenizer(pairs["train"], config, progress, sources_only=classes is not None)

    if classes is None:
        _warn_of_targets(pairs["valid"], tokenizer, progress)
    corpora = {}
    for split in pairs:
        with progress.bar(f"tokenising {split}", logged=True) as update:
            corpora[split] = load_corpus(
                pairs[split], tokenizer, config.data.cache_dir, labels=classes, progress=update
            )
    del pairs["train"]  # its text is not read again, and takes memory and disk space
    selection = select_training_pairs(corpora["train"], config.data)
    if any(selection.dropped.values()):
        rows = [[reason, f"{count:,}"] for reason, count in selection.dropped.items()]
        rows.append(["trained on", f"{len(selection.indices):,} of {len(corpora['train']):,}"])
        progress.table("training pairs left out", ["with", "pairs"], rows)
    dropout = _bpe_dropout(corpora["train"], selection.indices, tokenizer, config, progress)
    runs = []
    for own, directory in zip(configs, directories, strict=True):
        train = training_batches(
            corpora["train"], selection.indices, config.data, seed=own.seed, share=share(), dropout=dropout
        )
        runs.append(PreparedRun(own, directory, tokenizer, pairs, corpora, train, classes, embeddings, start))
    for run in runs:  # last, when nothing can be refused any more
        with run.directory.lock():  # otherwise a run that trains here would find a config that is not its own
            run.directory.claim(run.config, fingerprints, tokenizer, classes)
            run.directory.save_selection({"used": len(selection.indices), "left out": selection.dropped})
    _say_sizes(runs[0], progress)
    return runs


def _load_splits(config: ConfigDict, progress: Progress) -> dict[str, Pairs]:
    """Returns the pairs of every split that the run uses, and checks that no split is empty."""
    splits = ["train", *final_splits(config)]
    with progress.aside():  # TFDS shows its own bars while it prepares a dataset
        pairs = {split: load_pairs(config.data, split) for split in splits}
    for split in splits:
        if not len(pairs[split]):
            held_out = config.data.held_out if split == "valid" else 0
            held = f" ({held_out} of the different texts of train were to be held out)" if held_out else ""
            raise UserError(f"the {split} split is empty{held}: look at {config.data.path or config.data.name}")
    return pairs


def _load_start(config: ConfigDict, progress: Progress) -> TrainedModel | None:
    """Returns the trained model that `config.init_from` names; None if it names none."""
    if not config.init_from:
        return None
    origin, steps = parse_name(config.init_from)
    # The parameters of named checkpoints, also where the run keeps their average: older runs started from these.
    start = load_model(origin, steps=steps, average=1 if steps else None)
    progress.say(f"starting from {start.params_from} of {origin}")
    there, here = (f"{data.source_language}-{data.target_language}" for data in (start.config.data, config.data))
    if there != here and not find_kind(config.model.kind).classifies:
        progress.say(f"WARNING: that model translates {there}, and this run is {here}")
    return start


def _say_changes(configs: Sequence[ConfigDict], directories: Sequence[RunDirectory], progress: Progress) -> None:
    """Prints what differs in resumed runs: new config fields, and another length if the learning rate depends on it."""
    added = {}
    for config, directory in zip(configs, directories, strict=True):
        added |= directory.added_fields()
        resumed = directory.config_file.exists()
        if resumed and depends_on_steps(config) and config.steps != (before := directory.load_config().steps):
            progress.say(
                f"WARNING: config.steps was {before:,} and is now {config.steps:,}. The learning rate depends on "
                "it, so it may jump"
            )
    if added:
        fields = ", ".join(f"config.{name}={value!r}" for name, value in added.items())
        progress.say(f"this run is older than some config fields, which have their defaults: {fields}")


def _find_classes(pairs: Pairs, config: ConfigDict, start: TrainedModel | None) -> Classes | None:
    """Returns the classes that the targets of the train split name; None if the model does not classify.

    A trained model that the run starts from must know the same classes.
    """
    if not find_kind(config.model.kind).classifies:
        return None
    classes = Classes.of(pairs)
    if len(classes) < 2:
        raise UserError(f"all texts of the train split are of one class, {classes}: there is nothing to tell apart")
    if start and start.classes and classes.names != start.classes.names:
        raise UserError(f"the model of config.init_from knows the classes {start.classes}, and this text has {classes}")
    if len(classes) != config.model.num_classes:
        raise UserError(
            f"config.model.num_classes is {config.model.num_classes}, and the train split has {len(classes):,} classes "
            f"({classes}); set --config.model.num_classes={len(classes)}"
        )
    return classes


def train_tokenizer(pairs: Pairs, config: ConfigDict, progress: Progress, *, sources_only: bool = False) -> Tokenizer:
    """Returns a tokenizer trained on these pairs as `config.data` specifies, from the cache if it is there."""

    def train() -> Tokenizer:
        progress.say("training the tokenizer")
        with contextlib.ExitStack() as merging:

            def texts() -> Iterator[str]:
                with progress.bar("reading text for the tokenizer", logged=True) as update:
                    most, seed = config.data.tokenizer_sample, config.data.seed
                    yield from sample_texts(pairs, most, seed, sources_only=sources_only, progress=update)
                # From here on, the library does not report its progress, so this bar has no end.
                merging.enter_context(progress.bar("making the vocabulary"))

            return Tokenizer.train(texts(), config.data.vocab_size, config.data.tokenizer)

    return cached_tokenizer(pairs, config.data, train, sources_only=sources_only)


def _warn_of_targets(pairs: Pairs, tokenizer: Tokenizer, progress: Progress) -> None:
    """Warns if the first targets are pieces of words, or if a given tokenizer does not restore them."""
    targets = [target for _, target in pairs.read(range(min(len(pairs), CHUNK)))]
    if warning := warning_of_pieces(targets):
        progress.say(f"WARNING: in the valid split, {warning}")
    restored = map(tokenizer.decode, tokenizer.encode(targets))
    changed = [(before, after) for before, after in zip(targets, restored, strict=True) if before != after]
    if len(changed) > LOST_SHARE * len(targets):
        before, after = changed[0]
        progress.say(
            f"WARNING: the tokenizer restores {len(targets) - len(changed):,} of {len(targets):,} targets of the valid "
            f"split: {before[:100]!r} becomes {after[:100]!r}. Translations are written like that, which lowers BLEU"
        )


def _bpe_dropout(
    corpus: Corpus, indices: np.ndarray, tokenizer: Tokenizer, config: ConfigDict, progress: Progress
) -> BpeDropout | None:
    """Returns BPE-dropout of the training text; None if `config.data.bpe_dropout` is 0."""
    rate = config.data.bpe_dropout
    if not rate:
        return None
    with progress.bar("spelling words", logged=True) as update:
        dropout = BpeDropout(corpus, tokenizer, rate, config.data.max_length, config.data.seed, update)
    count = dropout.too_long(indices, config.seed)
    progress.say(
        f"BPE-dropout: {count:,} of {2 * len(indices):,} sentences would be too long for their rows in the first epoch "
        "and keep the tokenizer's pieces"
    )
    return dropout


def _say_sizes(run: PreparedRun, progress: Progress) -> None:
    """Prints the sizes of the splits, the vocabulary, an epoch and the batches."""
    config, train, vocab_size = run.config, run.train, run.tokenizer.vocab_size
    if run.classes:
        progress.say(f"{len(run.classes):,} classes: {run.classes}")
    pairs = ", ".join(f"{len(corpus):,} {split}" for split, corpus in run.corpora.items())
    progress.say(f"{pairs} pairs; vocabulary {vocab_size:,}")
    epochs = f"{train.batches_per_epoch:,} batches an epoch, {config.steps / train.batches_per_epoch:,.1f} epochs"
    shapes = " ".join(f"{rows}x{length}" for rows, length in train.shapes)
    progress.say(f"{epochs}; shapes (rows x tokens) {shapes}")
    if run.embeddings:
        unseen = np.sum(run.embeddings.counts[0] == 0)
        progress.say(f"initial embeddings: {config.embedding_init}; {counted(int(unseen), 'piece')} at random")
    if vocab_size != config.data.vocab_size:
        progress.say(f"the text's own vocabulary: {_describe(model_config(config, vocab_size))}")
