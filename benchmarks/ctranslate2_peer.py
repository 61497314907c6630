"""CTranslate2's search, which `decode.py` measures, for a model written by `decoding/ctranslate2.py`."""

import os
import pathlib
from collections.abc import Callable

# OpenMP reads this when the library loads. Threads that spin while waiting make it many times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ctranslate2
import numpy as np

from transformer_flax.special_tokens import BEGIN_ID, END_ID, PAD_ID


def make_search(
    folder: pathlib.Path,
    source: np.ndarray,
    beam_size: int,
    length: int,
    *,
    threads: int,
    nbest: int = 1,
    on_gpu: bool = False,
) -> Callable[[], list[ctranslate2.TranslationResult]]:
    """Returns a search for outputs of exactly `length` tokens without the end symbol: in float32, on a GPU in float16.

    The pieces of the model's vocabulary are the ids as text. All outputs have one length, so scores are log P without a
    length penalty. Unlike ours, this P is normalised over the allowed tokens: padding, the begin symbol and the end
    symbol are masked before the softmax.
    """
    translator = ctranslate2.Translator(
        str(folder),
        "cuda" if on_gpu else "cpu",
        compute_type="float16" if on_gpu else "float32",
        inter_threads=1,
        intra_threads=threads,
        max_queued_batches=-1,
    )
    # The library adds the end symbol of a source.
    sentences = [[str(token) for token in row if token not in (PAD_ID, END_ID)] for row in source]

    def search():
        return translator.translate_batch(
            sentences,
            beam_size=beam_size,
            num_hypotheses=nbest,
            length_penalty=0,
            min_decoding_length=length,
            max_decoding_length=length,
            max_input_length=0,
            disable_unk=True,
            suppress_sequences=[[str(BEGIN_ID)]],
            return_scores=True,
        )

    return search
