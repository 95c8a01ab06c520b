#!/bin/sh
# Install the clients of `make clients` into a folder: Python environments and npm packages.
#
#     sh bench/clients/install.sh PYTHON FOLDER
#
# Clients whose requirements contradict each other have environments of their own. OpenHands needs
# Python 3.12; it is left out where none is found. A folder that is complete is not touched.
set -eu
python=$1
folder=$2
here=$(cd "$(dirname "$0")" && pwd)
[ -f "$folder/.complete-$(cksum < "$here/install.sh" | cut -d' ' -f1)" ] && exit 0
mkdir -p "$folder/node"

environment() { # NAME PYTHON PACKAGE...
    name=$1 version=$2
    shift 2
    [ -x "$folder/$name/bin/python" ] || "$version" -m venv "$folder/$name"
    "$folder/$name/bin/python" -m pip install -q --upgrade "$@"
}

echo "Installing the clients into $folder (2.5 GB, once)"
environment python "$python" openai anthropic openai-agents "pydantic-ai-slim[openai,anthropic]" \
    langchain-openai langchain-anthropic litellm
environment llama-index "$python" "llama-index-core>=0.14" "llama-index-llms-openai>=0.8" \
    "llama-index-llms-openai-like>=0.8" llama-index-llms-anthropic "anthropic<1"
newer=$(for each in python3.13 python3.12 "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; do
    command -v $each >/dev/null && $each -c '' 2>/dev/null && echo $each && break
done || true)
if [ -n "$newer" ]; then
    environment openhands "$newer" openhands-sdk openhands-tools
else
    echo "OpenHands is left out: it needs Python 3.12"
fi
npm install --silent --no-audit --no-fund --prefix "$folder/node" \
    openai @anthropic-ai/sdk ai @ai-sdk/openai @ai-sdk/anthropic @ai-sdk/openai-compatible \
    @openai/agents @langchain/openai zod @openai/codex @anthropic-ai/claude-code opencode-ai
# npm runs no scripts of packages by default; these two put the agents' programs in place.
(cd "$folder/node/node_modules/@anthropic-ai/claude-code" && node install.cjs >/dev/null)
(cd "$folder/node/node_modules/opencode-ai" && node postinstall.mjs >/dev/null)
rm -f "$folder"/.complete-*
touch "$folder/.complete-$(cksum < "$here/install.sh" | cut -d' ' -f1)"
