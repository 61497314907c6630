"""Tokenizers that were trained here, kept beside the tokenised text for all runs on the same data."""

import contextlib
import hashlib
import json
import logging
import pathlib
import uuid
import zlib

import tokenizers

from transformer_flax.data.cache import cache_root
from transformer_flax.data.pairs import Pairs
from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError

TRAINING = "1"  # raise it when the same text and config would give another tokenizer

logger = logging.getLogger(__name__)


def find_tokenizer(pairs: Pairs, config, *, sources_only: bool = False) -> Tokenizer | None:
    """The tokenizer that was trained before on these pairs as `config.data` says; None if there is none."""
    key = _key(pairs, config, sources_only)
    for file in _folder(config).glob(f"{key}.*.json"):
        try:
            if file.name != _name(key, file.read_bytes()):
                raise UserError("it has changed since it was made")
            return Tokenizer.load(file)
        except (OSError, UserError) as error:
            logger.warning("the tokenizer in %s is damaged (%s) and is made anew", file, error)
            file.unlink(missing_ok=True)
    return None


def keep_tokenizer(tokenizer: Tokenizer, pairs: Pairs, config, *, sources_only: bool = False) -> None:
    """Makes it what `find_tokenizer` finds.

    Raises:
      UserError: the cache cannot be written.
    """
    content = tokenizer.to_json().encode()
    file = _folder(config) / _name(_key(pairs, config, sources_only), content)
    partial = file.with_name(f".{file.name}.partial.{uuid.uuid4().hex}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(file)
    except OSError as error:
        raise UserError(
            f"the tokenizer needs {len(content) / 1e6:,.1f} MB in {file.parent}, which cannot be written "
            f"({error.strerror}); make room there, or name another place with --config.data.cache_dir"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # it is in its place, or was never there
            partial.unlink()


def _folder(config) -> pathlib.Path:
    return cache_root(config.cache_dir) / "tokenizers"


def _key(pairs: Pairs, config, sources_only: bool) -> str:
    settings = [config.tokenizer, config.vocab_size, config.tokenizer_sample, config.seed]
    sides = ["sources"] if sources_only else []
    known = json.dumps([TRAINING, tokenizers.__version__, pairs.fingerprint, *settings, *sides])
    return hashlib.sha256(known.encode()).hexdigest()[:32]


def _name(key: str, content: bytes) -> str:
    """What a file of this content is called, which tells whether it is whole."""
    return f"{key}.{zlib.crc32(content):08x}.json"
