"""Published texts: downloads a text once, checks it, and writes the folder of text files that `folder_pairs` reads."""

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


MULTI30K = {  # our name: published name, bytes of the text, SHA-256 of the text
    "train.en": ("train.en.gz", 1_801_238, "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6"),
    "train.de": ("train.de.gz", 2_110_398, "2c2b73fd2b548fbcde3a875e0a78d6ee94d498bfdee6bd3eae3945779e9ddf72"),
    "valid.en": ("val.en.gz", 63_297, "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227"),
    "valid.de": ("val.de.gz", 75_981, "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660"),
    "test.en": ("test_2016_flickr.en.gz", 62_076, "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182"),
    "test.de": ("test_2016_flickr.de.gz", 70_649, "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16"),
}
TEXTS = {
    "multi30k": PublishedText(
        about="Multi30k (Elliott et al., 2016), English-German: 29,000 pairs to train on, 1,014 to validate, 1,000 to "
        "test (test_2016_flickr)",
        licence="for non-commercial research and education; see https://github.com/multi30k/dataset",
        url="https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/raw",
        files={name: PublishedFile(*file) for name, file in MULTI30K.items()},
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
        file, here = text.files[name], name in local
        place = str(local[name] if here else f"{text.url}/{file.remote}")
        if here:
            remedy = "move it away, and the same command downloads it"
        else:
            remedy = "nothing of it was kept; the same command tries again, and keeps the files that are there"
        try:
            with open(place, "rb") if here else urllib.request.urlopen(place, timeout=TIMEOUT) as raw:
                stream = gzip.GzipFile(fileobj=raw) if place.endswith(".gz") else raw
                content = stream.read(file.size + 1)  # a longer file, perhaps endless, is not the published one
        except DAMAGES as error:
            raise UserError(f"{place} is damaged or was cut short ({error}); {remedy}") from error
        except (OSError, http.client.HTTPException) as error:
            if here:
                raise
            missing = [file.remote for name, file in text.files.items() if not (folder / name).exists()]
            raise UserError(
                f"{text.url} could not be reached ({getattr(error, 'reason', error)})\n"
                f"Put these files into {folder} by hand, and run the same command again:"
                + "".join(f"\n  {text.url}/{remote}" for remote in missing)
            ) from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != file.sha256:
            raise UserError(
                f"{place} is not the published text: its SHA-256 is {digest} and not {file.sha256}; {remedy}"
            )
        if place != str(folder / name):
            write_whole(folder / name, content)
        done += file.size
        progress(done, total)
