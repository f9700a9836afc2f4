"""Which failures of a store pass by themselves, and trying again until they have."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import aiohttp
import tenacity
from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as EndpointError
from botocore.parsers import ResponseParserError

logger = logging.getLogger(__name__)

# Seconds.
GIVE_UP_AFTER = 60.0
FIRST_WAIT, LONGEST_WAIT = 0.25, 10.0
MIN_TRIES = 4  # also past GIVE_UP_AFTER: one try of a big file may take longer than that, and then meet one 503

# Words of S3 (and of the servers that speak like it) for "later".
_TRANSIENT_CODES = frozenset(
    {
        "InternalError", "InternalFailure", "ServiceUnavailable", "SlowDown", "SlowDownRead", "SlowDownWrite",
        "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "RequestThrottledException",
        "TooManyRequests", "TooManyRequestsException", "RequestLimitExceeded", "BandwidthLimitExceeded",
        "RequestTimeout", "RequestTimeoutException", "OperationAborted", "ConditionalRequestConflict",
        "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch",
        # The store lost a part of an upload, or the answer to its completion got lost: the next attempt sends it all.
        "InvalidPart", "EntityTooSmall", "NoSuchUpload",
    }
)  # fmt: skip
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_TRANSIENT_ERRNOS = frozenset(
    {
        errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.EAGAIN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
        errno.EPIPE, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ESTALE,
    }
)  # fmt: skip
# What another attempt would only meet again.
_PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_CONNECTION = (
    ConnectionError,
    TimeoutError,
    EndpointError,
    HTTPClientError,
    IncompleteReadError,
    ResponseParserError,  # a proxy that sheds load answers in HTML
    aiohttp.ClientConnectionError,
    aiohttp.ClientPayloadError,
)
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

T = TypeVar("T")


class StorageUnavailableError(OSError):
    """A store did not answer, or not with success, for as long as is waited for."""


def is_transient(error: BaseException) -> bool:
    """Whether the same operation may succeed a little later, judged by the error and by what caused it.

    Expired credentials count: whatever renews them (a file, an instance's role) may have done so by then.
    """
    if isinstance(error, StorageUnavailableError):  # has been waited for
        return False
    if is_expired(error):
        return True
    for link in _causes(error):
        if isinstance(link, ClientError):
            # The server's own word counts for more than what s3fs has made of it.
            status = link.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = _code(link)
            return code in _TRANSIENT_CODES or status in _TRANSIENT_STATUS or code in map(str, _TRANSIENT_STATUS)
        if isinstance(link, aiohttp.ClientResponseError):
            return link.status in _TRANSIENT_STATUS
    for link in _causes(error):
        if isinstance(link, _PERMANENT):
            return False
        if isinstance(link, _CONNECTION):
            return True
        if isinstance(link, OSError) and link.errno in _TRANSIENT_ERRNOS:
            return True
    return False


def is_expired(error: BaseException) -> bool:
    """Whether the store says that the credentials were good once."""
    return any(isinstance(link, ClientError) and _code(link) in _EXPIRED_CODES for link in _causes(error))


def persist(operation: str, uri: str, attempt: Callable[[], T], *, on_expired: Callable[[], None]) -> T:
    """The result of `attempt`, called again with growing, jittered waits while its failures are transient.

    `on_expired` is called before another attempt with credentials that have expired. Raises StorageUnavailableError,
    or PermissionError for credentials, when GIVE_UP_AFTER seconds and MIN_TRIES attempts did not help; every other
    error at once.
    """

    def before_sleep(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        error = state.outcome.exception()
        assert error is not None
        logger.warning("%s of %s failed, trying again: %s", operation, uri, _reason(error))
        if is_expired(error):
            on_expired()

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        wait=tenacity.wait_random_exponential(multiplier=FIRST_WAIT, max=LONGEST_WAIT),
        stop=tenacity.stop_all(tenacity.stop_before_delay(GIVE_UP_AFTER), tenacity.stop_after_attempt(MIN_TRIES)),
        before_sleep=before_sleep,
        reraise=True,
    )
    try:
        return retrying(attempt)
    except Exception as error:
        if not is_transient(error):
            raise
        tries = retrying.statistics["attempt_number"]
        words = f"{operation} of {uri} failed {tries} times, at last with: {_reason(error)}"
        if is_expired(error):
            raise PermissionError(f"{words}; the credentials in the environment have expired, renew them") from error
        raise StorageUnavailableError(f"{words}; check that the store is up and reachable, then run again") from error


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Removes what was written at `path` when writing fails, and makes "no space left" say where and what to do."""
    try:
        yield
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in _DISK_FULL:
            raise
        remedy = "no space left; free space or set TMPDIR / root elsewhere"
        raise OSError(error.errno, remedy, str(path)) from error


def server_code(error: BaseException) -> str | None:
    """The error code that the S3 server answered with, None when there was no such answer."""
    return next((_code(link) for link in _causes(error) if isinstance(link, ClientError)), None)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__
