#!/bin/sh
# Fails when an object file defines a weak function, or runs code when it is loaded: see tests/cpp/CMakeLists.txt.
set -eu
symbols=$(nm -C "$1")
[ -n "$symbols" ] || { echo "nm printed nothing for $1"; exit 1; }
if echo "$symbols" | grep -E ' [WVu] '; then
  echo "weak symbols in $1"
  exit 1
fi
if echo "$symbols" | grep '_GLOBAL__sub_I' || readelf -SW "$1" | grep '\.init_array'; then
  echo "$1 runs code before the processor is known"
  exit 1
fi
