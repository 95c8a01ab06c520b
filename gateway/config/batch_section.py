"""Configuration section of the Batch API: where it stores files, and its limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from gateway.config.s3_section import BatchS3
from gateway.config.value_types import Count, Duration, Name, Section, Size, setting
from gateway.config.yaml_source import number_if_substituted

MIN_LEASE_S = 1.0


class BatchApi(Section):
    """Settings of the Batch API: clients upload files of requests, which run in the background."""

    dir: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = setting(
        None,
        "Local folder for uploaded files, batches and results. It is created with access for the "
        "gateway's user only. A change takes effect at the next start.",
    )
    s3: BatchS3 | None = setting(
        None,
        "S3 bucket for uploaded files, batches and results, in place of `dir`; several gateways "
        "may share it. A change takes effect at the next start.",
    )
    slo: Name | None = setting(
        None,
        "Service class of batch requests; by default the class with the lowest weight.",
    )
    concurrency: Count = setting(
        64,
        "Maximum number of batch requests in progress per pool and gateway process.",
    )
    share: Annotated[float, Field(gt=0, le=1), BeforeValidator(number_if_substituted)] = setting(
        0.9,
        "Share of a pool's capacity (0 to 1) that batch requests and other requests may fill "
        "together. No batch request runs above it.",
    )
    reserve: Annotated[float, Field(ge=0, le=1), BeforeValidator(number_if_substituted)] = setting(
        0.25,
        "Share of a pool's capacity (0 to 1) that batches may take from other requests, once their "
        "completion windows could not be kept without it. 0: they only use what is free.",
    )
    window: Duration = setting(
        "7d",
        "Longest completion window that a batch may ask for. A batch with a longer one is refused.",
    )
    file_size: Size = setting("200MiB", "Maximum size of one uploaded file.")
    lines: Count = setting(50000, "Maximum number of requests in one batch.")
    storage: Size = setting(
        "10GiB", "Maximum size of all files of one tenant, results of batches included."
    )
    files: Count = setting(1000, "Maximum number of files of one tenant.")
    batches: Count = setting(100, "Maximum number of unfinished batches of one tenant.")
    expiry: Duration = setting(
        "30d",
        "Time after which an uploaded file or a finished batch is deleted, unless its upload sets "
        "another time.",
    )
    lease: Duration = setting(
        "30s",
        "Time after which another gateway process takes over the batches of one that hangs; at "
        "least 1s. With `dir`, the batches of a process that has exited are taken over within "
        "seconds. With `s3`, those of a killed process are taken over after this time.",
    )

    @model_validator(mode="after")
    def _has_one_storage(self) -> BatchApi:
        if (self.dir is None) == (self.s3 is None):
            raise ValueError("the Batch API needs exactly one storage; set either dir or s3")
        if self.lease < MIN_LEASE_S:
            raise ValueError(f"lease must be at least {MIN_LEASE_S:g}s, not {self.lease:g}s")
        return self
