"""Writes scikit-learn's 1,797 handwritten digits as four idx files: python digits.py FOLDER. Every fifth row of a class is for testing."""

import struct
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def write(path: Path, array: np.ndarray) -> None:
    """An idx file of bytes: magic number with the number of dimensions, the extents, the data."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def main() -> None:
    """Every fifth row of each class goes to the test part."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    is_test = np.zeros(len(digits.target), bool)
    for label in range(10):
        is_test[np.flatnonzero(digits.target == label)[::5]] = True
    for name, rows in (("t10k", is_test), ("train", ~is_test)):
        write(folder / f"{name}-labels-idx1-ubyte", digits.target[rows])
        write(folder / f"{name}-images-idx3-ubyte", digits.images[rows])


if __name__ == "__main__":
    main()
