"""Why the hub does not give a model, in one short line: its own texts have several hundred characters."""

import errno
from collections.abc import Iterator

from nanovllm.utils.checks import one_line

_OF_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_MOST_CHARACTERS = 120


def download_error(error: Exception, hub_id: str, asked: str) -> OSError:
    """What to raise for an error of huggingface_hub: FileNotFoundError, or OSError where the disk is the reason.

    asked: names the option and its value.
    """
    for each in _causes(error):
        if isinstance(each, OSError) and each.errno in _OF_DISK:
            return OSError(f"{asked} cannot be stored in {cache_folder()}: {each.strerror}")
    return FileNotFoundError(f"{asked} it cannot be downloaded: {_reason(error, hub_id)}")


def cache_folder() -> str:
    """Where the hub's files are kept."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _reason(error: Exception, hub_id: str) -> str:
    from huggingface_hub import constants, errors

    causes = list(_causes(error))

    def has(kind: type) -> bool:
        return any(isinstance(each, kind) for each in causes)

    if has(errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and {cache_folder()} does not have all of it: unset HF_HUB_OFFLINE"
    if has(errors.HFValidationError):
        return "a hub id is organization/name, of letters, digits, '-', '_' and '.'"
    if has(errors.GatedRepoError):
        return f"it is for those who agree to its terms: {constants.ENDPOINT}/{hub_id}, then `hf auth login`"
    if has(errors.RevisionNotFoundError):
        return "the model has no such revision"
    if has(errors.RepositoryNotFoundError):
        return "the hub has no such model, or it is private: check the name, or `hf auth login`"
    for each in causes:
        if isinstance(each, errors.HfHubHTTPError) and getattr(each, "response", None) is not None:
            status = each.response.status_code
            return f"the hub answers with status {status}: {'`hf auth login`' if status in (401, 403) else 'try later'}"
    if has(errors.LocalEntryNotFoundError) or any("Connect" in type(each).__name__ for each in causes):
        # The last cause is the network's own word.
        return f"{constants.ENDPOINT} cannot be reached ({_shortened(causes[-1])}): check the network"
    return _shortened(error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _shortened(error: BaseException) -> str:
    text = one_line(error)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
