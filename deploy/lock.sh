#!/bin/sh
# Write requirements.lock, requirements-dev.lock and requirements-compile.lock from the requirements
# of penstock and penstock-kv: lock.sh PYTHON. The locks list the hashes of every file of a release,
# so that they are valid on other machines. They contain no registry names and no paths.
set -eu
python=$1
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$python" -m venv "$tools"
"$tools/bin/python" -m pip install -q pip-tools

# Print what both projects need, with these extras of penstock, except each other.
requirements() {
    "$python" - "$@" <<'PROGRAM'
import sys
import tomllib

for path in ("pyproject.toml", "kvtransfer/pyproject.toml"):
    with open(path, "rb") as file:
        data = tomllib.load(file)
    project = data["project"]
    extras = project["optional-dependencies"] if project["name"] == "penstock" else {}
    wanted = [line for extra in sys.argv[1:] for line in extras.get(extra, ())]
    for line in (*data["build-system"]["requires"], *project["dependencies"], *wanted):
        if not line.startswith("penstock-kv"):
            print(line)
PROGRAM
}

# Write a lock of the requirements on standard input: lock FILE OPTION...
lock() {
    file=$1
    shift
    "$tools/bin/pip-compile" --quiet --generate-hashes --strip-extras --allow-unsafe --no-header \
        --no-emit-index-url --no-emit-find-links --no-emit-trusted-host "$@" -o "$file" -
}

requirements demo redis events s3 | lock requirements.lock
requirements demo redis events s3 dev | lock requirements-dev.lock
# The compiler's packages only, in the versions of requirements-dev.lock; used with
# requirements.lock.
compilers='import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["compile"], sep="\n")'
"$python" -c "$compilers" | lock requirements-compile.lock --no-annotate -c requirements-dev.lock
