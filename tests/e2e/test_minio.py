"""The MinIO fixture is a real server: what is put into a bucket comes back, elsewhere too."""

from __future__ import annotations

import subprocess
import sys

import boto3

LIST = """
import boto3, os, sys
s3 = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
print(*(found["Key"] for found in s3.list_objects_v2(Bucket=sys.argv[1])["Contents"]))
"""


def test_a_subprocess_sees_what_was_put_into_the_bucket(minio: str, bucket: str) -> None:
    s3 = boto3.client("s3", endpoint_url=minio)
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)
    s3.put_object(Bucket=bucket, Key="a/b", Body=b"bytes")
    assert s3.get_object(Bucket=bucket, Key="a/b")["Body"].read() == b"bytes"
    seen = subprocess.run([sys.executable, "-c", LIST, bucket], capture_output=True, text=True)
    assert seen.stdout.split() == ["a/b"]
