"""Packs what a machine with a GPU and no network needs into build/gpu: both libraries, the C++ tests, the C++ example and its data,
all from the tree that `make test` builds, with the hash of their sources (tools/gpu_suite.py refuses a bundle of other sources).

Usage: python tools/gpu_bundle.py BUILD [cmake options of the example ...]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from gpu_suite import BUNDLE, ROOT, fingerprints


def run(*command: object) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"gpu_bundle: {' '.join(map(str, command))} failed:\n{result.stdout}{result.stderr}")


def build_example(build: Path, options: list[str]) -> None:
    """The example against the installed package, with the C++ library linked in: the other machine may have another one."""
    work = build / "gpu-example"
    run("cmake", "--install", build, "--component", "snack_cpp", "--prefix", work / "prefix")
    static = "-DCMAKE_EXE_LINKER_FLAGS=-static-libstdc++ -static-libgcc"
    where = ["-S", ROOT / "examples/cpp", "-B", work / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={work / 'prefix'}"]
    run("cmake", *where, static, f"-DPython_EXECUTABLE={sys.executable}", *options)
    run("cmake", "--build", work / "build")
    shutil.copy(work / "build/train_mnist", BUNDLE)
    shutil.copytree(work / "build/digits", BUNDLE / "data/digits")


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    build, options = Path(sys.argv[1]).resolve(), sys.argv[2:]
    shutil.rmtree(BUNDLE, ignore_errors=True)
    BUNDLE.mkdir(parents=True)
    for name in ("libsnack_ops.so", "libsnack_ops_cuda.so", "tests/cpp/snack_cuda_tests"):
        shutil.copy(build / name, BUNDLE)
    build_example(build, options)
    mnist = Path(os.environ.get("SNACK_DATA", ROOT.parent / "shared/data")) / "mnist"
    if mnist.is_dir():
        (BUNDLE / "data/mnist").mkdir()
        for file in mnist.glob("*-ubyte.gz"):
            shutil.copyfile(file, BUNDLE / "data/mnist" / file.name)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    (BUNDLE / "bundle.json").write_text(json.dumps({"compiled_hash": fingerprints()[1], "commit": commit[:12]}) + "\n")
    size = sum(file.stat().st_size for file in BUNDLE.rglob("*") if file.is_file())
    print(f"{BUNDLE.relative_to(ROOT)}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
