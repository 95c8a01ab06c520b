"""Configuration section of the Batch API's S3-compatible storage."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from gateway.config.value_types import Secret, Section, setting

S3_SECRETS = ("access_key_id", "secret_access_key", "session_token")


def _storage_url(url: str) -> str:
    # Return the URL of a storage without a final slash. Raises ValueError.
    parts = urlsplit(url)
    try:
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if parts.scheme not in ("http", "https") or not has_host:
        raise ValueError("a storage URL must have the form https://host or http://host:9000")
    if parts.username is not None or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            "a storage URL must have only a scheme, a host and a port, as in http://host:9000"
        )
    return url.rstrip("/")


class BatchS3(Section):
    """A bucket of an S3-compatible storage for the Batch API. Several gateways may share it.

    The storage must support If-Match and If-None-Match on PutObject. Requires the extra `s3`.
    """

    bucket: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z][0-9A-Za-z._-]{2,254}$")] = (
        Field(description="Name of the S3 bucket, which must exist.")
    )
    prefix: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z._/-]{0,200}$")] = setting(
        "penstock",
        "Beginning of the keys of all objects. Gateways with the same bucket and prefix share "
        "files and batches; separate groups of gateways need different prefixes.",
    )
    endpoint_url: (
        Annotated[str, StringConstraints(max_length=2048), AfterValidator(_storage_url)] | None
    ) = setting(None, "URL of the storage, as in https://host:9000; by default that of AWS S3.")
    region: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z-]{1,64}$")] | None = setting(
        None, "Region of the bucket; by default AWS_DEFAULT_REGION or the files of AWS's tools."
    )
    path_style: Annotated[bool, Field(strict=True)] | None = setting(
        None,
        "Whether URLs contain the bucket in their path rather than in the host name. By default "
        "only where endpoint_url is set.",
    )
    access_key_id: Secret | None = setting(
        None,
        "Id of the access key, by reference: ${NAME} or ${file:/path}. Without it, credentials "
        "are found as by AWS's tools: in environment variables, files, or the identity of the pod "
        "or machine.",
    )
    secret_access_key: Secret | None = setting(
        None, "The secret access key that belongs to access_key_id, by reference."
    )
    session_token: Secret | None = setting(
        None, "Session token of temporary credentials, by reference."
    )

    @model_validator(mode="after")
    def _is_usable(self) -> BatchS3:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key must be given together")
        if self.session_token is not None and self.access_key_id is None:
            raise ValueError("session_token requires access_key_id and secret_access_key")
        if find_spec("botocore") is None:
            raise ValueError(
                "S3 needs the Python package botocore; install it with: pip install 'penstock[s3]'"
            )
        return self
