"""Tests of the OCI image, unpacked and run like a container: its user, read-only, no privileges.

`make test-image` builds it. It needs root and umoci, but no container runtime.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.demo_process import started_demo

ROOT = Path(__file__).parents[2]
ARCHIVE = Path(os.environ.get("PENSTOCK_IMAGE", ROOT / "build" / "image" / "penstock.tar"))
MOST_BYTES = 120_000_000
pytestmark = pytest.mark.skipif(
    not (ARCHIVE.is_file() and os.geteuid() == 0 and shutil.which("umoci")),
    reason="needs root, umoci and the image of `make image`",
)


class Image:
    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        self.root = root
        self.config = config

    def command(self, *arguments: str) -> list[str]:
        # Return the command that runs a program in the image as its user, without privileges.
        #
        # It has its own mount and process namespaces. The root file system is read-only, except for
        # the two places that a deployment mounts for writing.
        uid, gid = self.config["User"].split(":")
        inside = shlex.join(["env", "-i", *self.config["Env"], *arguments])
        folder = self.config["WorkingDir"]
        mounts = [
            f"mount --bind {self.root} {self.root}",
            f"mount -o remount,bind,ro {self.root}",
            f"mount -t tmpfs -o mode=1777 tmpfs {self.root}/tmp",
            f"mount -t tmpfs -o uid={uid},gid={gid},mode=0700 tmpfs {self.root}/var/lib/penstock",
            f"mount -t proc proc {self.root}/proc",
            f"mount --rbind /dev {self.root}/dev",
        ]
        enter = (
            f"exec chroot --userspec={uid}:{gid} --groups= {self.root} "
            f"setpriv --no-new-privs sh -c {shlex.quote(f'cd {folder} && exec {inside}')}"
        )
        script = " && ".join([*mounts, enter])
        return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    work = tmp_path_factory.mktemp("image")
    layout = work / "layout"
    layout.mkdir()
    # tarfile cannot extract safely before Python 3.11.4.
    subprocess.run(["tar", "-xf", ARCHIVE, "-C", layout], check=True)
    index = json.loads((layout / "index.json").read_text())
    (manifest,) = index["manifests"]
    manifest["annotations"] = {"org.opencontainers.image.ref.name": "test"}
    (layout / "index.json").write_text(json.dumps(index))

    def blob(descriptor: dict[str, Any]) -> Any:
        return json.loads((layout / "blobs" / descriptor["digest"].replace(":", "/")).read_text())

    config = blob(blob(manifest)["config"])["config"]
    bundle = work / "bundle"
    subprocess.run(["umoci", "unpack", "--image", f"{layout}:test", bundle], check=True)
    return Image(bundle / "rootfs", config)


def test_the_image_is_small() -> None:
    assert ARCHIVE.stat().st_size <= MOST_BYTES


def test_it_runs_the_compiled_gateway(image: Image) -> None:
    result = image.run("penstock", "version", "--json")
    assert json.loads(result.stdout)["compiled"] is True, result.stderr


def test_its_user_is_not_root_and_its_root_file_system_is_read_only(image: Image) -> None:
    assert image.config["User"] == "10001:10001"
    program = (
        "import os; assert os.getuid() == os.getgid() == 10001 and os.getgroups() == []; "
        "open('/var/lib/penstock/file', 'w'); open('/etc/penstock/file', 'w')"
    )
    result = image.run("python", "-c", program)
    assert re.search(r"OSError: .*Read-only file system: '/etc/penstock/file'", result.stderr)


def test_its_command_serves_a_configuration_from_its_place(image: Image) -> None:
    command = [*image.config["Entrypoint"], *image.config["Cmd"]]
    assert command == ["penstock", "serve", "--config", "/etc/penstock/gateway.yaml"]
    result = image.run(*command)  # nothing is mounted there
    assert result.returncode == 1
    assert "/etc/penstock/gateway.yaml" in result.stderr


def test_a_demo_answers(image: Image) -> None:
    with started_demo(image.command) as demo:
        assert "compiled" in demo.output
        assert demo.ask()
