"""What goes wrong between here and the hub, in octavo's words."""

from __future__ import annotations

import errno
from pathlib import Path

from octavo.errors import ModelError, ModelNotFoundError, WeightsError

_OWN_FAULTS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS,
    errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EIO,
)  # fmt: skip
"""Of the system's errors those that are about this machine's files, and not about the network."""


class HubUnreachableError(ModelNotFoundError):
    """The hub did not answer, or must not be asked (offline mode)."""


def translated(error: Exception, repo: str, revision: str | None, file: str | None) -> ModelError:
    """What went wrong between here and the hub, in octavo's words."""
    from huggingface_hub import errors

    what = f"{repo}/{file}" if file else repo
    cause = error.__cause__  # "not in the cache" is raised from what kept it from being fetched
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
        error = cause
    if isinstance(error, OSError) and error.errno in _OWN_FAULTS:
        return local_error(error, what)
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubUnreachableError(
            f"{what} is not in the cache and offline mode is on (HF_HUB_OFFLINE); unset it, or "
            "give a local folder or .gguf file"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{repo} has no revision {revision!r} (--revision)")
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return ModelNotFoundError(
            f"access to {what} is restricted (HTTP {status}): ask for access on its page at "
            f"{endpoint()}/{repo}, then set HF_TOKEN or run `hf auth login`"
        )
    if status == 401:
        return ModelNotFoundError(
            f"{what} does not exist on {endpoint()}, or is private and needs a token (HTTP 401): "
            "check the name, or set HF_TOKEN or run `hf auth login`"
        )
    if status == 404:
        return ModelNotFoundError(f"{what} does not exist on {endpoint()} (HTTP 404)")
    if status is not None:
        return HubUnreachableError(f"{endpoint()} answered HTTP {status} for {what}")
    if "onsistency check" in str(error):
        return WeightsError(f"{what} arrived cut short: {str(error).splitlines()[0]}; run it again")
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"{repo!r} is not a valid name: {error}")
    detail = str(error).splitlines()[0] if str(error) else type(error).__name__
    if file:
        return HubUnreachableError(
            f"{endpoint()} broke off while sending {what}: {detail}; run it again to go on"
        )
    return HubUnreachableError(
        f"{endpoint()} cannot be reached for {what}: {detail}; check the network, or give a local "
        "folder or .gguf file"
    )


def local_error(error: OSError, what: str) -> ModelError:
    """What this machine's own disk does not let be written."""
    return ModelError(
        f"{what} cannot be kept in {hub_cache()}: {error.strerror or error}; delete models there "
        "('octavo models rm'), or set HF_HOME to a folder with room that can be written to"
    )


def hub_cache() -> Path:
    """The folder of the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def endpoint() -> str:
    """Where the hub is."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)
