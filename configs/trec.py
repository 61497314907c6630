"""Classifies questions by what they ask for, in 6 classes: TREC (Li and Roth, 2002), 5,452 training questions.

    python train.py --config=configs/trec.py --config.data.path=FOLDER

One and a half to three minutes of a core; 88.1 % of the 500 test questions are classified correctly, the mean of three
seeds (docs/classification.md).
FOLDER holds train.tsv and test.tsv. Each line is a coarse class, a tab, a fine class, a tab and a question.
"""

from ml_collections import ConfigDict

from configs import classifier


def get_config() -> ConfigDict:
    config = classifier.get_config()
    config.name = "trec"
    config.model.num_classes = 6
    config.steps = 1_000  # about 14 epochs
    config.data.update(text_column=2, max_length=64, held_out=0.05)  # there are few training questions
    return config
