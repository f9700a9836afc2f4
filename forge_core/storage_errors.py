"""Which failures of a store pass by themselves, and trying again until they have."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import aiohttp
import tenacity
from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError
from botocore.exceptions import ConnectionError as EndpointError

logger = logging.getLogger(__name__)

# Seconds. s3fs and botocore have retried each attempt several times already when it fails here.
GIVE_UP_AFTER = 60.0
FIRST_WAIT, LONGEST_WAIT = 0.25, 10.0

# Words of S3 (and of the servers that speak like it) for "later".
_TRANSIENT_CODES = frozenset(
    {
        "500", "502", "503", "504", "429", "InternalError", "ServiceUnavailable", "SlowDown", "Throttling",
        "ThrottlingException", "TooManyRequests", "RequestLimitExceeded", "RequestTimeout", "OperationAborted",
        "ConditionalRequestConflict", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch",
    }
)  # fmt: skip
_EXPIRED_CODES = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_TRANSIENT_ERRNOS = frozenset(
    {
        errno.EBUSY, errno.EREMOTEIO, errno.EAGAIN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED,
        errno.EPIPE, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ESTALE,
    }
)  # fmt: skip
# What another attempt would only meet again.
_PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_CONNECTION = (ConnectionError, TimeoutError, EndpointError, HTTPClientError, IncompleteReadError, aiohttp.ClientError)

T = TypeVar("T")


class StorageUnavailableError(OSError):
    """A store did not answer, or not with success, for as long as is waited for."""


def is_transient(error: BaseException) -> bool:
    """Whether the same operation may succeed a little later, judged by the error and by what caused it.

    Expired credentials count: whatever renews them (a file, an instance's role) may have done so by then.
    """
    if is_expired(error):
        return True
    for link in _causes(error):
        if isinstance(link, ClientError):
            # The server's own word counts for more than what s3fs has made of it.
            return _code(link) in _TRANSIENT_CODES
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
    or PermissionError for credentials, when GIVE_UP_AFTER seconds did not help; every other error at once.
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
        stop=tenacity.stop_after_delay(GIVE_UP_AFTER),
        before_sleep=before_sleep,
        reraise=True,
    )
    try:
        return retrying(attempt)
    except Exception as error:
        if not is_transient(error):
            raise
        words = f"{operation} of {uri} failed for {GIVE_UP_AFTER:.0f} s, at last with: {_reason(error)}"
        if is_expired(error):
            raise PermissionError(f"{words}; the credentials in the environment have expired, renew them") from error
        raise StorageUnavailableError(f"{words}; check that the store is up and reachable, then run again") from error


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
