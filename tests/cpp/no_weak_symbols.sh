#!/bin/sh
# Fails when an object file defines a weak function: see tests/cpp/CMakeLists.txt.
set -eu
symbols=$(nm -C "$1")
[ -n "$symbols" ] || { echo "nm printed nothing for $1"; exit 1; }
if echo "$symbols" | grep -E ' [WVu] '; then
  echo "weak symbols in $1"
  exit 1
fi
