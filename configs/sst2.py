"""Classifies phrases of film reviews as positive or not: SST-2 (Socher et al., 2013), 60,614 training phrases.

    python train.py --config=configs/sst2.py --config.data.path=FOLDER

Three minutes on two cores; 80.7 % of the test split is classified correctly, the mean of three seeds
(docs/classification.md). The test split is GLUE's 872 development sentences.
FOLDER holds train.tsv, valid.tsv and test.tsv. Each line is 1 (positive) or 0, a tab and a phrase.
"""

from ml_collections import ConfigDict

from configs import classifier


def get_config() -> ConfigDict:
    config = classifier.get_config()
    config.name = "sst2"
    config.model.num_classes = 2
    config.steps = 6_000  # about 6 epochs
    config.data.update(held_out=0.0, max_length=80)
    config.eval.every = 1_000
    return config
