#!/bin/sh
# Installs the C++ package from a build folder and uses it as a stranger would: find_package, pkg-config, subproject; builds and
# runs the example. Leaves the trained network in WORK/digits.safetensors for the Python tests.
# Usage: tests/cpp/package_test.sh BUILD WORK [cmake options of the example and the subproject ...]
# DEVICES (default: cpu) lists where the example trains, e.g. DEVICES="cpu cuda". PYTHON makes the digits.
set -eu
repository=$(cd "$(dirname "$0")/../.." && pwd)
build=$(cd "$1" && pwd)
mkdir -p "$2"
work=$(cd "$2" && pwd)
shift 2
python=${PYTHON:-python3}
fail() { echo "package test: $1" >&2; exit 1; }
quietly() { "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2; fail "failed: $*"; }; }

# Nothing of an earlier run, which may have had another compiler.
rm -rf "$work/prefix" "$work/installed" "$work/source" "$work/app" "$work/example" "$work/subproject"
quietly cmake --install "$build" --component snack_cpp --prefix "$work/installed"
mv "$work/installed" "$work/prefix"  # an installation can be moved
[ ! -e "$work/prefix/snack" ] || fail "the C++ package holds the Python library"
# The CUDA runtime may stand in the repository's own environment; nothing else may.
if grep -rF "$repository" "$work/prefix" --include='*.cmake' --include='*.pc' --include='*.hpp' | grep -vF "$repository/.venv/cuda"; then fail "these files name the source tree"; fi

# find_package, from a copy of the example that knows nothing of this repository.
cp -r "$repository/examples/cpp" "$work/source"
quietly cmake -S "$work/source" -B "$work/example" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" -DPython_EXECUTABLE="$(command -v "$python")" "$@"
quietly cmake --build "$work/example"
train="$work/example/train_mnist"
[ -x "$train" ] || fail "the example was not built"
[ -e "$work/example/digits/train-images-idx3-ubyte" ] || "$python" "$work/source/digits.py" "$work/example/digits"

for device in ${DEVICES:-cpu}; do
  output=$("$train" --data "$work/example/digits" --device "$device" --epochs 20 --save "$work/digits.safetensors")
  echo "$output" | tail -n 2
  echo "$output" | grep -qE 'epoch 20/20 .* test accuracy 9[5-9]\.' || fail "the example reached less than 95 % on the digits: $output"
done

# Every mistake is one sentence and exit status 2.
refused() {
  expected=$1
  shift
  status=0
  "$train" "$@" >"$work/log" 2>&1 || status=$?
  { [ "$status" = 2 ] && [ "$(wc -l <"$work/log")" = 1 ] && grep -qF -- "$expected" "$work/log"; } || { cat "$work/log" >&2; fail "train_mnist $*: status $status, expected one line with '$expected'"; }
}
head -c 5000 "$work/example/digits/train-images-idx3-ubyte" >"$work/cut"
mkdir -p "$work/damaged" "$work/empty"
cp "$work/example/digits/"* "$work/damaged"
cp "$work/cut" "$work/damaged/train-images-idx3-ubyte"
refused "--epoch is unknown" --epoch 3
refused "--sparsity: 1.5 was given" --sparsity 1.5
refused "--save: a value is missing" --save
refused "--device: tpu was given, expected cpu or cuda" --device tpu
refused "has neither train-images-idx3-ubyte nor" --data "$work/empty"
refused "is cut short" --data "$work/damaged"
gzip -c "$work/example/digits/train-images-idx3-ubyte" | head -c 9000 >"$work/damaged/train-images-idx3-ubyte.gz"
rm "$work/damaged/train-images-idx3-ubyte"
refused "is damaged or cut short" --data "$work/damaged"
refused "cannot be written" --data "$work/example/digits" --save "$work/no/such/folder/x.safetensors"
case " ${DEVICES:-cpu} " in *" cuda "*) ;; *) refused "CUDA" --device cuda --data "$work/example/digits" ;; esac

# A file decompressed by the example trains the same network as the plain one.
mkdir -p "$work/gz"
for file in "$work/example/digits/"*; do gzip -9 -c "$file" >"$work/gz/$(basename "$file").gz"; done
"$train" --data "$work/gz" --epochs 2 | grep -oE 'loss [0-9.]+' >"$work/gz.loss"
"$train" --data "$work/example/digits" --epochs 2 | grep -oE 'loss [0-9.]+' >"$work/plain.loss"
cmp "$work/gz.loss" "$work/plain.loss" || fail "compressed data gave another network"

# The page's example is the file, and the file builds with pkg-config alone.
sed -n '/<!-- quickstart.cpp -->/,/<!-- end -->/p' "$repository/docs/cpp.md" | sed '1,2d' | sed -e '$d' | sed -e '$d' >"$work/page.cpp"
cmp "$work/page.cpp" "$repository/examples/cpp/quickstart.cpp" || fail "docs/cpp.md does not show examples/cpp/quickstart.cpp; copy it there"
flags=$(PKG_CONFIG_PATH="$work/prefix/lib/pkgconfig:$work/prefix/lib64/pkgconfig" pkg-config --cflags --libs snack)
# shellcheck disable=SC2086
quietly c++ -std=c++20 -Wall -Wextra -Werror "$work/page.cpp" -o "$work/quickstart" $flags
"$work/quickstart" | grep -q 'sum of y 752640, gradient of slot 0 64, 47040 bytes of index' || fail "the quickstart printed: $("$work/quickstart")"

# A later minor version is another interface.
mkdir -p "$work/app"
printf 'cmake_minimum_required(VERSION 3.25)\nproject(app CXX)\nfind_package(snack 0.99 REQUIRED)\n' >"$work/app/CMakeLists.txt"
if cmake -S "$work/app" -B "$work/app/build" -DCMAKE_PREFIX_PATH="$work/prefix" "$@" >/dev/null 2>&1; then fail "find_package(snack 0.99) was satisfied"; fi

# A subproject: nothing of the parent changes, no test, no Python; the plan's library is built, all of it is linked in the build graph.
quietly cmake -S "$repository/tests/cpp/subproject" -B "$work/subproject" -G Ninja "-DSNACK_SOURCE=$repository" "$@"
quietly cmake --build "$work/subproject" --target plan
"$work/subproject/plan" | grep -q '^stream, batch blocks of' || fail "the subproject's program printed: $("$work/subproject/plan")"
quietly ninja -C "$work/subproject" -n quickstart
echo "package test: find_package, pkg-config and subproject work"
