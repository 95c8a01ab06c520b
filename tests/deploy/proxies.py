"""Runs the proxies of deploy/proxies with addresses and certificates for tests."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from tests.ports import free_port

PROXIES = Path(__file__).parents[2] / "deploy" / "proxies"
SBIN = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
WITHIN_S = 10.0


def program(name: str) -> str:
    found = shutil.which(name, path=SBIN)
    assert found, f"{name} is not installed: run `make deploy-check`"
    return found


def certificate(folder: Path) -> None:
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=llm.example.com",
    ]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True, timeout=WITHIN_S)
    (folder / "both.pem").write_text(
        (folder / "cert.pem").read_text() + (folder / "key.pem").read_text()
    )


def changed(name: str, places: dict[str, str]) -> str:
    # Return the shipped configuration file `name` with these texts replaced.
    #
    # Each text must occur in it.
    text = (PROXIES / name).read_text()
    for old, new in places.items():
        assert old in text, f"{name} has no {old}"
        text = text.replace(old, new)
    return text


def nginx(folder: Path, port: int, api: int, admin: int) -> list[str]:
    places = {
        "listen 127.0.0.1:8443": f"listen 127.0.0.1:{port}",
        "server 127.0.0.1:8080;": f"server 127.0.0.1:{api};",
        "/etc/nginx/tls/llm.example.com.pem": str(folder / "cert.pem"),
        "/etc/nginx/tls/llm.example.com.key": str(folder / "key.pem"),
    }
    (folder / "penstock.conf").write_text(changed("nginx.conf", places))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    http = f"http {{ access_log off; {paths} include {folder}/penstock.conf; }}"
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid;\nevents {{}}\n{http}\n"
    )
    return [program("nginx"), "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def haproxy(folder: Path, port: int, api: int, admin: int) -> list[str]:
    places = {
        # A connection takes two file descriptors, of which there may be few here.
        "maxconn 20000": "maxconn 200",
        "bind 127.0.0.1:8443": f"bind 127.0.0.1:{port}",
        "gateway-1 127.0.0.1:8080": f"gateway-1 127.0.0.1:{api}",
        "check port 8081": f"check port {admin}",
        "/etc/haproxy/tls/llm.example.com.pem": str(folder / "both.pem"),
    }
    (folder / "haproxy.cfg").write_text(changed("haproxy.cfg", places))
    return [program("haproxy"), "-db", "-f", str(folder / "haproxy.cfg")]


KINDS = {"nginx": nginx, "haproxy": haproxy}


def open_to(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


@contextmanager
def proxy(kind: str, folder: Path, api: int, admin: int) -> Iterator[int]:
    # Run a proxy in front of a gateway with these API and admin ports; yield the proxy's port.
    certificate(folder)
    port = free_port()
    command = KINDS[kind](folder, port, api, admin)
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen(command, stdout=said, stderr=said) as process,
    ):
        try:
            ends = monotonic() + WITHIN_S
            while not open_to(port):
                assert process.poll() is None, (folder / "said").read_text()
                assert monotonic() < ends, f"{kind} did not listen in time"
                sleep(0.02)  # another process cannot signal this one
            yield port
        finally:
            process.terminate()
            process.wait(WITHIN_S)
