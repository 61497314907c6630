"""WMT14 as TFDS prepares it, for real but from small stand-in archives, and as it is read without TensorFlow."""

import functools
import gzip
import hashlib
import http.server
import importlib.util
import io
import json
import tarfile
import threading

import pytest

from tests.data.processes import read_without_tensorflow, run

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason='preparing WMT14 needs TensorFlow: pip install -e ".[wmt]"'
)

# Archives of WMT14 as they lie on its servers, but for a few lines in place of millions.
TRAINING = {
    "europarl": [("Resumption of the session", "Wiederaufnahme der Sitzung"), ("", "Leer"), ("R &amp; D", "F &amp; E")],
    "commoncrawl": [("&quot;Hello&quot;", "&quot;Hallo&quot;")],
    "news": [("Two  blanks", "Zwei Leerzeichen")],
    "un": [("United Nations", "Nations Unies")],
    "giga": [("A web page", "Une page web")],
}
NEWSTEST2013 = [("In 2013.", "2013."), ("Then &#93;", "Dann ]")]
NEWSTEST2014 = [("Orlando Bloom &amp; Miranda", "Orlando Bloom &amp; Miranda"), ("They part.", "Sie trennen sich.")]


def lines(pairs, side) -> bytes:
    return "".join(f"{pair[side]}\n" for pair in pairs).encode()


def sgm(pairs, side) -> bytes:
    """As newstest2014 is: the other test sets are plain text."""
    segments = "".join(f'<seg id="{i}">{pair[side]}</seg>\n' for i, pair in enumerate(pairs, 1))
    return f'<srcset setid="newstest2014">\n<doc docid="1">\n<p>\n{segments}</p>\n</doc>\n</srcset>\n'.encode()


def wmt14_files(language) -> dict[str, dict[str, bytes]]:
    """The files of each archive, by its URL."""

    def both(name, pairs, compress=lambda content: content):
        return {name.format(other): compress(lines(pairs, side)) for side, other in enumerate(("en", language))}

    dev = both("dev/newstest2013.{}", NEWSTEST2013)
    dev[f"dev/newstest2014-{language}en-src.{language}.sgm"] = sgm(NEWSTEST2014, 1)
    dev[f"dev/newstest2014-{language}en-ref.en.sgm"] = sgm(NEWSTEST2014, 0)
    pair = f"{language}-en"
    europarl = both(f"training/europarl-v7.{pair}.{{}}", TRAINING["europarl"])
    archives = {
        "www.statmt.org/wmt13/training-parallel-europarl-v7.tgz": europarl,
        "www.statmt.org/wmt13/training-parallel-commoncrawl.tgz": both(
            f"commoncrawl.{pair}.{{}}", TRAINING["commoncrawl"]
        ),
        "www.statmt.org/wmt14/training-parallel-nc-v9.tgz": both(
            f"training/news-commentary-v9.{pair}.{{}}", TRAINING["news"]
        ),
        "data.statmt.org/wmt19/translation-task/dev.tgz": dev,
    }
    if language == "fr":
        archives["www.statmt.org/wmt13/training-parallel-un.tgz"] = both("un/undoc.2000.fr-en.{}", TRAINING["un"])
        archives["www.statmt.org/wmt10/training-giga-fren.tar"] = both(
            "giga-fren.release2.fixed.{}.gz", TRAINING["giga"], gzip.compress
        )
    return archives


def write_archives(folder, language) -> dict[str, list]:
    """Writes the archives to `folder`/http:/<host>/<path>; returns size, checksum and name of each, by its URL."""
    infos = {}
    for url, files in wmt14_files(language).items():
        archive = folder / "http:" / url
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive, "w:gz" if archive.suffix == ".tgz" else "w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        content = archive.read_bytes()
        infos[f"http://{url}"] = [len(content), hashlib.sha256(content).hexdigest(), archive.name]
    return infos


@pytest.fixture
def proxy(tmp_path):
    """A proxy on loopback that has every URL in `tmp_path`/archives; yields its own, and the paths it was asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format, *arguments):
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=tmp_path / "archives")
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


PREPARE_WMT14 = """
import json, sys
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.translate import wmt14
from tests.data.make import data_config
from transformer_flax.data.sources import load_pairs

_, name, target_language, infos = sys.argv
# All of TFDS's WMT14 as it is, but for the checksums of the archives.
wmt14.Wmt14Translate.url_infos.update({url: UrlInfo(*info) for url, info in json.loads(infos).items()})
config = data_config(source="tfds", name=name, target_language=target_language)
print(json.dumps({split: load_pairs(config, split).fingerprint for split in ("train", "valid", "test")}))
"""


@pytest.mark.parametrize("language", ["de", "fr"])
def test_wmt14_is_prepared_from_its_archives_and_read_without_tensorflow(tmp_path, proxy, language):
    infos = write_archives(tmp_path / "archives", language)
    url, asked = proxy
    name, places = f"wmt14_translate/{language}-en", {"http_proxy": url, "TFDS_DATA_DIR": str(tmp_path / "data")}
    output = run(PREPARE_WMT14, name, language, json.dumps(infos), **places)
    prepared = json.loads(output.splitlines()[-1])
    assert sorted(asked) == sorted(infos)

    splits = read_without_tensorflow(tmp_path / "data", name, language)
    assert {split: fingerprint for split, (_, fingerprint) in splits.items()} == prepared
    pairs = {split: sorted(map(tuple, pairs)) for split, (pairs, _) in splits.items()}
    expected = {
        ("Resumption of the session", "Wiederaufnahme der Sitzung"),
        ("R & D", "F & E"),
        ('"Hello"', '"Hallo"'),
        ("Two blanks", "Zwei Leerzeichen"),
    }
    if language == "fr":
        expected |= {*TRAINING["un"], *TRAINING["giga"]}
    assert pairs["train"] == sorted(expected)
    assert pairs["valid"] == [("In 2013.", "2013."), ("Then ]", "Dann ]")]
    assert pairs["test"] == [("Orlando Bloom & Miranda",) * 2, ("They part.", "Sie trennen sich.")]


def test_wmt14_is_prepared_without_a_network_from_archives_put_there_by_hand(tmp_path):
    infos = write_archives(tmp_path / "archives", "de")
    by_hand = tmp_path / "data" / "downloads" / "manual"
    by_hand.mkdir(parents=True)
    for url, (*_, name) in infos.items():
        (tmp_path / "archives" / "http:" / url.removeprefix("http://")).rename(by_hand / name)
    places = {"http_proxy": "http://127.0.0.1:9", "TFDS_DATA_DIR": str(tmp_path / "data")}
    run(PREPARE_WMT14, "wmt14_translate/de-en", "de", json.dumps(infos), **places)
    assert len(read_without_tensorflow(tmp_path / "data", "wmt14_translate/de-en")["train"][0]) == 4
