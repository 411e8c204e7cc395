#!/bin/sh
# check-base.sh DIGEST RELEASE ends well if DIGEST is one, or is empty and RELEASE is empty, too.
set -eu
digest=$1
release=$2
if [ -z "$digest" ]; then
  [ -z "$release" ] || { echo "a release is built from a base image with a digest (BASE_DIGEST)" >&2; exit 2; }
  exit 0
fi
hex=${digest#sha256:}
case $hex in *[!0-9a-f]*) hex= ;; esac
[ "sha256:$hex" = "$digest" ] && [ ${#hex} -eq 64 ] ||
  { echo "BASE_DIGEST is not sha256: and 64 hexadecimal digits" >&2; exit 2; }
