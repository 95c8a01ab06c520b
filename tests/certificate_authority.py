"""A certificate authority for tests, which issues certificates as files."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

import trustme


class Files(NamedTuple):
    certificate: Path
    key: Path


class Authority:
    """A certificate authority for tests, which issues certificates as files in a folder.

    ca       path of the authority's own certificate
    same_as  another authority whose key is used instead of a new one
    """

    def __init__(self, folder: Path, same_as: Authority | None = None) -> None:
        self._ca = trustme.CA() if same_as is None else same_as._ca
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, file: str, *names: str, expired: bool = False) -> Files:
        # Write a certificate for these host names to file.pem, and its key to file.key.
        #
        # Each file is replaced by renaming, as certificate managers do. The common name is `file`.
        # `expired` makes the certificate invalid.
        times = {}
        if expired:
            start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
            times = {"not_before": start, "not_after": start + datetime.timedelta(days=1)}
        issued = self._ca.issue_cert(*names, common_name=file, **times)  # type: ignore[arg-type]
        files = Files(self._folder / f"{file}.pem", self._folder / f"{file}.key")
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        for path, text in ((files.certificate, chain), (files.key, issued.private_key_pem.bytes())):
            new = path.with_suffix(f"{path.suffix}.new")
            new.write_bytes(text)
            new.replace(path)
        return files
