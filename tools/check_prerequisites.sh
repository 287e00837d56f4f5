#!/bin/sh
# Says which Debian packages are missing, and exits with 2, or prints nothing.
# Usage: tools/check_prerequisites.sh [test]
set -eu
missing=""
need() { missing="$missing $1"; }

command -v g++ >/dev/null || need g++
command -v git >/dev/null || need git
python=${PYTHON:-python3}
if command -v "$python" >/dev/null; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "snack: Python 3.10 or later is needed, $python is $("$python" --version)." >&2; exit 2; }
  "$python" -c 'import venv, ensurepip' 2>/dev/null || need python3-venv
else
  need "python3 python3-venv"
fi
[ -e /usr/include/hwy/highway.h ] || [ -e third_party/highway/hwy/highway.h ] || need libhwy-dev
if [ "${1:-}" = test ]; then
  command -v nm >/dev/null || need binutils
  [ -e /usr/include/gtest/gtest.h ] || need libgtest-dev
  command -v pkg-config >/dev/null || need pkg-config
  command -v gzip >/dev/null || need gzip
  [ -e /usr/include/zlib.h ] || need zlib1g-dev
fi
[ -z "$missing" ] || { echo "snack: missing Debian packages; install them with: apt-get install$missing" >&2; exit 2; }
