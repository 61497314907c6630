"""Published texts: downloads a text once, checks it, and writes the folder of text files that `folder_pairs` reads."""

import contextlib
import dataclasses
import gzip
import hashlib
import http.client
import pathlib
import urllib.request
from collections.abc import Callable, Mapping

from transformer_flax.data.text_files import DAMAGES
from transformer_flax.errors import UserError
from transformer_flax.files import write_whole

TIMEOUT = 30  # seconds to wait for an answer


@dataclasses.dataclass(frozen=True)
class PublishedFile:
    """A text file that is published as a gzip file."""

    remote: str  # the published name of the gzip file
    size: int  # bytes of the decompressed text
    sha256: str  # of the decompressed text, so it does not depend on the compression


@dataclasses.dataclass(frozen=True)
class PublishedText:
    """A set of published files, by their local names, and the URL of their folder."""

    about: str
    licence: str
    url: str  # of the folder with the files, at a fixed revision
    files: Mapping[str, PublishedFile]


TEXTS = {
    "multi30k": PublishedText(
        about="Multi30k (Elliott et al., 2016), English-German: 29,000 pairs to train on, 1,014 to validate, 1,000 to "
        "test (test_2016_flickr)",
        licence="for non-commercial research and education; see https://github.com/multi30k/dataset",
        url="https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw",
        files={
            "train.en": PublishedFile(
                "train.en.gz", 1_801_238, "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6"
            ),
            "train.de": PublishedFile(
                "train.de.gz", 2_110_398, "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72"
            ),
            "valid.en": PublishedFile(
                "val.en.gz", 63_297, "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227"
            ),
            "valid.de": PublishedFile(
                "val.de.gz", 75_981, "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660"
            ),
            "test.en": PublishedFile(
                "test_2016_flickr.en.gz", 62_076, "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182"
            ),
            "test.de": PublishedFile(
                "test_2016_flickr.de.gz", 70_649, "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16"
            ),
        },
    ),
}


def fetch(text: PublishedText, folder: pathlib.Path, progress: Callable[[int, int], object]) -> None:
    """Fills a folder with a published text. Existing files are checked and kept.

    If the user has put a compressed file into the folder under its published name, the file is read from there instead
    of downloaded. `progress` is called with (bytes of text done, all bytes).
    """
    folder.mkdir(parents=True, exist_ok=True)
    total, done = sum(file.size for file in text.files.values()), 0
    local = {
        name: place
        for name, file in text.files.items()
        for place in (folder / file.remote, folder / name)
        if place.exists()
    }
    # Files to download come last. So an error message about the network lists every missing file, and no other.
    for name in sorted(text.files, key=lambda name: name not in local):
        file, ours = text.files[name], folder / name
        place = local.get(name, f"{text.url}/{file.remote}")
        try:
            with _open(place) as stream:
                content = stream.read(file.size + 1)  # a longer file, perhaps endless, is not the published one
        except DAMAGES as error:
            raise UserError(f"{place} is damaged or was cut short ({error}); {_remedy(place)}") from error
        except (OSError, http.client.HTTPException) as error:
            if place in local.values():
                raise
            raise UserError(_unreachable(text, folder, error)) from error
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise UserError(
                f"{place} is not the published text: its SHA-256 is {hashlib.sha256(content).hexdigest()} and not "
                f"{file.sha256}; {_remedy(place)}"
            )
        if place != ours:
            write_whole(ours, content)
        done += file.size
        progress(done, total)


@contextlib.contextmanager
def _open(place: pathlib.Path | str):
    """Opens a local file or a URL; decompresses the content if the name ends in .gz."""
    opened = urllib.request.urlopen(place, timeout=TIMEOUT) if isinstance(place, str) else place.open("rb")
    with opened as raw:
        yield gzip.GzipFile(fileobj=raw) if str(place).endswith(".gz") else raw


def _remedy(place: pathlib.Path | str) -> str:
    """Returns the advice for a bad local or downloaded file."""
    if isinstance(place, str):
        return "nothing of it was kept; the same command tries again, and keeps the files that are there"
    return "move it away, and the same command downloads it"


def _unreachable(text: PublishedText, folder: pathlib.Path, error: Exception) -> str:
    """Returns the message for an unreachable network. It lists the files to download by hand, and their folder."""
    urls = [f"  {text.url}/{file.remote}" for name, file in text.files.items() if not (folder / name).exists()]
    return "\n".join(
        [
            f"{text.url} could not be reached ({getattr(error, 'reason', error)})",
            f"Put these files into {folder} by hand, and run the same command again:",
            *urls,
        ]
    )
