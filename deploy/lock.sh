#!/bin/sh
# Writes requirements.lock, requirements-dev.lock and requirements-compile.lock from pyproject.toml: lock.sh PYTHON. Hashes of
# every file of a release are listed, so that the locks hold on other machines; names of registries and paths are left out.
set -eu
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$1" -m venv "$tools"
"$tools/bin/python" -m pip install -q pip-tools
options="--quiet --generate-hashes --strip-extras --allow-unsafe --no-header
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host"
# shellcheck disable=SC2086
"$tools/bin/pip-compile" $options --build-deps-for editable -o requirements.lock pyproject.toml
# shellcheck disable=SC2086
"$tools/bin/pip-compile" $options --build-deps-for editable --extra dev -o requirements-dev.lock pyproject.toml
# What compiles, and nothing else: it is installed beside requirements.lock, in the version that developers have.
compilers='import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["compile"], sep="\n")'
# shellcheck disable=SC2086
"$1" -c "$compilers" | "$tools/bin/pip-compile" $options --no-annotate -c requirements-dev.lock -o requirements-compile.lock -
