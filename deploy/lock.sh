#!/bin/sh
# Write requirements.lock, requirements-dev.lock and requirements-compile.lock from pyproject.toml:
# lock.sh PYTHON. The locks list the hashes of every file of a release, so that they are valid on
# other machines. They contain no registry names and no paths.
set -eu
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$1" -m venv "$tools"
"$tools/bin/python" -m pip install -q pip-tools
options="--quiet --generate-hashes --strip-extras --allow-unsafe --no-header
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host"
# shellcheck disable=SC2086
"$tools/bin/pip-compile" $options --build-deps-for editable --extra demo --extra redis --extra events --extra s3 -o requirements.lock pyproject.toml
# shellcheck disable=SC2086
"$tools/bin/pip-compile" $options --build-deps-for editable --extra demo --extra redis --extra events --extra s3 --extra dev -o requirements-dev.lock pyproject.toml
# The compiler's packages only, in the versions of requirements-dev.lock; used with
# requirements.lock.
compilers='import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["compile"], sep="\n")'
# shellcheck disable=SC2086
"$1" -c "$compilers" | "$tools/bin/pip-compile" $options --no-annotate -c requirements-dev.lock -o requirements-compile.lock -
