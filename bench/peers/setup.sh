#!/usr/bin/env bash
# Create .venv-peers, the environment of the research packages that the benches compare with.
#
#   bash bench/peers/setup.sh           (or: make peers)
#
#   PYTHON=...  the Python to create it with; the published numbers were measured with 3.11
#
# The environment is separate because the packages have many dependencies that Tessera does not need.
# It takes about 2 GB with a CPU build of torch. A second call does nothing unless the requirements
# have changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec </dev/null  # pip must not wait for an answer

python=${PYTHON:-python3.11}
environment=.venv-peers
stamp=$environment/.stamp
log=$environment/install.log
requirements=bench/peers/requirements.txt

if [[ -e $stamp && $stamp -nt $requirements && $stamp -nt constraints.txt ]]; then
    echo "$environment is up to date."
    exit 0
fi
if ! version=$("$python" --version 2>&1); then
    echo "$python does not run, and $environment needs Python 3.11 or newer." \
        "Install it, or set PYTHON to an interpreter." >&2
    exit 1
fi

install() {
    "$environment/bin/python" -m pip install --disable-pip-version-check --no-input \
        --constraint constraints.txt "$@" >>"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        echo "The set-up of $environment failed; the whole log is in $log." >&2
        exit 1
    }
}

echo "Creating $environment with $version: a few minutes, once. The log is $log."
rm -f "$stamp"
"$python" -m venv "$environment"
: >"$log"
install torch
install --no-deps --requirement "$requirements"

# A torchaudio that was built for CUDA does not load its native library beside a CPU build of torch.
# Its transforms are written in Python and work without the library.
native=$("$environment/bin/python" -c '
import importlib.util
import pathlib

print(pathlib.Path(importlib.util.find_spec("torchaudio").origin).parent / "lib")')
if [[ -d $native ]] && ! "$environment/bin/python" -c 'import torchaudio' 2>>"$log"; then
    mv "$native" "$native.disabled"
fi

if ! PYTHONPATH=bench "$environment/bin/python" -m peers.shims 2>>"$log"; then
    tail -n 20 "$log" >&2
    echo "The packages are installed in $environment but do not import; the whole log is in $log." >&2
    exit 1
fi
touch "$stamp"
