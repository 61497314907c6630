import pytest

from tests.ablation.sweeping import CONFIG
from tests.training.small import write_text


@pytest.fixture(scope="module", autouse=True)
def quick_poll():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_flax.ablation.sweep.POLL", 0.05)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "text").mkdir()
    write_text(folder / "text")
    (folder / "config.py").write_text(CONFIG.format(text=str(folder / "text"), cache=str(folder / "cache")))
    return folder / "config.py"
