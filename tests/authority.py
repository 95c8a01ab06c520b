"""A certificate authority for tests, and its certificates as files. Each run makes its own."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

import trustme


class Files(NamedTuple):
    """Paths of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates into a folder.

    `ca` is the path of its own certificate. `same_as`: not another authority.
    """

    def __init__(self, folder: Path, same_as: Authority | None = None) -> None:
        self._ca = trustme.CA() if same_as is None else same_as._ca
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, file: str, *names: str, expired: bool = False) -> Files:
        """Write file.pem and file.key for these names, each by renaming, as a certificate manager
        does.

        The certificate's common name is `file`.
        """
        times = {}
        if expired:
            start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
            times = {"not_before": start, "not_after": start + datetime.timedelta(days=1)}
        issued = self._ca.issue_cert(*names, common_name=file, **times)  # type: ignore[arg-type]
        found = Files(self._folder / f"{file}.pem", self._folder / f"{file}.key")
        chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
        for path, text in ((found.certificate, chain), (found.key, issued.private_key_pem.bytes())):
            new = path.with_suffix(f"{path.suffix}.new")
            new.write_bytes(text)
            new.replace(path)
        return found
