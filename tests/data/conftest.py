"""Translation sets of TFDS that are made here."""

import pytest


@pytest.fixture
def make_set(tmp_path, monkeypatch):
    """Prepares a set of these texts, and says in which folder it lies."""
    from tests.data.made_sets import MadeTranslate, read  # skips where TFDS is not installed

    def make(texts, folder="data"):
        monkeypatch.setattr(MadeTranslate, "texts", texts)
        read(tmp_path / folder, next(iter(texts)))
        return tmp_path / folder

    return make


@pytest.fixture(scope="session")
def made_set(tmp_path_factory):
    """The folder of a set that is prepared; not to be changed."""
    from tests.data.made_sets import read

    folder = tmp_path_factory.mktemp("tfds")
    read(folder)
    return folder
