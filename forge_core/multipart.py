"""Multipart uploads to S3 that were begun and never completed: invisible to every listing, and paid for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forge_core import storage


@dataclass(frozen=True)
class Upload:
    """An upload whose object does not exist."""

    uri: str
    upload_id: str
    num_bytes: int
    started: float  # seconds since the epoch, by the store's clock


def incomplete_uploads(uri: str) -> list[Upload]:
    """Those to objects below a prefix; none for a store that is not S3."""
    if not uri.startswith("s3://"):
        return []
    fs, bucket, key = _s3(uri)
    below: dict[str, Any] = {"Bucket": bucket} | ({"Prefix": f"{key}/"} if key else {})
    found, page = [], below
    while True:
        answer = fs.call_s3("list_multipart_uploads", **page)
        for upload in answer.get("Uploads", []):
            size = _num_bytes(fs, bucket, upload)
            started = upload["Initiated"].timestamp()
            found.append(Upload(f"s3://{bucket}/{upload['Key']}", upload["UploadId"], size, started))
        if not answer.get("IsTruncated"):
            return found
        page = below | {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def abort_upload(upload: Upload) -> None:
    """Free the parts of an upload; one that was completed or aborted meanwhile is no error."""
    fs, bucket, key = _s3(upload.uri)
    try:
        fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.upload_id)
    except FileNotFoundError:
        return


def _s3(uri: str) -> tuple[Any, str, str]:
    fs, path = storage.filesystem(uri)
    bucket, _, key = path.partition("/")
    return fs, bucket, key


def _num_bytes(fs: Any, bucket: str, upload: dict[str, Any]) -> int:
    # At most the first 1,000 parts: 50 GB in the parts s3fs makes.
    try:
        answer = fs.call_s3("list_parts", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except FileNotFoundError:
        return 0
    return sum(part["Size"] for part in answer.get("Parts", []))
