#!/bin/sh
# What the Dockerfile does, as a script of its own: docker-steps.sh SOURCE TARGET [BACKEND]
# makes an environment in TARGET that serves, from the checkout in SOURCE, with MLX's cpu, cuda12 or cuda13.
set -eu
source=$1
target=$2
backend=${3:-cpu}
hashes=$source/packaging/hashes
case $backend in
  cpu | cuda12 | cuda13) ;;
  *) echo "BACKEND is cpu, cuda12 or cuda13, not $backend" >&2; exit 2 ;;
esac
python3 -m venv "$target"
pip() { "$target/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }
pip install -q --require-hashes -r "$hashes/serve.txt"
pip install -q --require-hashes --no-deps -r "$hashes/vlm.txt" -r "$hashes/build.txt"
if [ "$backend" != cpu ]; then
  # After the others: MLX's CUDA and CPU packages bring the same library, and the last one is used.
  pip install -q --require-hashes -r "$hashes/serve.txt" -r "$hashes/$backend.txt"
fi
# Nothing more is fetched: what the wheel is built with is here, and so is all that it needs.
pip install -q --no-index --no-deps --no-build-isolation "$source"
PIP_NO_INDEX=1 "$target/bin/python" "$source/packaging/backend.py" "$backend"
"$target/bin/millrace" --version
