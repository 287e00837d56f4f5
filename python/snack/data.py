"""Data sets of the main job: real data, as standardised float32 rows and int64 labels.

``load("digits")`` needs nothing but scikit-learn; ``mnist``, ``fashion-mnist``, ``cifar10`` and ``madelon`` are read from files that are
already on the machine (nothing is ever downloaded); ``load("file.npz")`` reads a user's own table.

Where files are looked for, first hit wins: ``root`` if it is given, else ``$SNACK_DATA``, then ``../shared/data`` relative to the current
directory, then the same relative to the source checkout, then (Fashion-MNIST only) the folder of Debian's ``dataset-fashion-mnist``.

Standardisation, the same for every set: each feature is centred on its mean over the training rows. An image is then divided by one
number, the standard deviation pooled over its pixels (one number a colour channel), so that a pixel that is always black becomes exactly
0 and stays harmless; a table is divided column by column. A constant column becomes 0. The test rows are treated with the training
figures, which the :class:`Dataset` keeps.

Keys of an ``.npz`` file: ``x`` (n, features) or (n, height, width[, channels]), a real or integer array; ``y`` (n,), integers (any set of
integers; the k-th smallest label becomes class k); optionally ``x_test`` and ``y_test``. Without them a fifth of every class is split off,
always the same rows.

Every failure is a :class:`snack.errors.SnackError`.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import io
import lzma
import math
import os
import tarfile
import tempfile
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from snack.errors import SnackError

SPLIT_SEED = 0  # of the train/test split of sets that come without one; independent of the training seed
TEST_FRACTION = 0.2

_HOW_TO_GET = {
    "mnist": "put the four MNIST idx files (train-images-idx3-ubyte.gz and so on) into a folder mnist/ there",
    "fashion-mnist": "install Debian's package dataset-fashion-mnist (apt-get install dataset-fashion-mnist), "
    "or put the four idx files into a folder fashion-mnist/ there",
    "cifar10": "put cifar10-jpeg.tar.xz (train/<class>/*.jpg and test/<class>/*.jpg) there",
    "madelon": "put madelon.tar.xz (madelon_train.data, madelon_train.labels, madelon_valid.data, madelon_valid.labels) "
    "into a folder madelon/ there",
}
NAMES = ("digits", *_HOW_TO_GET)
_BROKEN = (EOFError, OSError, ValueError, KeyError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)


@dataclass(frozen=True)
class Dataset:
    """A classification problem in memory, ready to train on.

    ``x_train`` (n, features) and ``x_test`` (m, features) are float32 and standardised; ``y_train`` (n,) and ``y_test`` (m,) are int64 in
    ``range(classes)``. ``image_shape`` is (height, width) or (height, width, channels) where a row is an image, else None. ``mean`` and
    ``scale`` (features,) are what was subtracted and divided by: ``x = (raw - mean) / scale``.
    """

    name: str
    x_train: torch.Tensor
    y_train: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    image_shape: tuple[int, ...] | None
    classes: int
    mean: torch.Tensor
    scale: torch.Tensor

    @property
    def features(self) -> int:
        """Number of input features."""
        return self.x_train.shape[1]


def load(name_or_path, root=None, progress=None) -> Dataset:
    """Loads a data set by name (one of ``snack.data.NAMES``) or from an ``.npz`` file.

    ``root``: the one folder to look in instead of the search path of the module. ``progress(done, total, what)`` is called while a slow
    set is decoded (CIFAR-10 the first time: about 20 s, then cached under ``$XDG_CACHE_HOME/snack``).

    Raises SnackError: unknown name; files not found (says where it looked and how to get them); truncated or malformed files; wrong keys;
    lengths that differ; NaN or infinite features; fewer than two classes.
    """
    name = os.fspath(name_or_path)
    if name.lower().endswith(".npz") or os.sep in name:
        return _load_npz(Path(name))
    loader = {"digits": _load_digits, "cifar10": _load_cifar10, "madelon": _load_madelon}.get(name)
    if loader:
        return loader(root, progress)
    if name in ("mnist", "fashion-mnist"):
        return _load_idx_set(name, root)
    near = difflib.get_close_matches(name, NAMES, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise SnackError(
        f"unknown data set {name!r}{hint}: expected one of {', '.join(NAMES)}, or the path of an .npz file with the arrays x and y"
    )


# ---- finding files -------------------------------------------------------------------------------------------------------------------


def search_roots(root=None) -> list[Path]:
    """The folders that are searched, in order, whether they exist or not."""
    if root is not None:
        return [Path(root)]
    roots = [Path(os.environ["SNACK_DATA"])] if os.environ.get("SNACK_DATA") else []
    roots.append(Path.cwd().parent / "shared" / "data")
    roots.append(Path(__file__).resolve().parents[2].parent / "shared" / "data")
    return list(dict.fromkeys(roots))


def _find(name: str, relative: list[str], root, extra=()) -> Path:
    """The first existing path among root/relative for every search root, then ``extra``."""
    candidates = [base / rel for base in search_roots(root) for rel in relative]
    candidates += [Path(p) for p in extra] if root is None else []
    for path in candidates:
        if path.exists():
            return path
    looked = ", ".join(str(p) for p in candidates)
    where = "the folder given as root" if root is not None else "a folder and name it in the environment variable SNACK_DATA"
    raise SnackError(f"data set {name!r} not found: looked for {looked}; make {where}, and {_HOW_TO_GET[name]}")


# ---- idx files (MNIST, Fashion-MNIST) ------------------------------------------------------------------------------------------------


def read_idx(path) -> torch.Tensor:
    """Reads one idx file of unsigned bytes, gzipped or not, as a uint8 tensor of the shape in its header.

    Layout (big-endian): 0, 0, type 0x08, rank, rank × int32 sizes, bytes. Raises SnackError where the file is not exactly that.
    """
    path = Path(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except _BROKEN as error:
        raise SnackError(f"{path} cannot be read ({_why(error)}): expected an idx file; it may be truncated, so copy it again") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise SnackError(
            f"{path} is not an idx file of unsigned bytes (it starts with {raw[:4].hex() or 'nothing'}, expected 000008..): copy it again"
        )
    rank = raw[3]
    start = 4 + 4 * rank
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, start, 4)]
    expected = start + math.prod(shape)
    if len(raw) < start or len(raw) != expected:
        raise SnackError(
            f"{path} holds {len(raw)} bytes, its header (shape {shape}) promises {expected}: it is truncated or damaged, so copy it again"
        )
    if expected == start:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=start).reshape(shape)


def _load_idx_set(name: str, root) -> Dataset:
    first = "train-images-idx3-ubyte"
    folders = [name, name.replace("-", "_")]
    extra = [f"/usr/share/datasets/fashion-mnist/{first}.gz"] if name == "fashion-mnist" else []
    folder = _find(name, [f"{f}/{first}{gz}" for f in folders for gz in (".gz", "")], root, extra).parent
    parts = []
    for split in ("train", "t10k"):
        x, y = (read_idx(_idx_file(folder, f"{split}-{kind}", name)) for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
        if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
            raise SnackError(
                f"{folder}: the {split} images have shape {tuple(x.shape)} and the labels {tuple(y.shape)}: "
                "expected (n, height, width) and (n,); copy the four files again"
            )
        parts += [x, y]
    return _finish(name, *parts, source=folder)


def _idx_file(folder: Path, stem: str, name: str) -> Path:
    for path in (folder / f"{stem}.gz", folder / stem):
        if path.exists():
            return path
    raise SnackError(f"data set {name!r} is incomplete: {folder} has no {stem}.gz; {_HOW_TO_GET[name]}")


# ---- digits, Madelon, CIFAR-10 -------------------------------------------------------------------------------------------------------


def _load_digits(root, progress) -> Dataset:
    """1,797 handwritten digits of 8×8 pixels, bundled with scikit-learn (UCI Optical Recognition of Handwritten Digits, its test part)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SnackError("data set 'digits' comes with scikit-learn, which is not installed: pip install 'snack-sparse[bench]'") from error
    bunch = load_digits()
    x, y = torch.as_tensor(bunch.images), torch.as_tensor(bunch.target)
    train, test = stratified_split(y, TEST_FRACTION, SPLIT_SEED)
    return _finish("digits", x[train], y[train], x[test], y[test], source="scikit-learn's digits")


def _load_madelon(root, progress) -> Dataset:
    """2,000 + 600 rows of 500 features, of which 20 matter (NIPS 2003 feature selection challenge)."""
    np = _numpy("madelon")
    path = _find("madelon", ["madelon/madelon.tar.xz", "madelon.tar.xz"], root)
    arrays = {}
    try:
        with tarfile.open(path, "r:xz") as archive:
            for part in ("train.data", "train.labels", "valid.data", "valid.labels"):
                arrays[part] = torch.as_tensor(np.loadtxt(archive.extractfile(f"madelon_{part}"), dtype=np.float32))
    except _BROKEN as error:
        raise SnackError(
            f"{path} cannot be read ({_why(error)}): expected the four Madelon files; it may be truncated, so copy it again"
        ) from error
    x, y, x_test, y_test = (arrays[k] for k in ("train.data", "train.labels", "valid.data", "valid.labels"))
    return _finish("madelon", x, (y > 0).long(), x_test, (y_test > 0).long(), source=path)


def _load_cifar10(root, progress) -> Dataset:
    """50,000 + 10,000 colour images of 32×32 pixels from a tar archive of JPEG files; decoded once, then cached as uint8 arrays."""
    np = _numpy("cifar10")
    path = _find("cifar10", ["cifar10-jpeg.tar.xz", "cifar10/cifar10-jpeg.tar.xz"], root)
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise SnackError(f"{path} cannot be read ({_why(error)}): make it readable, or copy it again") from error
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "snack" / f"cifar10-{digest}.npz"
    try:
        with np.load(cache) as stored:
            parts = [stored[k] for k in ("x", "y", "x_test", "y_test")]
    except _BROKEN:  # absent or damaged: decode (again)
        parts = _decode_cifar10(path, progress)
        _write_cache(np, cache, dict(zip(("x", "y", "x_test", "y_test"), parts)))
    return _finish("cifar10", *(torch.as_tensor(a) for a in parts), source=path)


def _decode_cifar10(path: Path, progress):
    """Four arrays: x (n, 32, 32, 3) uint8 and y (n,) int64 of the training part, then of the test part. Classes in alphabetical order."""
    np = _numpy("cifar10")
    try:
        from PIL import Image
    except ImportError as error:
        raise SnackError("data set 'cifar10' is an archive of JPEG files and needs Pillow to decode them: pip install pillow") from error
    found = {"train": [], "test": []}
    try:
        with tarfile.open(path, "r:xz") as archive:
            for member in archive:
                part, _, rest = member.name.removeprefix("./").partition("/")
                if part not in found or not rest.endswith(".jpg"):
                    continue
                image = np.asarray(Image.open(io.BytesIO(archive.extractfile(member).read())).convert("RGB"))
                if image.shape != (32, 32, 3):
                    raise SnackError(
                        f"{path}: {member.name} is {image.shape[1]}×{image.shape[0]} pixels, CIFAR-10 has 32×32: use another archive"
                    )
                found[part].append((rest, image))
                done = len(found["train"]) + len(found["test"])
                if progress and done % 500 == 0:
                    progress(done, 60_000, "decoding CIFAR-10 (once)")
    except SnackError:
        raise
    except _BROKEN as error:
        raise SnackError(
            f"{path} cannot be read ({_why(error)}): expected a tar archive of JPEG files; it may be truncated, so copy it again"
        ) from error
    if not found["train"] or not found["test"]:
        raise SnackError(
            f"{path} holds no train/<class>/*.jpg or no test/<class>/*.jpg: expected CIFAR-10 as a folder a class; copy it again"
        )
    classes = sorted({rest.partition("/")[0] for rest, _ in found["train"]})
    number = {c: i for i, c in enumerate(classes)}
    parts = []
    for part in ("train", "test"):
        rows = sorted(found[part], key=lambda pair: pair[0])
        if any(rest.partition("/")[0] not in number for rest, _ in rows):
            raise SnackError(f"{path}: the test part has a class that the training part lacks: copy it again")
        parts += [np.stack([image for _, image in rows]), np.array([number[rest.partition("/")[0]] for rest, _ in rows])]
    return parts


def _write_cache(np, cache: Path, arrays) -> None:
    """Writes through a temporary file, so that a killed process leaves no half a cache; a folder that cannot be written costs only time."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache.parent, suffix=".tmp", delete=False) as file:
            np.savez(file, **arrays)
        os.replace(file.name, cache)
    except OSError as error:
        warnings.warn(
            f"the decoded images could not be cached in {cache.parent} ({_why(error)}): they will be decoded again next time", stacklevel=2
        )


# ---- .npz files ----------------------------------------------------------------------------------------------------------------------


def _load_npz(path: Path) -> Dataset:
    np = _numpy(str(path))
    if not path.is_file():
        raise SnackError(f"data file {path} not found: give the path of an .npz file with the arrays x and y, or one of {', '.join(NAMES)}")
    try:
        with np.load(path, allow_pickle=False) as file:
            keys = sorted(file.files)
            arrays = {k: file[k] for k in ("x", "y", "x_test", "y_test") if k in keys}
    except (*_BROKEN, TypeError) as error:  # TypeError: a lone array, as numpy.save writes
        raise SnackError(
            f"{path} cannot be read ({_why(error)}): expected an .npz file of plain arrays, as numpy.savez writes; it may be truncated"
        ) from error
    if not {"x", "y"} <= arrays.keys() or ("x_test" in arrays) != ("y_test" in arrays):
        raise SnackError(
            f"{path} has the arrays {', '.join(keys) or 'none'}: expected x and y, and either both of x_test and y_test or neither"
        )
    for part in ("", "_test") if "x_test" in arrays else ("",):
        _check_table(np, path, f"x{part}", arrays[f"x{part}"], f"y{part}", arrays[f"y{part}"])
    labels, y = np.unique(arrays["y"], return_inverse=True)
    x, y = torch.as_tensor(np.asarray(arrays["x"], np.float32)), torch.as_tensor(y.reshape(-1)).long()
    if "x_test" not in arrays:
        train, test = stratified_split(y, TEST_FRACTION, SPLIT_SEED)
        return _finish(path.stem, x[train], y[train], x[test], y[test], source=path)
    if arrays["x_test"].shape[1:] != arrays["x"].shape[1:]:
        raise SnackError(
            f"{path}: rows of x have shape {arrays['x'].shape[1:]}, rows of x_test {arrays['x_test'].shape[1:]}: they must be the same"
        )
    if not np.isin(arrays["y_test"], labels).all():
        raise SnackError(f"{path}: y_test has labels that y has not: expected only {labels.tolist()[:20]}")
    y_test = torch.as_tensor(np.searchsorted(labels, arrays["y_test"])).long()
    return _finish(path.stem, x, y, torch.as_tensor(np.asarray(arrays["x_test"], np.float32)), y_test, source=path)


def _check_table(np, path, x_name, x, y_name, y) -> None:
    if x.dtype.kind not in "fiub" or x.ndim not in (2, 3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3, 4)):
        raise SnackError(
            f"{path}: {x_name} is {x.dtype} of shape {x.shape}: expected numbers of shape (n, features) or (n, height, width[, channels])"
        )
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise SnackError(f"{path}: {y_name} is {y.dtype} of shape {y.shape}: expected integer labels of shape (n,)")
    if len(x) != len(y):
        raise SnackError(f"{path}: {x_name} has {len(x)} rows and {y_name} {len(y)} labels: expected one label a row")
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(x.astype(np.float32, copy=False)).all(axis=tuple(range(1, x.ndim)))
    if bad.any():
        raise SnackError(
            f"{path}: {x_name} has NaN or infinite numbers in {int(bad.sum())} of {len(x)} rows, "
            f"the first in row {int(bad.argmax())}: remove or fill them"
        )


# ---- common to all -------------------------------------------------------------------------------------------------------------------


def stratified_split(y: torch.Tensor, fraction: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers of a (train, test) split, both ascending: ``round(fraction·n_c)`` random rows of every class c go to the test part.

    The same labels, fraction and seed give the same split. A class of one row stays in the training part.
    """
    generator = torch.Generator().manual_seed(seed)
    test = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique().tolist():
        rows = (y == label).nonzero().flatten()
        chosen = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        test[rows[torch.randperm(len(rows), generator=generator)[:chosen]]] = True
    return (~test).nonzero().flatten(), test.nonzero().flatten()


def _finish(name: str, x, y, x_test, y_test, source) -> Dataset:
    """Checks what every set must be, flattens images to rows and standardises (see the module's docstring)."""
    shape = tuple(x.shape[1:]) if x.ndim > 2 else None
    y, y_test = y.long(), y_test.long()
    if min(len(x), len(x_test)) == 0 or x[0].numel() == 0:
        raise SnackError(
            f"{source}: {len(x)} training rows, {len(x_test)} test rows and {math.prod(x.shape[1:])} features: "
            "expected at least one of each"
        )
    if tuple(x_test.shape[1:]) != tuple(x.shape[1:]):
        raise SnackError(
            f"{source}: training rows have shape {tuple(x.shape[1:])}, test rows {tuple(x_test.shape[1:])}: they must be the same"
        )
    classes = int(y.max()) + 1
    if len(y.unique()) < 2 or int(y_test.max()) >= classes:
        raise SnackError(
            f"{source}: {len(y.unique())} classes to learn and the highest test label {int(y_test.max())}: "
            "expected at least 2, and no other in the test"
        )
    x, x_test = (t.reshape(len(t), -1).to(torch.float32) for t in (x, x_test))
    mean, scale = _standardise_(x, x_test, shape)
    return Dataset(name, x, y, x_test, y_test, shape, classes, mean, scale)


def _standardise_(x: torch.Tensor, x_test: torch.Tensor, shape) -> tuple[torch.Tensor, torch.Tensor]:
    """In place; returns (mean, scale), both (features,) float32."""
    mean = x.mean(0, dtype=torch.float64).to(torch.float32)
    x -= mean
    x_test -= mean
    variance = torch.linalg.vector_norm(x, dim=0, dtype=torch.float64).square() / len(x)
    if shape is not None:  # pooled over the pixels of a channel
        channels = shape[2] if len(shape) == 3 else 1
        variance = variance.reshape(-1, channels).mean(0, keepdim=True).expand(math.prod(shape[:2]), channels).reshape(-1)
    scale = variance.sqrt().to(torch.float32)
    scale[scale <= 1e-6 * mean.abs().clamp(min=1e-30)] = 1.0
    x /= scale
    x_test /= scale
    return mean, scale


def _numpy(what: str):
    try:
        import numpy
    except ImportError as error:
        raise SnackError(f"reading {what!r} needs numpy, which is not installed: pip install 'snack-sparse[bench]'") from error
    return numpy


def _why(error: BaseException) -> str:
    """The first line of an exception, or its type where it says nothing."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
