"""What to train: the settings of a run, what each data set needs, and whole protocols from papers.

A protocol (``snack train --recipe``) fixes data, network, loss and schedule, so that its accuracies can be held against published ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from snack import ops
from snack.bench.twins import METHODS as TWINS
from snack.data import Dataset
from snack.dst import GMP, ITOP, MEST, SET, SNFS, Cosine, RigL, SRigL, Static
from snack.errors import SnackError

# Name -> (stepper, its options). The masked twin (snack.bench.twins) knows those of TWINS.
METHODS = {
    "set": (SET, {}),
    "set-magnitude": (SET, {"drop": "magnitude"}),
    "rigl": (RigL, {}),
    "snfs": (SNFS, {}),
    "gmp": (GMP, {}),
    "mest": (MEST, {}),
    "itop": (ITOP, {}),
    "srigl": (SRigL, {}),
    "static": (Static, {}),
}
ACTIVATIONS = {"relu": torch.nn.ReLU, "sigmoid": torch.nn.Sigmoid}
LOSSES = ("cross_entropy", "mse")
CONTENDERS = ("dense", "dense_mask", "snack")


@dataclass(frozen=True)
class Config:
    """What to train. ``every`` None means once an epoch; ``t_end`` is the fraction of all steps after which the topology rests.

    ``compare``: methods to train side by side, in place of ``method`` alone. ``contenders``: which of dense, masked twin and SNACK.
    ``drop_decay``: of the drop fraction: "method" (as the method says) or "cosine" (to 0 at ``t_end``). ``schedule`` of the learning rate: "cosine"
    (to 0), "constant" or "step" (a tenth every ``lr_steps``). ``loss`` "mse": of the sigmoid of the outputs against the label as a unit
    vector, half the sum of squares of a row, mean over the batch. ``rows``: training and test rows to use, the first ones; 0: all.
    ``init``: "sparse", uniform within 1/sqrt(connections of a row), or "he", uniform within sqrt(6/in) with biases 0, whatever the sparsity, as
    SET's authors draw. ``grow_init``: a grown connection begins at "zero", or at a number drawn as by "he".
    ``graph``: steps are replays of captured CUDA graphs.
    """

    hidden: tuple[int, ...] = (300, 100)
    sparsity: float = 0.95
    distribution: str = "uniform"
    method: str = "set"
    compare: tuple[str, ...] = ()
    contenders: tuple[str, ...] = CONTENDERS
    every: int | None = None
    drop_fraction: float = 0.3
    drop_decay: str = "method"
    t_end: float = 0.75
    sparse_output: bool = False
    epochs: int = 20
    batch_size: int = 100
    optimizer: str = "sgd"
    lr: float = 0.05
    schedule: str = "cosine"
    lr_steps: int = 25_000
    momentum: float = 0.9
    weight_decay: float = 5e-4
    activation: str = "relu"
    loss: str = "cross_entropy"
    dropout: float = 0.0
    init: str = "sparse"
    grow_init: str = "zero"
    rows: tuple[int, int] = (0, 0)
    seed: int = 0
    device: str = "cpu"
    graph: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods SNACK trains with."""
        return self.compare or (self.method,)


# What each data set needs to do well within a minute or two on two cores. Anything the user says goes first.
RECIPES = {
    "digits": {"hidden": (1000, 300), "epochs": 40, "batch_size": 32, "lr": 0.1, "weight_decay": 5e-3},
    "mnist": {"hidden": (300, 100), "epochs": 20, "batch_size": 100, "lr": 0.1},
    "fashion-mnist": {"hidden": (300, 100), "epochs": 20, "batch_size": 100, "lr": 0.05},
    "cifar10": {"hidden": (1000, 500), "epochs": 10, "batch_size": 100, "lr": 0.02},
    "madelon": {"hidden": (300, 100), "epochs": 40, "batch_size": 100, "lr": 0.01},
}


def _er(sizes: tuple[int, ...], epsilon: float) -> float:
    """Sparsity of layers with epsilon * (in + out) connections each (Erdős-Rényi, Mocanu et al. 2018, eq. 1), the output layer left out."""
    pairs = list(zip(sizes, sizes[1:]))
    return 1.0 - sum(epsilon * (a + b) for a, b in pairs) / sum(a * b for a, b in pairs)


_FASHION = {
    "data": "fashion-mnist", "hidden": (1000, 1000, 1000), "distribution": "er", "sparsity": _er((784, 1000, 1000, 1000), 13),
    "method": "set", "drop_fraction": 0.3, "t_end": 1.0, "epochs": 400, "batch_size": 40, "lr": 0.05, "schedule": "constant", "weight_decay": 2e-4,
    "dropout": 0.2, "init": "he", "grow_init": "he",
}  # fmt: skip

PROTOCOLS = {
    # LeNet-300-100 of sparse_learning (Dettmers and Zettlemoyer 2019), mnist_cifar/main.py: 90 % of the training rows, all layers sparse.
    "lenet-300-100": {
        "data": "mnist", "hidden": (300, 100), "distribution": "er", "sparsity": 0.9, "sparse_output": True,
        "method": "set-magnitude", "drop_fraction": 0.5, "drop_decay": "cosine", "t_end": 1.0,
        "epochs": 100, "batch_size": 100, "lr": 0.1, "schedule": "step", "lr_steps": 25_000, "weight_decay": 5e-4, "rows": (54_000, 0),
    },
    # Truly-Sparse-Training (boqian333), Fashion-MNIST: the first 5,000 and 1,000 rows, epsilon 13, zeta 0.3.
    "fashion-mlp": {**_FASHION, "rows": (5000, 1000)},
    # The tutorial of dcmocanu: 2,000 rows, sigmoid outputs and squared error.
    "fashion-mlp-mse": {**_FASHION, "rows": (2000, 1000), "loss": "mse", "dropout": 0.0},
    # Own protocol: Erdős-Rényi with epsilon 20, no augmentation.
    "cifar10-mlp": {
        "data": "cifar10", "hidden": (1000, 1000, 1000), "distribution": "er", "sparsity": _er((3072, 1000, 1000, 1000), 20), "method": "set",
        "drop_fraction": 0.3, "t_end": 0.75, "epochs": 50, "batch_size": 100, "lr": 0.05, "schedule": "cosine", "weight_decay": 5e-4,
    },
}  # fmt: skip


def limited(dataset: Dataset, rows: tuple[int, int]) -> Dataset:
    """The first rows of each part, standardised as the whole is; 0: all."""
    train, test = (n or None for n in rows)
    return replace(
        dataset, x_train=dataset.x_train[:train], y_train=dataset.y_train[:train], x_test=dataset.x_test[:test], y_test=dataset.y_test[:test]
    )


def rate_factor(config: Config, step: int, total: int) -> float:
    """What the learning rate is multiplied by at optimiser step ``step`` (from 0) of ``total``."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "step":
        return 0.1 ** (step // config.lr_steps)
    return 0.5 * (1.0 + math.cos(math.pi * step / total))


def he_values(seed: int, layer, rows: torch.Tensor, cols: torch.Tensor, context) -> torch.Tensor:
    """Uniform within sqrt(6/in): of position p, draw p of the stream (seed, update, layer, 1)."""
    key = ops.random_key(seed, context.update, context.number, 1)
    return (2 * ops.random_uniform(key, rows * layer.in_features + cols) - 1) * math.sqrt(6 / layer.in_features)


def stepper_options(config: Config, method: str, every: int, t_end: int) -> dict[str, object]:
    """The options of the method's stepper."""
    options: dict[str, object] = {**METHODS[method][1], "every": every, "t_end": t_end, "seed": config.seed}
    if method == "gmp":
        return options | {"sparsity": config.sparsity}
    if config.grow_init == "he":
        options["grow_init"] = lambda layer, rows, cols, context: he_values(config.seed, layer, rows, cols, context)
    if method == "itop" and config.drop_fraction == Config.drop_fraction:
        return options  # its own is larger, which is what it is about
    return options | {"drop_fraction": Cosine(config.drop_fraction) if config.drop_decay == "cosine" else config.drop_fraction}


def check(config: Config) -> None:
    """Raises SnackError where a figure makes no sense; before anything is built."""

    def require(good: bool, words: str) -> None:
        if not good:
            raise SnackError(words)

    require(
        0.0 <= config.sparsity < 1.0,  # NaN fails too
        f"sparsity {config.sparsity}: expected at least 0 and below 1, the fraction of connections to leave out, for example 0.95",
    )
    for name, value, known in (
        ("optimizer", config.optimizer, ("sgd", "adam")),
        ("schedule", config.schedule, ("cosine", "constant", "step")),
        ("activation", config.activation, tuple(ACTIVATIONS)),
        ("loss", config.loss, LOSSES),
        ("init", config.init, ("sparse", "he")),
        ("grow_init", config.grow_init, ("zero", "he")),
        *(("method", method, tuple(METHODS)) for method in config.methods),
        *(("contender", contender, CONTENDERS) for contender in config.contenders),
    ):
        require(value in known, f"unknown {name} {value!r}: expected one of {', '.join(known)}")
    require(len(set(config.methods)) == len(config.methods), f"compare {','.join(config.methods)}: expected every method once")
    require("snack" in config.contenders, f"contenders {','.join(config.contenders)}: expected snack among them, and dense or dense_mask if wanted")
    require(
        0.0 <= config.drop_fraction < 1.0,
        f"drop_fraction {config.drop_fraction}: expected at least 0 and below 1, the fraction of connections an update moves",
    )
    require(0.0 <= config.t_end <= 1.0, f"t_end {config.t_end}: expected a fraction of the training, from 0 to 1")
    require(0.0 <= config.dropout < 1.0, f"dropout {config.dropout}: expected at least 0 and below 1")
    for name in ("epochs", "batch_size", *(["every"] if config.every is not None else [])):
        require(getattr(config, name) >= 1, f"{name} {getattr(config, name)}: expected at least 1")
    widths = config.hidden
    require(bool(widths) and min(widths) >= 1, f"hidden {widths}: expected one width or more, each at least 1, for example 300,100")
    require(0.0 <= config.weight_decay < float("inf"), f"weight_decay {config.weight_decay}: expected 0 or a positive number, for example 0.0005")
    require(0 <= config.seed < 2**63, f"seed {config.seed}: expected a whole number from 0 to 2^63 - 1")
    require(0.0 < config.lr < float("inf"), f"lr {config.lr}: expected a positive number, for example 0.05")


def has_twin(method: str) -> bool:
    """Whether the method is written for masks, too."""
    return method in TWINS
