#!/bin/sh
# Writes requirements.lock, requirements-compile.lock and requirements-dev.lock from pyproject.toml: lock.sh PYTHON. Hashes of
# every file of a release are listed, so that the locks hold on other machines; names of registries and paths are left out.
set -eu
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$1" -m venv "$tools"
"$tools/bin/python" -m pip install -q pip-tools
options="--quiet --generate-hashes --strip-extras --allow-unsafe --build-deps-for editable --no-header
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host"
# shellcheck disable=SC2086
"$tools/bin/pip-compile" $options -o requirements.lock pyproject.toml
# shellcheck disable=SC2086
"$tools/bin/pip-compile" $options --extra compile -o requirements-compile.lock pyproject.toml
# shellcheck disable=SC2086
"$tools/bin/pip-compile" $options --extra dev -o requirements-dev.lock pyproject.toml
