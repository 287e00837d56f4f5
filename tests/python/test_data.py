"""Data sets: what is loaded is right, standardised and the same every time; what is broken is refused with a sentence."""

import gzip
import io
import struct
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from checks import fails
from snack import data


def idx(array: np.ndarray) -> bytes:
    return struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}i", *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(folder, train=20, test=10, compress=True):
    """A tiny idx set of 4×3 pixels; returns the arrays."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for split, count in (("train", train), ("t10k", test)):
        arrays[split] = rng.integers(0, 256, (count, 4, 3)), np.arange(count) % 10
        for kind, array in zip(("images-idx3-ubyte", "labels-idx1-ubyte"), arrays[split]):
            raw = idx(array)
            (folder / f"{split}-{kind}{'.gz' if compress else ''}").write_bytes(gzip.compress(raw) if compress else raw)
    return arrays


# ---- idx -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_set_has_the_pixels_of_the_files(tmp_path, name, compress):
    arrays = write_mnist(tmp_path / name, compress=compress)
    d = data.load(name, root=tmp_path)
    assert (d.name, d.image_shape, d.classes, d.features) == (name, (4, 3), 10, 12)
    assert (d.x_train.dtype, d.y_train.dtype, d.x_test.dtype, d.y_test.dtype) == (torch.float32, torch.int64) * 2
    for split, x, y in (("train", d.x_train, d.y_train), ("t10k", d.x_test, d.y_test)):
        images, labels = arrays[split]
        raw = x.double() * d.scale.double() + d.mean.double()
        np.testing.assert_allclose(raw.numpy(), images.reshape(len(images), -1), atol=1e-3)
        assert y.tolist() == labels.tolist()


def test_search_path_starts_with_the_environment(tmp_path, monkeypatch):
    write_mnist(tmp_path / "mnist", train=27)
    monkeypatch.setenv("SNACK_DATA", str(tmp_path))
    assert len(data.load("mnist").x_train) == 27


def test_search_path_has_shared_data_beside_the_current_directory(tmp_path, monkeypatch):
    write_mnist(tmp_path / "shared" / "data" / "mnist", train=29)
    (tmp_path / "checkout").mkdir()
    monkeypatch.chdir(tmp_path / "checkout")
    monkeypatch.delenv("SNACK_DATA", raising=False)
    assert len(data.load("mnist").x_train) == 29


@pytest.mark.parametrize(
    "name, hint",
    [("mnist", "idx"), ("fashion-mnist", "dataset-fashion-mnist"), ("cifar10", "cifar10-jpeg.tar.xz"), ("madelon", "madelon.tar.xz")],
)
def test_absent_set_says_where_it_looked_and_how_to_get_it(tmp_path, name, hint):
    fails([name, tmp_path, hint], data.load, name, root=tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 10, 50, -1])
def test_truncated_gzip(tmp_path, keep):
    write_mnist(tmp_path / "mnist")
    file = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:keep])
    fails([file, "copy it again"], data.load, "mnist", root=tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0\0\x08",
        b"\0\0\x0d\1\0\0\0\1\0",
        b"\0\0\x08\2\0\0\0\1",
        idx(np.zeros((2, 2)))[:-1],
        idx(np.zeros((2, 2))) + b"\0",
        b"PK\3\4zip",
    ],
)
def test_damaged_idx(tmp_path, raw):
    (tmp_path / "file").write_bytes(raw)
    fails([tmp_path / "file"], data.read_idx, tmp_path / "file")


def test_idx_of_zero_rows(tmp_path):
    (tmp_path / "file").write_bytes(idx(np.zeros((0, 4, 3))))
    assert data.read_idx(tmp_path / "file").shape == (0, 4, 3)


def test_images_and_labels_of_different_length(tmp_path):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(9))))
    fails(["t10k", "(10, 4, 3)", "(9,)"], data.load, "mnist", root=tmp_path)


def test_one_of_the_four_files_is_missing(tmp_path):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    fails(["t10k-labels"], data.load, "mnist", root=tmp_path)


# ---- names, digits, the split ----------------------------------------------------------------------------------------------------------


def test_unknown_name_suggests():
    fails(["'minst'", "'mnist'", "digits"], data.load, "minst")
    fails(["'imagenet'", "digits", ".npz"], data.load, "imagenet")


def test_digits():
    d = data.load("digits")
    assert (d.x_train.shape[1], len(d.x_train) + len(d.x_test), d.classes, d.image_shape) == (64, 1797, 10, (8, 8))
    again = data.load("digits")
    assert torch.equal(d.x_train, again.x_train) and torch.equal(d.y_test, again.y_test)
    share = d.y_test.bincount() / (d.y_test.bincount() + d.y_train.bincount())
    assert ((share - 0.2).abs() < 0.01).all()


def test_split_is_stratified_disjoint_and_fixed():
    y = torch.tensor([0] * 50 + [1] * 10 + [2] * 2 + [3])[torch.randperm(63, generator=torch.Generator().manual_seed(1))]
    train, test = data.stratified_split(y, 0.2, 0)
    assert sorted(train.tolist() + test.tolist()) == list(range(63))
    assert y[test].bincount(minlength=4).tolist() == [10, 2, 1, 0]
    assert torch.equal(test, data.stratified_split(y, 0.2, 0)[1]) and not torch.equal(test, data.stratified_split(y, 0.2, 1)[1])


# ---- .npz ------------------------------------------------------------------------------------------------------------------------------


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def table(rows=40, features=5, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(3, [1, 10, 100, 1e-3, 5][:features], (rows, features)), "y": np.arange(rows) % classes}


def test_table_is_standardised_column_by_column_with_training_figures(tmp_path):
    t, test = table(), table(seed=1)
    d = data.load(save(tmp_path / "t.npz", **t, x_test=test["x"], y_test=test["y"]))
    assert (d.name, d.image_shape, d.classes) == ("t", None, 3)
    np.testing.assert_allclose(d.x_train.numpy(), (t["x"] - t["x"].mean(0)) / t["x"].std(0), atol=2e-3)
    np.testing.assert_allclose(d.x_test.numpy(), (test["x"] - t["x"].mean(0)) / t["x"].std(0), atol=2e-2)


def test_constant_columns_and_pixels_become_zero(tmp_path):
    t = table()
    t["x"][:, 2] = 7.1
    d = data.load(save(tmp_path / "t.npz", **t))
    assert (d.x_train[:, 2].abs() < 1e-5).all() and torch.isfinite(d.x_test).all()
    images = np.random.default_rng(0).integers(0, 255, (40, 4, 4)).astype(np.uint8)
    images[:, 0] = 0
    d = data.load(save(tmp_path / "i.npz", x=images, y=t["y"]))
    assert d.image_shape == (4, 4) and (d.x_train[:, :4] == 0).all() and len(d.scale.unique()) == 1
    assert (data.load(save(tmp_path / "c.npz", x=np.ones((40, 2)), y=t["y"])).x_train == 0).all()


def test_labels_are_any_integers(tmp_path):
    t = table()
    d = data.load(save(tmp_path / "t.npz", x=t["x"], y=np.array([-5, 7, 1000])[t["y"]], x_test=t["x"][:3], y_test=[1000, -5, 7]))
    assert d.y_train[:4].tolist() == [0, 1, 2, 0] and d.y_test.tolist() == [2, 0, 1] and d.classes == 3


def test_colour_images(tmp_path):
    x = np.random.default_rng(0).normal(0, [1, 5, 25], (40, 2, 2, 3))
    d = data.load(save(tmp_path / "t.npz", x=x, y=table()["y"]))
    assert d.image_shape == (2, 2, 3) and d.x_train.shape == (31, 12) and len(d.scale.unique()) == 3


T = table()
NAN = T["x"].copy()
NAN[17, 2] = np.nan
INF = T["x"].copy()
INF[3, 0] = 1e300  # beyond float32
WRONG = {
    "no y": ({"x": T["x"]}, ["x and y"]),
    "other keys": ({"features": T["x"], "labels": T["y"]}, ["features, labels", "x and y"]),
    "half a test": ({**T, "x_test": T["x"]}, ["x_test and y_test"]),
    "lengths": ({"x": T["x"], "y": T["y"][:-1]}, ["40", "39"]),
    "lengths of the test": ({**T, "x_test": T["x"], "y_test": T["y"][:-1]}, ["x_test", "y_test"]),
    "nan": ({"x": NAN, "y": T["y"]}, ["NaN", "row 17"]),
    "overflow": ({"x": INF, "y": T["y"]}, ["infinite", "row 3"]),
    "rank 1": ({"x": T["x"][:, 0], "y": T["y"]}, ["(40,)"]),
    "rank 5": ({"x": np.zeros((40, 1, 1, 1, 1)), "y": T["y"]}, ["(40, 1, 1, 1, 1)"]),
    "words": ({"x": np.full((40, 2), "a"), "y": T["y"]}, ["<U1"]),
    "complex": ({"x": T["x"] + 1j, "y": T["y"]}, ["complex128"]),
    "float labels": ({"x": T["x"], "y": T["y"] + 0.5}, ["float64", "integer"]),
    "labels of rank 2": ({"x": T["x"], "y": T["y"][:, None]}, ["(40, 1)"]),
    "objects": ({"x": np.array([[1], [2, 3]], dtype=object), "y": T["y"][:2]}, ["plain arrays"]),
    "no rows": ({"x": T["x"][:0], "y": T["y"][:0]}, []),
    "no features": ({"x": T["x"][:, :0], "y": T["y"]}, ["0 features"]),
    "one class": ({"x": T["x"], "y": 0 * T["y"]}, ["1 classes"]),
    "other width in the test": ({**T, "x_test": T["x"][:, :2], "y_test": T["y"]}, ["(5,)", "(2,)"]),
    "new label in the test": ({**T, "x_test": T["x"], "y_test": T["y"] + 1}, ["y_test"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_npz(tmp_path, case):
    arrays, words = WRONG[case]
    np.savez(tmp_path / "t.npz", **arrays)
    fails([tmp_path / "t.npz", *words], data.load, tmp_path / "t.npz")


@pytest.mark.parametrize("keep", [0, 2, 30, 200, -5])
def test_truncated_npz(tmp_path, keep):
    file = save(tmp_path / "t.npz", **table())
    file.write_bytes(file.read_bytes()[:keep])
    fails([file], data.load, file)


def test_npz_with_a_flipped_byte(tmp_path):
    file = save(tmp_path / "t.npz", **table())
    raw = bytearray(file.read_bytes())
    raw[500] ^= 255
    file.write_bytes(raw)
    fails([file], data.load, file)


def test_not_a_zip_a_folder_and_nothing(tmp_path):
    (tmp_path / "t.npz").write_text("hello")
    fails(["t.npz", "npz"], data.load, tmp_path / "t.npz")
    np.save(tmp_path / "a.npy", np.zeros(3))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    fails(["a.npz"], data.load, tmp_path / "a.npz")
    (tmp_path / "d.npz").mkdir()
    fails(["d.npz", "not found"], data.load, tmp_path / "d.npz")
    fails(["none.npz", "not found"], data.load, tmp_path / "none.npz")


# ---- archives --------------------------------------------------------------------------------------------------------------------------


def write_archive(path, files: dict[str, bytes]):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def jpeg(colour, size=32) -> bytes:
    image = Image.new("RGB", (size, size), colour)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def cifar_files(size=32):
    files = {"README.md": b"hello"}
    for name, colour in {"truck": (255, 0, 0), "cat": (0, 0, 255)}.items():
        files |= {f"train/{name}/{i}.jpg": jpeg(colour, size) for i in range(3)} | {f"test/{name}/0.jpg": jpeg(colour, size)}
    return files


def test_cifar_is_decoded_once_and_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_archive(tmp_path / "cifar10-jpeg.tar.xz", cifar_files())
    d = data.load("cifar10", root=tmp_path)
    assert (d.image_shape, d.classes, d.y_train.tolist(), d.y_test.tolist()) == ((32, 32, 3), 2, [0, 0, 0, 1, 1, 1], [0, 1])
    pixel = (d.x_train[-1] * d.scale + d.mean).reshape(32, 32, 3)[0, 0]
    assert pixel[0] > 240 and pixel[2] < 15  # trucks are red: channels last, classes in alphabetical order
    monkeypatch.setattr(data, "_decode_cifar10", lambda *a: pytest.fail("decoded again"))
    assert torch.equal(data.load("cifar10", root=tmp_path).x_train, d.x_train)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (cache,) = (tmp_path / "cache" / "snack").iterdir()
    cache.write_bytes(b"damaged")
    assert torch.equal(data.load("cifar10", root=tmp_path).x_train, d.x_train)


def test_broken_cifar(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "cifar10-jpeg.tar.xz"
    write_archive(file, cifar_files(size=16))
    fails([file, "16×16"], data.load, "cifar10", root=tmp_path)
    write_archive(file, {"train/cat/0.jpg": b"no picture", "test/cat/0.jpg": b""})
    fails([file], data.load, "cifar10", root=tmp_path)
    write_archive(file, {"README.md": b""})
    fails([file, "train/<class>"], data.load, "cifar10", root=tmp_path)
    write_archive(file, cifar_files())
    file.write_bytes(file.read_bytes()[:-200])
    fails([file], data.load, "cifar10", root=tmp_path)


def test_madelon(tmp_path):
    rows = b"1 2 3\n4 5 9\n7 8 6\n"
    files = {
        "madelon_train.data": rows,
        "madelon_train.labels": b"-1\n1\n-1\n",
        "madelon_valid.data": rows,
        "madelon_valid.labels": b"1\n-1\n1\n",
    }
    write_archive(tmp_path / "madelon" / "madelon.tar.xz", files)
    d = data.load("madelon", root=tmp_path)
    assert d.y_train.tolist() == [0, 1, 0] and d.classes == 2 and d.features == 3
    del files["madelon_valid.labels"]
    write_archive(tmp_path / "madelon" / "madelon.tar.xz", files)
    fails(["madelon.tar.xz"], data.load, "madelon", root=tmp_path)
