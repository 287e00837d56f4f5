#!/bin/sh
# Installs NVIDIA's compiler from PyPI (requirements/cuda.txt) as a toolkit that CMake understands.
# Usage: tools/install_cuda.sh FOLDER [pip command]   -> FOLDER/toolkit/bin/nvcc
set -eu
folder=$1
shift
[ $# -gt 0 ] || set -- python3 -m pip
rm -rf "$folder"
"$@" --disable-pip-version-check install --quiet --no-deps --target "$folder" -r "$(dirname "$0")/../requirements/cuda.txt"
root=$(dirname "$(dirname "$(find "$folder/nvidia" -name nvcc -path '*/bin/nvcc')")")
# The packages lack two names of an installed toolkit: the folder that nvcc links from, and the one CMake looks for.
ln -sfn lib "$root/lib64"
ln -sfn libcudart.so.13 "$root/lib/libcudart.so"
ln -sfn "${root#"$folder"/}" "$folder/toolkit"
"$folder/toolkit/bin/nvcc" --version >/dev/null
