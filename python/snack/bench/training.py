"""One network trained three ways on the same data: dense, dense with a mask, and SNACK.

The engine of ``snack train``. All three start from the same numbers (the dense one keeps all of them, the other two the same random
fraction), see the same batches in the same order and use the same optimiser and learning rate. The masked twin starts from SNACK's initial
topology and moves its masks by its own implementation of the same method (:mod:`snack.bench.twins`).

They take turns, an epoch each, so that an interrupted run has three comparable curves and a noisy minute hits all three.

What is measured, per contender:

* ``step_time_us``: wall time of one training step (gradients cleared, forward, loss, backward, optimiser, method), median and
  interquartile range over all steps; the batch is gathered and moved before the clock starts. ``step_mean_us`` includes the updates' cost.
* ``infer_time_us``: wall time of the forward pass of one row under ``inference_mode``, median, the three taking turns call by call.
* ``bytes``: of parameters, of whatever says where the non-zeros are (SNACK's indices, the twin's masks), of gradients and of the
  optimiser's state, counted from the tensors themselves after the last step. Activations and temporaries are not in it.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import nn

from snack.bench.twins import METHODS, MaskedLinear, MaskedTwin
from snack.data import Dataset
from snack.dst import SET, RigL, Static
from snack.errors import SnackError
from snack.nn import SparseLinear, sparsify

CONTENDERS = ("dense", "dense_mask", "snack")
EVALUATION_BATCH = 1000


@dataclass(frozen=True)
class Config:
    """What to train. ``every`` None means once an epoch; ``t_end`` is the fraction of all steps after which the topology rests."""

    hidden: tuple[int, ...] = (300, 100)
    sparsity: float = 0.95
    distribution: str = "uniform"
    method: str = "set"
    every: int | None = None
    drop_fraction: float = 0.3
    t_end: float = 0.75
    sparse_output: bool = False
    epochs: int = 20
    batch_size: int = 100
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    seed: int = 0
    device: str = "cpu"


# What each data set needs to do well within a minute or two on two cores. Anything the user says goes first.
RECIPES = {
    "digits": {"hidden": (1000, 300), "epochs": 40, "batch_size": 32, "lr": 0.1, "weight_decay": 5e-3},
    "mnist": {"hidden": (300, 100), "epochs": 20, "batch_size": 100, "lr": 0.1},
    "fashion-mnist": {"hidden": (300, 100), "epochs": 20, "batch_size": 100, "lr": 0.05},
    "cifar10": {"hidden": (1000, 500), "epochs": 10, "batch_size": 100, "lr": 0.02},
    "madelon": {"hidden": (300, 100), "epochs": 40, "batch_size": 100, "lr": 0.01},
}


@dataclass
class Contender:
    """One of the three: its network, its optimiser, and what happened to it so far."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    method_step: Callable[[], bool]  # called after the optimiser's step; returns whether the topology changed
    steps: int = 0
    updates: int = 0
    loss: float = float("nan")  # of the newest step that was looked at
    step_times: list[float] = field(default_factory=list)  # seconds
    infer_times: list[float] = field(default_factory=list)  # seconds
    curve: list[tuple[float, float, float]] = field(default_factory=list)  # (epoch, test accuracy, mean training loss of that epoch)

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
    epoch_end: bool = False  # all three have finished (and been tested after) epoch number ``epoch``


@dataclass
class Run:
    """A finished or interrupted run over one seed."""

    config: Config
    dataset: Dataset
    contenders: list[Contender]
    connectivity: dict[str, torch.Tensor]  # "before", "after": outgoing connections of each input feature in SNACK's first layer
    interrupted: bool = False

    def of(self, name: str) -> Contender:
        """The contender called ``name``."""
        return next(c for c in self.contenders if c.name == name)


# ---- building the three ----------------------------------------------------------------------------------------------------------------


def mlp(features: int, hidden: tuple[int, ...], classes: int) -> nn.Sequential:
    """features → hidden… → classes, ReLU between the layers."""
    sizes = [features, *hidden, classes]
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def check(config: Config) -> None:
    """Raises SnackError where a figure makes no sense; before anything is built."""
    if not 0.0 <= config.sparsity < 1.0:  # NaN fails too
        raise SnackError(
            f"sparsity {config.sparsity}: expected at least 0 and below 1, the fraction of connections to leave out, for example 0.95"
        )
    if config.method not in METHODS:
        raise SnackError(f"unknown method {config.method!r}: expected one of {', '.join(METHODS)}")
    if config.optimizer not in ("sgd", "adam"):
        raise SnackError(f"unknown optimizer {config.optimizer!r}: expected sgd or adam")
    if not 0.0 <= config.drop_fraction < 1.0:
        raise SnackError(f"drop_fraction {config.drop_fraction}: expected at least 0 and below 1, the fraction of connections an update moves")
    if not 0.0 <= config.t_end <= 1.0:
        raise SnackError(f"t_end {config.t_end}: expected a fraction of the training, from 0 to 1")
    for name in ("epochs", "batch_size", *(["every"] if config.every is not None else [])):
        if getattr(config, name) < 1:
            raise SnackError(f"{name} {getattr(config, name)}: expected at least 1")
    if not config.hidden or min(config.hidden) < 1:
        raise SnackError(f"hidden {config.hidden}: expected one width or more, each at least 1, for example 300,100")
    if not 0.0 <= config.weight_decay < float("inf"):
        raise SnackError(f"weight_decay {config.weight_decay}: expected 0 or a positive number, for example 0.0005")
    if not 0 <= config.seed < 2**63:
        raise SnackError(f"seed {config.seed}: expected a whole number from 0 to 2^63 - 1")
    if not 0.0 < config.lr < float("inf"):
        raise SnackError(f"lr {config.lr}: expected a positive number, for example 0.05")


def build(config: Config, dataset: Dataset) -> list[Contender]:
    """The three networks with their optimisers, on the device. The same config gives the same numbers, whatever ran before."""
    check(config)
    steps_an_epoch = -(-len(dataset.x_train) // config.batch_size)
    total = config.epochs * steps_an_epoch
    every, t_end = config.every or steps_an_epoch, max(1, round(config.t_end * total))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        dense = mlp(dataset.features, config.hidden, dataset.classes)
    output = str(len(dense) - 1)
    sparse = sparsify(
        copy.deepcopy(dense),
        sparsity=config.sparsity,
        distribution=config.distribution,
        how="random",
        exclude=[] if config.sparse_output else [output],
        generator=torch.Generator().manual_seed(config.seed),
    )
    masked = MaskedTwin(*masked_start(sparse), config.method, config.seed, every, config.drop_fraction, t_end)
    rule = {"set": SET, "rigl": RigL, "static": Static}[config.method]

    def contender(name, model, make_step):
        model.to(config.device)
        optimizer = make_optimizer(config, model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
        return Contender(name, model, optimizer, scheduler, make_step(optimizer))

    def snack_step(optimizer):
        stepper = rule(sparse, optimizer, every=every, drop_fraction=config.drop_fraction, t_end=t_end, seed=config.seed)
        return lambda: stepper.step() is not None

    return [
        contender("dense", dense, lambda optimizer: lambda: False),
        contender("dense_mask", masked, lambda optimizer: lambda: masked.step(optimizer)),
        contender("snack", sparse, snack_step),
    ]


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The stock optimiser that all three use."""
    if config.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def sparse_layers(model: nn.Module) -> dict[str, nn.Module]:
    """SNACK's layers in ``model`` by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}


def masked_start(sparse: nn.Module) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A dense copy of ``sparse`` with the same numbers, and {layer: mask} of its topology: what :class:`MaskedTwin` starts from."""
    model, masks = copy.deepcopy(sparse), {}
    for name, layer in sparse_layers(sparse).items():
        rows, cols, values = (t.detach() for t in layer.to_coo())
        linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device=values.device, dtype=values.dtype)
        at = (rows.long(), cols.long())
        with torch.no_grad():
            linear.weight.zero_()[at] = values
            if layer.bias is not None:
                linear.bias.copy_(layer.bias)
        masks[name] = torch.zeros_like(linear.weight, dtype=torch.bool)
        masks[name][at] = True
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, linear)
    return model, masks


# ---- training --------------------------------------------------------------------------------------------------------------------------


def train(config: Config, dataset: Dataset, watch=lambda moment: None, should_stop=lambda: False) -> Run:
    """Trains the three and measures them. ``watch(Moment)`` is called after every step; ``should_stop()`` is asked then and ends the run
    early and cleanly: what was done is evaluated and measured, and ``Run.interrupted`` is set."""
    device = torch.device(config.device)
    contenders = build(config, dataset)
    data = replace(dataset, **{k: getattr(dataset, k).to(device) for k in ("x_train", "y_train", "x_test", "y_test")})
    run = Run(config, dataset, contenders, {"before": connectivity(contenders[2].model)})
    moment = Moment(
        config.seed, 0, 0, config.epochs * len(contenders) * -(-len(data.x_train) // config.batch_size), contenders[0], contenders
    )
    order = torch.Generator().manual_seed(config.seed)
    for epoch in range(config.epochs):
        batches = torch.randperm(len(data.x_train), generator=order).to(device).split(config.batch_size)
        moment.epoch, moment.epoch_end = epoch, False
        for contender in contenders:
            moment.current = contender
            run.interrupted = not _train_epoch(contender, data, batches, moment, watch, should_stop)
            if run.interrupted:
                break
        if run.interrupted:
            break
        moment.epoch_end = True
        watch(moment)
    _measure_inference(contenders, data.x_test[:1])
    run.connectivity["after"] = connectivity(contenders[2].model)
    return run


def _train_epoch(contender: Contender, data: Dataset, batches, moment: Moment, watch, should_stop) -> bool:
    """One epoch of one contender and its test. Returns False where the run was stopped; then tested as far as it came."""
    losses = torch.zeros((), device=data.x_train.device)
    contender.model.train()
    stopped = False
    for number, rows in enumerate(batches):
        loss = _train_step(contender, data.x_train[rows], data.y_train[rows])
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


def _train_step(contender: Contender, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One timed step; returns the loss, detached."""
    _synchronize(x.device)
    begin = time.perf_counter()
    contender.optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(contender.model(x), y)
    loss.backward()
    contender.optimizer.step()
    changed = contender.method_step()
    _synchronize(x.device)
    contender.step_times.append(time.perf_counter() - begin)
    contender.scheduler.step()
    contender.steps += 1
    contender.updates += bool(changed)
    return loss.detach()


@torch.inference_mode()
def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Fraction of the rows of ``x`` (n, features) that are classified as ``y`` (n,) says."""
    model.eval()
    right = sum((model(a).argmax(1) == b).sum() for a, b in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH)))
    return int(right) / len(x)


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


def connectivity(model: nn.Module) -> torch.Tensor:
    """Outgoing connections of each input feature in the first layer, int64 (features,). A layer that stayed dense has all of them."""
    known = sparse_layers(model).values()
    first = next(m for m in model.modules() if isinstance(m, nn.Linear) or m in known)
    if isinstance(first, nn.Linear):
        return torch.full((first.in_features,), first.out_features)
    return torch.bincount(first.pattern.cols.long().cpu(), minlength=first.in_features)


def connections(model: nn.Module) -> int:
    """Live connections of the whole network, biases not counted: what is not masked away or not stored does not count."""
    total = 0
    for module in model.modules():
        if isinstance(module, MaskedLinear) or module in sparse_layers(module).values():
            total += module.nnz
        elif isinstance(module, nn.Linear):
            total += module.weight.numel()
    return total


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
    result = [_record(run, contender) for contender in run.contenders if contender.steps]
    if result and result[-1]["contender"] == "snack":
        result[-1]["connectivity"] = {when: counts.tolist() for when, counts in run.connectivity.items()}
    return result


def _record(run: Run, contender: Contender) -> dict:
    config, dataset = run.config, run.dataset
    record = {
        "routine": "train",
        "contender": contender.name,
        "data": dataset.name,
        "image_shape": dataset.image_shape,
        "network": "-".join(str(n) for n in (dataset.features, *config.hidden, dataset.classes)),
        **{k: v for k, v in asdict(config).items() if k not in ("hidden", "every")},
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
    return record
