"""Starts a model's embeddings from word vectors that were trained before."""

import pathlib
from typing import Any

from ml_collections import ConfigDict

from transformer_flax.data.tokenizer import Tokenizer
from transformer_flax.errors import UserError
from transformer_flax.relatives.embeddings import TOKENIZER, Vectors

EMBEDDINGS = ("embedding", "source_embedding", "target_embedding")  # of words, in models of all kinds


def load_embeddings(config: ConfigDict, tokenizer: Tokenizer | None) -> Vectors | None:
    """The word vectors that `config.embedding_init` names; None if it names none.

    Args:
      config: of the run.
      tokenizer: that the config names a file of, if it does.

    Raises:
      UserError: they cannot be read, or are of another tokenizer or size than the run's.
    """
    if not config.embedding_init:
        return None
    folder = pathlib.Path(config.embedding_init)
    vectors = Vectors.load(folder)
    if tokenizer is None or tokenizer.to_json() != vectors.tokenizer.to_json():
        now = f"is {config.data.tokenizer_file}, another" if tokenizer else "is to be trained, and would be another"
        raise UserError(
            f"config.embedding_init is {config.embedding_init}, whose vectors are of the pieces of its own tokenizer; "
            f"the run's {now}: set --config.data.tokenizer_file={folder / TOKENIZER} "
            f"--config.data.vocab_size={vectors.tokenizer.vocab_size}"
        )
    d_model = vectors.vectors.shape[1]
    if d_model != config.model.d_model:
        raise UserError(
            f"config.model.d_model is {config.model.d_model}, and the vectors of config.embedding_init "
            f"{config.embedding_init} have {d_model} entries; change the one, or train vectors with "
            f"--config.vectors.d_model={config.model.d_model}"
        )
    return vectors


def with_embeddings(params: Any, vectors: Vectors | None) -> Any:
    """Fresh parameters of a model, of which the embeddings of words are these vectors; None: as they are.

    A matrix for the logits alone, where embeddings are not tied, stays as it is: it is no embedding of words.
    """
    if vectors is None:
        return params
    return params | {name: {**params[name], "embedding": vectors.vectors} for name in EMBEDDINGS if name in params}
