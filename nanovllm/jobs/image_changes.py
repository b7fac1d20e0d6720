"""Which images of a job that asks one thing of each have changed since it began. Its folder has a fingerprint of each.

An image whose line has failed may be replaced by a better one: there is no answer that would not fit it.
"""

from typing import NamedTuple

from nanovllm.jobs.fingerprint import Fingerprint, differences
from nanovllm.jobs.folder import IMAGES, JobFolder, json_rows
from nanovllm.jobs.inputs import hash_id
from nanovllm.utils.text_json import to_json

_MAX_NAMED = 3  # in a message


class ImageChanges(NamedTuple):
    """Attributes:
    names: of images that have changed, are new, or are gone.
    what: some of them, in words.
    have_failed: whether each of them is that of a line in the errors, and still there.
    """

    names: list[str]
    what: str
    have_failed: bool


def keep_images(folder: JobFolder, images: Fingerprint) -> None:
    """images: a fingerprint of each, by its name."""
    folder.write_lines(IMAGES, (to_json({"name": name, "fingerprint": now}) for name, now in images.items()))


def image_changes(folder: JobFolder, now: Fingerprint) -> ImageChanges | None:
    """now: as of keep_images. None if the folder has no fingerprints, as those of earlier versions. Raises ValueError
    if they are damaged."""
    path = folder.path / IMAGES
    if not path.exists():
        return None
    try:
        before = {row["name"]: row["fingerprint"] for _, row in json_rows(path)}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: is damaged: {error!r}") from None
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    first = names[:_MAX_NAMED]
    what = differences(*({name: each[name] for name in first if name in each} for each in (before, now)))
    if len(names) > len(first):
        what += f", and {len(names) - len(first)} more"
    failed = {hash_id(error["id"]) for error in folder.errors()}
    have_failed = all(name in before and name in now and hash_id(name) in failed for name in names)
    return ImageChanges(names, what, have_failed)
