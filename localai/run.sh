#!/usr/bin/env sh
# What LocalAI starts: --external-grpc-backends "mlx:/path/to/millrace/localai/run.sh".
# A link to this folder that is called mlx-vlm or mlx-distributed stands for that backend.
set -eu
case "$(basename "$(dirname "$0")")" in
  mlx-vlm | mlx-distributed) as=$(basename "$(dirname "$0")") ;;
  *) as=${MILLRACE_BACKEND_AS:-mlx} ;;
esac
# exec: LocalAI is then this process's parent, and its end is noticed.
if [ -n "${MILLRACE:-}" ]; then
  exec $MILLRACE backend --as "$as" "$@"
fi
own=$(cd -P "$(dirname "$0")/.." && pwd)/.venv/bin/millrace
if [ ! -x "$own" ]; then own=millrace; fi
exec "$own" backend --as "$as" "$@"
