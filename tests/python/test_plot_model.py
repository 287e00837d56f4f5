"""snack.plot: what the pictures of topologies and updates hold, bad input, TensorBoard, and `snack plot` of a model file."""

import math
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import snack
from snack import Pattern, SnackError, SparseLinear, plot
from snack.cli.main import main
from snack.plot import history as history_module
from snack.plot import model as model_module

pytest.importorskip("matplotlib")


@dataclass(frozen=True)
class Record:
    """The fields of an update's record."""

    step: int
    number: int
    layers: dict
    grown_layers: dict
    nnz: dict
    fraction: float = 0.3
    seconds: float = 0.01
    overlap: dict | None = None
    explored: dict | None = None

    @property
    def dropped(self):
        return sum(self.layers.values())

    @property
    def grown(self):
        return sum(self.grown_layers.values())


def records(count, names=("0", "2"), grown=1.0, tracked=True):
    made = []
    for i in range(count):
        dropped = {name: 100 + 10 * k - i for k, name in enumerate(names)}
        fields = {"overlap": {n: 1 - 0.01 * (i + k) for k, n in enumerate(names)}}
        fields["explored"] = {n: 0.05 + 0.01 * (i + k) for k, n in enumerate(names)}
        kept = {name: 1000 for name in names}
        made.append(Record(50 * (i + 1), i, dropped, {n: int(grown * d) for n, d in dropped.items()}, kept, **(fields if tracked else {})))
    return made


def layer(out, in_, sparsity=0.9, seed=0):
    return SparseLinear(in_, out, sparsity=sparsity, generator=torch.Generator().manual_seed(seed))


def heights(axes):
    return [patch.get_height() for patch in axes.patches]


def draws(axes):
    """The picture can be rendered."""
    axes.figure.canvas.draw()
    return axes


# ---- connectivity ----


def test_few_connections_are_dots_where_they_are():
    a = layer(30, 40)
    axes = draws(plot.connectivity(a, name="fc1"))
    (dots,) = axes.lines
    rows, cols, _ = a.to_coo()
    assert sorted(zip(dots.get_ydata(), dots.get_xdata())) == sorted(zip(rows.tolist(), cols.tolist()))
    assert axes.get_xlim() == (-0.5, 39.5) and axes.get_ylim() == (29.5, -0.5)
    assert axes.get_title(loc="left") == "fc1: connections, 30 × 40" and axes.get_ylabel() == "output"
    assert axes.get_xlabel() == "input\n120 connections, density 10 %"


@pytest.mark.parametrize("shape", [(1001, 777), (300, 5000), (4096, 512), (100_003, 7)])
def test_many_connections_are_counted_in_blocks(shape):
    pattern = Pattern.random(shape, 60_000, seed=1)
    axes = draws(plot.connectivity(pattern))
    (image,) = axes.images
    density = torch.as_tensor(image.get_array().data)
    left, right, bottom, top = image.get_extent()
    high, wide = (bottom - top) / density.shape[0], (right - left) / density.shape[1]
    assert max(density.shape) <= model_module.BLOCKS and high == int(high) and wide == int(wide)
    rows, cols = pattern.coordinates()
    for down in (0, 1, density.shape[0] - 1):
        for across in (0, density.shape[1] // 2, density.shape[1] - 1):
            inside = (rows // int(high) == down) & (cols // int(wide) == across)
            cells = min(high, shape[0] - down * high) * min(wide, shape[1] - across * wide)
            assert density[down, across] == pytest.approx(int(inside.sum()) / cells)
    sizes = [torch.full((n,), float(side)) for n, side in zip(density.shape, (high, wide))]
    sizes[0][-1], sizes[1][-1] = shape[0] - high * (density.shape[0] - 1), shape[1] - wide * (density.shape[1] - 1)
    assert float((density * torch.outer(*sizes)).sum()) == pytest.approx(60_000)
    assert len(axes.figure.axes) == 2 and f"{int(high):,} × {int(wide):,}" in axes.figure.axes[1].get_ylabel()


def test_a_small_dense_layer_stays_exact():
    a = layer(200, 150, sparsity=0.2)
    (image,) = plot.connectivity(a).images
    expected = torch.zeros(200, 150)
    expected[a.pattern.rows.long(), a.pattern.cols.long()] = 1
    assert torch.equal(torch.as_tensor(image.get_array().data).float(), expected)


def test_connections_of_each_pixel():
    a = layer(50, 28 * 28)
    axes = draws(plot.connectivity(a, (28, 28)))
    pixels = torch.as_tensor(axes.images[0].get_array().data)
    counts = torch.bincount(a.pattern.cols, minlength=784)
    assert pixels.shape == (28, 28) and int(pixels.sum()) == a.nnz and torch.equal(pixels.flatten(), counts)
    channels = torch.as_tensor(plot.connectivity(a, shape=(14, 28, 2)).images[0].get_array().data)
    assert torch.equal(channels, counts.reshape(14, 28, 2).sum(2)) and axes.figure.axes[1].get_ylabel() == "connections of a pixel"


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0), (0, 0)])
def test_no_connections(shape):
    empty = Pattern([], [], shape)
    axes = draws(plot.connectivity(empty))
    assert [text.get_text() for text in axes.texts] == ["no connections"] and "0 connections" in axes.get_xlabel()
    ins, outs = plot.degrees(empty)
    assert sum(heights(draws(ins))) == shape[0] and sum(heights(outs)) == shape[1]
    bars = draws(plot.density({"a": empty})).patches
    assert len(bars) == 1 and bars[0].get_width() == 0
    assert int(plot.connectivity(Pattern([], [], (3, 4)), (2, 2)).images[0].get_array().sum()) == 0


def test_one_connection():
    one = Pattern([2], [5], (10, 20))
    axes = draws(plot.connectivity(one))
    assert list(axes.lines[0].get_xdata()) == [5] and list(axes.lines[0].get_ydata()) == [2] and "1 connection," in axes.get_xlabel()
    ins, outs = plot.degrees(one)
    assert heights(ins) == [9, 1] and heights(draws(outs)) == [19, 1]


def test_a_hypersparse_layer_costs_what_its_connections_cost():
    million = Pattern.random((10**6, 10**6), 10**6, seed=0)
    far = Pattern([10**8 - 1, 0, 7], [0, 10**8 - 1, 7], (10**8, 10**8))
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for pattern in (million, far):
        draws(plot.connectivity(pattern))
        ins, outs = plot.degrees(pattern)
        assert sum(heights(ins)) == sum(heights(draws(outs))) == pattern.shape[0]
        assert draws(plot.density({"a": pattern})).patches[0].get_width() == pytest.approx(100 * pattern.density)
    assert time.perf_counter() - begin < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024  # KiB; the dense matrix has 10^12 entries


# ---- degrees and density ----


def test_degrees_are_counted():
    rows, cols = [0, 0, 0, 1, 1, 3], [0, 1, 2, 0, 1, 0]
    ins, outs = plot.degrees(Pattern(rows, cols, (5, 4)), name="fc")
    assert heights(ins) == [2, 1, 1, 1] and heights(outs) == [1, 1, 1, 1]  # outputs with 0, 1, 2, 3 connections; inputs likewise
    assert [patch.get_x() for patch in ins.patches] == [-0.5, 0.5, 1.5, 2.5]
    assert list(ins.lines[0].get_xdata()) == [1.2, 1.2] and list(outs.lines[0].get_xdata()) == [1.5, 1.5]
    assert "2 of 5 have none" in ins.get_xlabel() and ins.get_title(loc="left") == "fc: fan-in" and outs.get_ylabel() == "inputs"


def test_degrees_of_a_wide_range_share_bars():
    rows = [0] * 1000 + list(range(1, 100))
    ins, _ = plot.degrees(Pattern(rows, [*range(1000), *[0] * 99], (100, 1000)))
    bars = heights(draws(ins))
    assert len(bars) <= model_module.DEGREE_BARS and bars[0] == 99 and bars[-1] == 1 and sum(bars) == 100
    last = ins.patches[-1]
    assert last.get_x() < 1000 < last.get_x() + last.get_width() and last.get_width() == int(last.get_width())


def test_density_of_each_layer():
    model = nn.Sequential(layer(20, 30, 0.9), nn.ReLU(), nn.ModuleDict({"deep": layer(10, 20, 0.5)}), nn.Linear(10, 2))
    axes = draws(plot.density(model))
    assert [bar.get_width() for bar in axes.patches] == [pytest.approx(10), pytest.approx(50)]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0  (20 × 30)", "2.deep  (10 × 20)"]
    assert [text.get_text() for text in axes.texts] == ["10 %, 60", "50 %, 100"]
    assert axes.lines[0].get_xdata()[0] == pytest.approx(100 * 160 / 800) and "20 % in all, 160 connections" in axes.get_xlabel()
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first layer on top
    assert plot.density(layer(2, 2, 0.5)).get_yticklabels()[0].get_text().startswith("(model)")


def test_density_of_very_many_layers_stays_readable():
    axes = draws(plot.density({f"layer.{i}": Pattern.random((10, 10), i % 100, 0) for i in range(500)}))
    boxes = [text.get_window_extent() for text in axes.get_yticklabels()]
    assert len(axes.patches) == 500 and all(upper.y0 > lower.y0 + 0.9 * lower.height for upper, lower in zip(boxes, boxes[1:]))


# ---- updates ----


def beside(axes):
    """The legend, which stands right of the data."""
    draws(axes)
    legend = axes.get_legend()
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1 - 1
    assert legend.get_window_extent().x1 <= axes.figure.bbox.x1 + 1
    return [text.get_text() for text in legend.get_texts()]


class Stepper:
    def __init__(self, history):
        self.history = history


@pytest.mark.parametrize("wrap", [list, tuple, Stepper])
def test_exploration(wrap):
    axes = plot.exploration(wrap(records(4)))
    assert [list(line.get_xdata()) for line in axes.lines] == [[50, 100, 150, 200]] * 2
    assert list(axes.lines[1].get_ydata()) == pytest.approx([6, 7, 8, 9]) and beside(axes) == ["0", "2"]
    assert axes.get_xlabel() == "optimiser step" and "(%)" in axes.get_ylabel() and axes.get_ylim()[0] == 0


def test_overlap_and_connections_moved():
    above, below = plot.overlap(Stepper(records(5)))
    assert list(above.lines[0].get_ydata()) == pytest.approx([100, 99, 98, 97, 96]) and beside(above) == ["0", "2"]
    assert [list(line.get_ydata()) for line in below.lines] == [[210, 208, 206, 204, 202]] and "as many grown" in below.get_title(loc="left")
    above, below = plot.overlap(records(5, grown=0.5))
    assert [line.get_ydata()[0] for line in below.lines] == [210, 105] and beside(below) == ["dropped", "grown"]


def test_one_update_and_odd_names_can_be_seen():
    axes = plot.exploration(records(1, names=("", "_hidden")))
    assert beside(axes) == ["(model)", "_hidden"] and all(line.get_marker() == "o" for line in axes.lines)


def test_many_layers_are_told_apart():
    axes = plot.exploration(records(40, names=[f"blocks.{i}.fc" for i in range(60)]))
    assert len(axes.lines) == 60 and len({line.get_color() for line in axes.lines}) == 60
    named = beside(axes)
    assert len(named) == history_module.MANY and named[0] == "blocks.0.fc" and named[-1] == "blocks.59.fc"


def test_a_layer_that_joins_later():
    updates = records(2, names=("0",)) + [r for r in records(4) if r.number >= 2]
    lines = plot.exploration(updates).lines
    assert list(lines[0].get_xdata()) == [50, 100, 150, 200] and list(lines[1].get_xdata()) == [150, 200]


@pytest.mark.parametrize("draw", [plot.exploration, plot.overlap])
def test_updates_that_cannot_be_drawn(draw):
    for source, sentence in ((records(2, tracked=False), "track=True"), ([], "no update"), (3, "stepper"), ("abc", "stepper"), ([1], "stepper")):
        with pytest.raises(SnackError, match=sentence):
            draw(source)


# ---- where they are drawn ----


def test_axes_of_ones_own():
    from matplotlib.figure import Figure

    figure = Figure()
    a, b = figure.subplots(1, 2)
    assert plot.connectivity(layer(4, 5), ax=a) is a and plot.density(layer(4, 5), ax=b) is b and plot.exploration(records(2), ax=a) is a
    assert plot.degrees(layer(4, 5), ax=figure.subplots(2, 1))[0].figure is figure and plot.overlap(records(2), ax=[a, b]) == (a, b)
    for draw, ax in ((plot.connectivity, [a, b]), (plot.degrees, a), (plot.degrees, [a, 3]), (plot.density, 3)):
        with pytest.raises(SnackError, match="expected .* matplotlib Axes"):
            draw(layer(4, 5), ax=ax)


def test_pyplot_is_left_alone():
    code = "import sys, snack; snack.plot.degrees(snack.SparseLinear(4, 5, sparsity=0.5)); sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_layer_on_any_device(device):
    a = layer(30, 40).to(device)
    for axes in (plot.connectivity(a), plot.connectivity(a, (5, 8)), *plot.degrees(a), plot.density(a)):
        draws(axes)
    assert len(plot.connectivity(a).lines[0].get_xdata()) == 120


@pytest.mark.parametrize(
    ("draw", "sentence"),
    [
        (lambda: plot.connectivity(nn.Linear(3, 4)), "a Linear was given.*no sparse layer"),
        (lambda: plot.connectivity(nn.Sequential(layer(4, 5))), "one of its sparse layers: '0'"),
        (lambda: plot.degrees(torch.eye(3)), "a Tensor was given, expected a SparseLinear or a Pattern"),
        (lambda: plot.degrees(SparseLinear(4, 5, sparsity=0.5, device="meta")), "meta device"),
        (lambda: plot.connectivity(layer(4, 6), (2, 4)), "8 values and the layer 6 inputs"),
        (lambda: plot.connectivity(layer(4, 6), 6), "not .height, width."),
        (lambda: plot.connectivity(layer(4, 6), (6,)), "not .height, width."),
        (lambda: plot.connectivity(layer(4, 6), (2.5, 3)), "not .height, width."),
        (lambda: plot.connectivity(layer(4, 6), (-2, -3)), "not .height, width."),
        (lambda: plot.density(nn.Linear(3, 4)), "no sparse layer to draw"),
        (lambda: plot.density({}), "no sparse layer to draw"),
        (lambda: plot.density([layer(3, 4)]), "a list was given, expected a model"),
        (lambda: plot.density({"a": 1}), "a int was given"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(draw, sentence):
    with pytest.raises(SnackError, match=sentence):
        draw()


def test_without_matplotlib_there_is_a_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw, what in ((plot.connectivity, layer(3, 4)), (plot.degrees, layer(3, 4)), (plot.density, layer(3, 4)), (plot.overlap, records(1))):
        with pytest.raises(SnackError, match="pip install 'snack-sparse.plot.'"):
            draw(what)
    monkeypatch.chdir(tmp_path)
    snack.save(layer(3, 4), "m.safetensors")
    assert main(["plot", "m.safetensors"]) == 2 and "needs matplotlib" in capsys.readouterr().err
    assert main(["train"]) == 2 and "or pass --no-figure" in capsys.readouterr().err


# ---- TensorBoard ----


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, global_step):
        self.scalars.append((tag, value, global_step))


def test_every_update_is_logged_once():
    writer, stepper = Writer(), Stepper(records(3))
    log = plot.TensorBoardLog(writer)
    assert log.write(stepper) == 3 and log.write(stepper) == 0
    assert len(writer.scalars) == 3 * (2 + 5 * 2)
    assert ("dst/dropped/0", 99, 100) in writer.scalars and ("dst/explored/2", pytest.approx(0.08), 150) in writer.scalars
    stepper.history = records(5)
    assert log.write(stepper) == 2 and writer.scalars[-1][2] == 250
    assert plot.TensorBoardLog(Writer(), since=4).write(stepper) == 1


def test_what_was_not_tracked_is_not_logged():
    writer = Writer()
    plot.TensorBoardLog(writer, prefix="run/set").write(records(1, names=("",), tracked=False))
    assert [tag for tag, _, _ in writer.scalars] == [
        "run/set/fraction", "run/set/seconds", "run/set/nnz/(model)", "run/set/dropped/(model)", "run/set/grown/(model)",
    ]


def test_what_cannot_be_logged_is_a_sentence():
    with pytest.raises(SnackError, match="a str was given, expected an object with add_scalar"):
        plot.TensorBoardLog("runs/1")
    with pytest.raises(SnackError, match="expected a stepper"):
        plot.TensorBoardLog(Writer()).write(nn.Linear(2, 2))


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    updates = records(3)
    with SummaryWriter(tmp_path) as writer:
        plot.TensorBoardLog(writer).write(updates)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = ("nnz", "dropped", "grown", "overlap", "explored")
    assert set(events.Tags()["scalars"]) == {"dst/fraction", "dst/seconds", *(f"dst/{what}/{name}" for what in names for name in "02")}
    for field, tag in (("overlap", "dst/overlap/2"), ("layers", "dst/dropped/2")):
        found = [(scalar.step, scalar.value) for scalar in events.Scalars(tag)]
        assert found == [(update.step, pytest.approx(getattr(update, field)["2"])) for update in updates]


# ---- the command ----


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    snack.save(nn.Sequential(layer(30, 64), nn.ReLU(), layer(10, 30, 0.5), nn.Linear(10, 2)), "digits.safetensors")
    return "digits.safetensors"


@pytest.mark.parametrize(
    ("options", "picture", "words"),
    [
        ([], "digits-connectivity.png", "(layer 0 of 0, 2)"),
        (["--layer", "2"], "digits-connectivity.png", "(layer 2 of 0, 2)"),
        (["--image", "8x8"], "digits-connectivity.png", "(layer 0 of 0, 2)"),
        (["--image", "4x4x4", "--figure", "a.svg"], "a.svg", "picture: a.svg"),
        (["--kind", "degrees", "--layer", "2"], "digits-degrees.png", "(layer 2"),
        (["--kind", "density"], "digits-density.png", "picture: digits-density.png"),
    ],
)
def test_a_saved_model_is_drawn(file, tmp_path, capsys, options, picture, words):
    assert main(["plot", file, *options]) == 0
    assert (tmp_path / picture).stat().st_size > 5000 and words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["digits.safetensors", "--layer", "1"], "no such sparse layer; its sparse layers are 0, 2"),
        (["digits.safetensors", "--image", "8x9"], "72 values and the layer 64 inputs"),
        (["digits.safetensors", "--image", "64"], "expected height x width"),
        (["digits.safetensors", "--kind", "pie"], "invalid choice: 'pie'"),
        (["digits.safetensors", "--kind", "density", "--layer", "0"], "density draws all layers"),
        (["digits.safetensors", "--kind", "degrees", "--image", "8x8"], "--image is for --kind connectivity"),
        (["digits.safetensors", "--figure", "a.txt"], "no suffix of a picture"),
        (["digits.safetensors", "--figure", "none/a.png"], "cannot be written"),
        (["dense.safetensors"], "holds no sparse layer"),
        (["broken.safetensors"], "not a readable safetensors file"),
        (["none.safetensors"], "there is no file"),
        (["run.json", "--layer", "0"], "--layer is for a model file"),
    ],
)
def test_a_model_that_cannot_be_drawn_is_a_sentence(file, tmp_path, capsys, arguments, sentence):
    snack.save(nn.Linear(3, 4), "dense.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert main(["plot", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not [name for name in tmp_path.iterdir() if not name.suffix == ".safetensors"]


def test_the_command_draws_the_layer_it_says(file, monkeypatch):
    drawn = []
    monkeypatch.setattr(plot, "connectivity", lambda *args, **named: drawn.append((args, named)) or model_module.connectivity(*args, **named))
    assert main(["plot", file, "--layer", "2"]) == 0
    (pattern, shape), named = drawn[0]
    assert pattern.shape == (10, 30) and pattern.nnz == 150 and shape is None and named == {"name": "layer 2"}
    assert math.isclose(pattern.density, 0.5)
