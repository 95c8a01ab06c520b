"""Run the proxies of deploy/proxies with the shipped configurations.

Only addresses, certificates and gateways are replaced.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

PROXIES = Path(__file__).parents[2] / "deploy" / "proxies"
SBIN = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
WITHIN_S = 10.0


def program(name: str) -> str:
    path = shutil.which(name, path=SBIN)
    assert path, f"{name} is not installed: run `make deploy-check`"
    return path


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def write_certificate(folder: Path) -> None:
    """Write cert.pem and key.pem to a folder, and both.pem with both for HAProxy."""
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


def replace_in_file(name: str, replacements: dict[str, str]) -> str:
    """Return the text of a shipped file with replacements, each of which must match."""
    text = (PROXIES / name).read_text()
    for old, new in replacements.items():
        assert old in text, f"{name} has no {old}"
        text = text.replace(old, new)
    return text


def nginx(folder: Path, port: int, api: int, admin: int) -> list[str]:
    replacements = {
        "listen 127.0.0.1:8443": f"listen 127.0.0.1:{port}",
        "server 127.0.0.1:8080;": f"server 127.0.0.1:{api};",
        "/etc/nginx/tls/llm.example.com.pem": str(folder / "cert.pem"),
        "/etc/nginx/tls/llm.example.com.key": str(folder / "key.pem"),
    }
    (folder / "penstock.conf").write_text(replace_in_file("nginx.conf", replacements))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    http = f"http {{ access_log off; {paths} include {folder}/penstock.conf; }}"
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid;\nevents {{}}\n{http}\n"
    )
    return [program("nginx"), "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]


def haproxy(folder: Path, port: int, api: int, admin: int) -> list[str]:
    replacements = {
        "maxconn 20000": "maxconn 200",  # within the machine's limit of file descriptors
        "bind 127.0.0.1:8443": f"bind 127.0.0.1:{port}",
        "gateway-1 127.0.0.1:8080": f"gateway-1 127.0.0.1:{api}",
        "check port 8081": f"check port {admin}",
        "/etc/haproxy/tls/llm.example.com.pem": str(folder / "both.pem"),
    }
    (folder / "haproxy.cfg").write_text(replace_in_file("haproxy.cfg", replacements))
    return [program("haproxy"), "-db", "-f", str(folder / "haproxy.cfg")]


KINDS = {"nginx": nginx, "haproxy": haproxy}


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


@contextmanager
def proxy(kind: str, folder: Path, api: int, admin: int) -> Iterator[int]:
    """Run a proxy of a gateway with these two ports while the block runs; yield its port."""
    write_certificate(folder)
    port = free_port()
    command = KINDS[kind](folder, port, api, admin)
    with (
        (folder / "output").open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        try:
            ends = monotonic() + WITHIN_S
            while not is_listening(port):
                assert process.poll() is None, (folder / "output").read_text()
                assert monotonic() < ends, f"{kind} did not listen in time"
                sleep(0.02)
            yield port
        finally:
            process.terminate()
            process.wait(WITHIN_S)
