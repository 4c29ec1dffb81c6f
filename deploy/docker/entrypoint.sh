#!/bin/sh
# Runs `baton` with a Triton cache that begins with the module that was compiled with the image (build_triton_driver.py): it holds
# the rest of what this container compiles, so it cannot be the image's own. Without a place for it only GPUs are missed.
set -eu
cache="${TRITON_CACHE_DIR:-$HOME/.triton/cache}"
if mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ]; then
    cp -Rn /opt/baton/triton/. "$cache/"
fi
exec baton "$@"
