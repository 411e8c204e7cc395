#!/bin/sh
# What the Dockerfile does, as a script of its own: docker-steps.sh SOURCE TARGET [BACKEND]
# makes an environment in TARGET that serves, from the checkout in SOURCE, with MLX's cpu, cuda12 or cuda13.
set -eu
source=$1
target=$2
backend=${3:-cpu}
extras=vision,localai,smg
case $backend in
  cpu) ;;
  cuda12 | cuda13) extras=$extras,$backend ;;
  *) echo "BACKEND is cpu, cuda12 or cuda13, not $backend" >&2; exit 2 ;;
esac
python3 -m venv "$target"
pip() { "$target/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }
pip install -q -c "$source/constraints.txt" "$source[$extras]"
pip install -q -c "$source/constraints.txt" --no-deps mlx-vlm
"$target/bin/python" "$source/packaging/backend.py" "$backend"
"$target/bin/millrace" --version
