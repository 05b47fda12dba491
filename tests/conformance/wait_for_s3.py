"""Waits until an S3 server that was just started lists its buckets; fails after a minute.

Run as a program: `wait_for_s3.py ENDPOINT ACCESS_KEY SECRET_KEY`.
"""

from __future__ import annotations

import sys

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from deltastore.clock import SystemClock

WITHIN_S = 60.0


def main(endpoint: str, access_key: str, secret_key: str) -> None:
    """Ask until it answers."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}),
    )
    clock = SystemClock()
    until_s = clock.monotonic_s() + WITHIN_S
    while True:
        try:
            client.list_buckets()
        except (ClientError, BotoCoreError) as err:
            if clock.monotonic_s() > until_s:
                sys.exit(f"{endpoint} does not answer: {err}")
            clock.sleep_s(0.1)
        else:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
