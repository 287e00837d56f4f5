"""One network trained several ways on the same data: dense, dense with a mask, and SNACK.

The engine of ``snack train``. All start from the same numbers (the dense one keeps all of them, the others the same random
fraction; gradual pruning starts with all, too), see the same batches in the same order and use the same optimiser and learning rate. A masked twin
starts from SNACK's initial topology and moves its masks by its own implementation of the same method (:mod:`snack.bench.twins`).

They take turns, an epoch each, so that an interrupted run has comparable curves and a noisy minute hits all. With ``Config.graph`` the steps are
replays of captured CUDA graphs instead (:mod:`snack.bench.replay`).

What is measured, per contender:

* ``step_time_us``: wall time of one training step (gradients cleared, forward, loss, backward, optimiser, method), median and
  interquartile range over all steps; the batch is gathered and moved before the clock starts. ``step_mean_us`` includes the updates' cost.
* ``infer_time_us``: wall time of the forward pass of one row under ``inference_mode``, median, the contenders taking turns call by call.
* ``bytes``: of parameters, of whatever says where the non-zeros are (SNACK's indices, the twin's masks), of gradients and of the
  optimiser's state, counted from the tensors themselves after the last step. Activations and temporaries are not in it.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import nn

from snack.bench import recipes
from snack.bench.network import connections, connectivity, he_, masked_start, mlp, sparse_layers
from snack.bench.recipes import CONTENDERS, METHODS, PROTOCOLS, RECIPES, Config, check
from snack.bench.twins import MaskedTwin
from snack.data import Dataset
from snack.nn import sparsify

__all__ = [
    "CONTENDERS", "METHODS", "PROTOCOLS", "RECIPES", "Config", "Contender", "Moment", "Run", "build", "check", "connections", "connectivity",
    "evaluate", "memory", "records", "sparse_layers", "train",
]  # fmt: skip
EVALUATION_BATCH = 1000


class Method:
    """How the connections of one contender move: what a training loop asks. This one moves nothing."""

    armed = False  # the coming step has to run eagerly, as what it records is no part of a captured one

    def count(self) -> None:
        """A step was replayed from a CUDA graph."""

    def step(self) -> bool:
        """After every step; returns whether the topology changed."""
        return False


class TwinMethod(Method):
    """A masked twin's own."""

    def __init__(self, twin: MaskedTwin, optimizer: torch.optim.Optimizer):
        self.twin, self.optimizer = twin, optimizer

    @property
    def armed(self) -> bool:
        return self.twin.armed

    def step(self) -> bool:
        return self.twin.step(self.optimizer)


class SnackMethod(Method):
    """A stepper of snack.dst."""

    def __init__(self, stepper):
        self.stepper = stepper

    @property
    def armed(self) -> bool:
        return self.stepper.armed

    def count(self) -> None:
        self.stepper.count_step()

    def step(self) -> bool:
        return self.stepper.step() is not None


@dataclass
class Contender:
    """One network, its optimiser, and what happened to it so far. ``name``: its kind, and with ``Config.compare`` the method after a colon."""

    name: str
    kind: str  # of CONTENDERS
    method: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    make_mover: Callable[[], Method]
    mover: Method = field(default_factory=Method)
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    connectivity: dict[str, torch.Tensor] = field(default_factory=dict)  # "before", "after": outgoing connections of each input feature
    steps: int = 0
    updates: int = 0
    loss: float = float("nan")  # of the newest step that was looked at
    step_times: list[float] = field(default_factory=list)  # seconds
    infer_times: list[float] = field(default_factory=list)  # seconds
    curve: list[tuple[float, float, float]] = field(default_factory=list)  # (epoch, test accuracy, mean training loss of that epoch)

    def note_connectivity(self, when: str) -> None:
        """Keep where the first layer's connections are; of SNACK alone."""
        if self.kind == "snack":
            self.connectivity[when] = connectivity(self.model)

    @property
    def accuracy(self) -> float | None:
        """Newest test accuracy in [0, 1], None before the first evaluation."""
        return self.curve[-1][1] if self.curve else None


@dataclass
class Moment:
    """Where a run is; handed to the watcher after every step."""

    seed: int
    epoch: int  # of config.epochs, from 0
    done: int  # steps done by all contenders together
    total: int
    current: Contender
    contenders: list[Contender]
    epoch_end: bool = False  # all have finished (and been tested after) epoch number ``epoch``


@dataclass
class Run:
    """A finished or interrupted run over one seed."""

    config: Config
    dataset: Dataset
    contenders: list[Contender]
    interrupted: bool = False

    def of(self, name: str) -> Contender:
        """The first contender of that name or kind."""
        return next(c for c in self.contenders if name in (c.name, c.kind))


# ---- building the contenders -----------------------------------------------------------------------------------------------------------


def steps_an_epoch(config: Config, rows: int) -> int:
    """Batches of an epoch; a captured step has one size, so what is left over is left out there."""
    return max(1, rows // config.batch_size) if config.graph else -(-rows // config.batch_size)


def build(config: Config, dataset: Dataset) -> list[Contender]:
    """The networks with their optimisers, on the device: dense, then a masked twin and SNACK for every method. The same config gives the same
    numbers, whatever ran before."""
    check(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        dense = mlp(dataset.features, config.hidden, dataset.classes, recipes.ACTIVATIONS[config.activation], config.dropout)
        if config.init == "he":
            he_(dense)
    contenders: list[Contender] = []
    for method in config.methods:
        contenders += _of_method(config, dataset, method, dense)
    if "dense" in config.contenders:
        contenders.insert(0, _contender(config, "dense", "dense", "dense", dense, lambda optimizer: Method()))
    return contenders


def _of_method(config: Config, dataset: Dataset, method: str, dense: nn.Sequential) -> list[Contender]:
    """The masked twin of a method, if wanted and known, and SNACK."""
    steps = steps_an_epoch(config, len(dataset.x_train))
    every, t_end = config.every or steps, max(1, round(config.t_end * config.epochs * steps))
    options = recipes.stepper_options(config, method, every, t_end)
    sparse = sparsify(
        copy.deepcopy(dense),
        sparsity=0.0 if method == "gmp" else config.sparsity,
        distribution="uniform" if method == "gmp" else config.distribution,
        how="random",
        rescale=None if config.init == "sparse" else False,
        exclude=[] if config.sparse_output else [str(len(dense) - 1)],
        generator=torch.Generator().manual_seed(config.seed),
    )
    suffix, found = f":{method}" if config.compare else "", []
    if "dense_mask" in config.contenders and recipes.has_twin(method):
        decay = True if config.drop_decay == "cosine" else None
        numbers = (config.seed, every, config.drop_fraction, t_end, decay, config.sparsity, config.grow_init)
        twin = MaskedTwin(*masked_start(sparse), method, *numbers)
        found.append(_contender(config, f"dense_mask{suffix}", "dense_mask", method, twin, lambda optimizer: TwinMethod(twin, optimizer)))

    def stepper(optimizer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # GMP's, that it begins with a full network: it is meant to
            return SnackMethod(METHODS[method][0](sparse, optimizer, **options))

    return [*found, _contender(config, f"snack{suffix}", "snack", method, sparse, stepper)]


def _contender(config: Config, name: str, kind: str, method: str, model: nn.Module, mover) -> Contender:
    model.to(config.device)
    optimizer = make_optimizer(config, model)
    return Contender(name, kind, method, model, optimizer, lambda: mover(optimizer))


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The stock optimiser that all use. That of a captured step takes its learning rate from memory of the card."""
    lr = torch.tensor(config.lr, device=config.device) if config.graph else config.lr
    fused = {"fused": True} if config.graph else {}
    if config.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr, weight_decay=config.weight_decay, **fused, **({"capturable": True} if fused else {}))
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=config.momentum, weight_decay=config.weight_decay, **fused)


def loss_of(config: Config, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """outputs (batch, classes), labels (batch,) -> the mean loss of a row."""
    if config.loss == "cross_entropy":
        return nn.functional.cross_entropy(outputs, labels)
    wanted = (labels[:, None] == torch.arange(outputs.shape[1], device=labels.device)).to(outputs)  # one_hot() looks at the labels, and waits
    return nn.functional.mse_loss(outputs.sigmoid(), wanted, reduction="sum") / (2 * len(labels))


# ---- training --------------------------------------------------------------------------------------------------------------------------


def train(config: Config, dataset: Dataset, watch=lambda moment: None, should_stop=lambda: False) -> Run:
    """Trains the contenders and measures them. ``watch(Moment)`` is called after every step; ``should_stop()`` is asked then and ends the run
    early and cleanly: what was done is evaluated and measured, and ``Run.interrupted`` is set."""
    if config.graph:
        from snack.bench import replay

        return replay.train(config, dataset, watch, should_stop)
    dataset = recipes.limited(dataset, config.rows)
    contenders = build(config, dataset)
    data = on_device(dataset, config.device)
    total = config.epochs * steps_an_epoch(config, len(data.x_train))
    run = Run(config, dataset, contenders)
    moment = Moment(config.seed, 0, 0, total * len(contenders), contenders[0], contenders)
    for contender in contenders:
        contender.mover = contender.make_mover()
        contender.scheduler = torch.optim.lr_scheduler.LambdaLR(contender.optimizer, lambda step: recipes.rate_factor(config, step, total))
        contender.note_connectivity("before")
    order = torch.Generator().manual_seed(config.seed)
    with seeded(config):
        for epoch in range(config.epochs):
            batches = torch.randperm(len(data.x_train), generator=order).to(config.device).split(config.batch_size)
            moment.epoch, moment.epoch_end = epoch, False
            for contender in contenders:
                moment.current = contender
                run.interrupted = not _train_epoch(config, contender, data, batches, moment, watch, should_stop)
                if run.interrupted:
                    break
            if run.interrupted:
                break
            moment.epoch_end = True
            watch(moment)
    finish(run, data)
    return run


def on_device(dataset: Dataset, device: str) -> Dataset:
    """The data set where the networks are."""
    return replace(dataset, **{k: getattr(dataset, k).to(device) for k in ("x_train", "y_train", "x_test", "y_test")})


@contextmanager
def seeded(config: Config):
    """Dropout draws from PyTorch's global stream: the seed's inside, and afterwards it is as it was."""
    device = torch.device(config.device)
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, enabled=config.dropout > 0):
        if config.dropout > 0:
            torch.manual_seed(config.seed)
        yield


def finish(run: Run, data: Dataset) -> None:
    """What is measured after training."""
    _measure_inference(run.contenders, data.x_test[:1])
    for contender in run.contenders:
        contender.note_connectivity("after")


def _train_epoch(config: Config, contender: Contender, data: Dataset, batches, moment: Moment, watch, should_stop) -> bool:
    """One epoch of one contender and its test. Returns False where the run was stopped; then tested as far as it came."""
    losses = torch.zeros((), device=data.x_train.device)
    contender.model.train()
    stopped = False
    for number, rows in enumerate(batches):
        loss = _train_step(config, contender, data.x_train[rows], data.y_train[rows])
        losses += loss
        if number % 10 == 0:
            contender.loss = loss.item()
        moment.done += 1
        watch(moment)
        if stopped := should_stop():
            break
    epoch = moment.epoch + (number + 1) / len(batches)
    contender.curve.append((epoch, evaluate(contender.model, data.x_test, data.y_test), losses.item() / (number + 1)))
    return not stopped


def _train_step(config: Config, contender: Contender, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One timed step; returns the loss, detached."""
    _synchronize(x.device)
    begin = time.perf_counter()
    contender.optimizer.zero_grad(set_to_none=True)
    loss = loss_of(config, contender.model(x), y)
    loss.backward()
    contender.optimizer.step()
    changed = contender.mover.step()
    _synchronize(x.device)
    contender.step_times.append(time.perf_counter() - begin)
    contender.scheduler.step()
    contender.steps += 1
    contender.updates += bool(changed)
    return loss.detach()


@torch.inference_mode()
def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Fraction of the rows of ``x`` (n, features) that are classified as ``y`` (n,) says."""
    return int(count_right(model, x, y)) / len(x)


@torch.inference_mode()
def count_right(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How many rows are classified as ``y`` says, as a tensor that nobody has waited for. The model is in evaluation mode afterwards."""
    model.eval()
    return sum((model(a).argmax(1) == b).sum() for a, b in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH)))


@torch.inference_mode()
def _measure_inference(contenders: list[Contender], row: torch.Tensor, calls: int = 500, warm_up: int = 50) -> None:
    """Times single calls of the forward pass on ``row`` (1, features), the contenders taking turns."""
    for contender in contenders:
        contender.model.eval()
        contender.infer_times.clear()
    for call in range(warm_up + calls):
        for contender in contenders:
            _synchronize(row.device)
            begin = time.perf_counter()
            contender.model(row)
            _synchronize(row.device)
            if call >= warm_up:
                contender.infer_times.append(time.perf_counter() - begin)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- what came out ---------------------------------------------------------------------------------------------------------------------


def memory(contender: Contender) -> dict[str, int]:
    """Bytes of ``weights`` (all parameters), ``indices`` (or masks), ``gradients`` and ``optimizer`` state, as they are now."""
    parameters = list(contender.model.parameters())
    state = [t for p in parameters for t in contender.optimizer.state.get(p, {}).values() if torch.is_tensor(t)]
    groups = {
        "weights": parameters,
        "indices": contender.model.buffers(),
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": state,
    }
    return {name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in groups.items()}


def spread(times: list[float]) -> tuple[float, float]:
    """(median, interquartile range) in µs of times in seconds."""
    if len(times) < 2:
        return (times[0] * 1e6 if times else float("nan")), 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return middle * 1e6, (high - low) * 1e6


def records(run: Run) -> list[dict]:
    """One record a contender, ready for JSON. A quantity that was not measured is absent, and so is a contender that took no step."""
    return [_record(run, contender) for contender in run.contenders if contender.steps]


def _record(run: Run, contender: Contender) -> dict:
    config, dataset = run.config, run.dataset
    record = {
        "routine": "train",
        "contender": contender.name,
        "kind": contender.kind,
        "data": dataset.name,
        "image_shape": dataset.image_shape,
        "network": "-".join(str(n) for n in (dataset.features, *config.hidden, dataset.classes)),
        **{k: v for k, v in asdict(config).items() if k not in ("hidden", "every", "compare", "contenders", "rows")},
        "method": contender.method if contender.kind != "dense" or config.compare else config.method,
        "rows": [len(dataset.x_train), len(dataset.x_test)],
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "params": sum(p.numel() for p in contender.model.parameters()),
        "nnz": connections(contender.model),
        "steps": contender.steps,
        "updates": contender.updates,
        "interrupted": run.interrupted,
        "accuracy": contender.accuracy,
        "accuracy_curve": [[round(epoch, 3), accuracy] for epoch, accuracy, _ in contender.curve],
        "loss_curve": [[round(epoch, 3), loss] for epoch, _, loss in contender.curve if math.isfinite(loss)],
        "bytes": memory(contender),
    }
    record["step_time_us"], record["step_time_iqr_us"] = spread(contender.step_times)
    record["step_mean_us"] = statistics.fmean(contender.step_times) * 1e6
    if contender.infer_times:
        record["infer_time_us"], record["infer_time_iqr_us"] = spread(contender.infer_times)
    if contender.kind == "snack":
        record["connectivity"] = {when: counts.tolist() for when, counts in contender.connectivity.items()}
    return record
