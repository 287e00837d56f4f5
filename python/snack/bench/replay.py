"""Training by replays of captured CUDA graphs: the data are on the card, and a step is one launch.

A contender's step gathers its batch, sets the learning rate, computes forward, loss, backward and optimiser, and moves on to the next batch, all
from counters that are on the card themselves; so the host only launches. Every contender has a stream (with dropout they share one), and they
advance step by step together. The steps that record gradients of absent connections run eagerly, on the same tensors; an edit that gives a layer
other memory (gradual pruning, redistribution) captures the step anew. Rows that do not fill a last batch are left out of an epoch; they are
other rows in every epoch.

``step_time_us``: of replays alone, one contender at a time, after training, as the network then is; ``step_mean_us`` is the same, so the updates are
not in it. Where there is no card, the same steps run eagerly (for tests).
"""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext

import torch

from snack.bench import recipes
from snack.bench.training import Config, Contender, Moment, Run, build, count_right, finish, loss_of, on_device, seeded, steps_an_epoch
from snack.data import Dataset

WARM_UP, CHUNKS, CHUNK = 3, 20, 10
WATCH = 50  # steps between looks at Ctrl-C and the progress bar


class Replayed:
    """One contender and its captured step on ``data``; ``order`` (rows,) are the rows of the epoch, shared by all."""

    def __init__(self, config: Config, contender: Contender, data: Dataset, order: torch.Tensor, steps: int, stream: torch.cuda.Stream | None):
        self.config, self.contender, self.data, self.order, self.steps = config, contender, data, order, steps
        device, total = order.device, config.epochs * steps
        self.is_card = device.type == "cuda"
        self.stream = stream
        self.graph: torch.cuda.CUDAGraph | None = None
        self.at, self.number = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device)
        self.span = torch.arange(config.batch_size, device=device)
        self.rates = torch.tensor([config.lr * recipes.rate_factor(config, step, total) for step in range(total)], device=device)
        self.losses = torch.zeros((), device=device)
        self.right = torch.zeros((), dtype=torch.int64, device=device)

    def on_stream(self):
        """The contender's stream as the current one."""
        return torch.cuda.stream(self.stream) if self.is_card else nullcontext()

    def prepare(self) -> None:
        """Warm up, capture, and put everything back to the start; then the method begins."""
        contender = self.contender
        contender.note_connectivity("before")
        contender.model.train()
        with self.on_stream():
            with self._preserved():
                for _ in range(WARM_UP):
                    self._eager()
                self._capture()
            for state in contender.optimizer.state.values():
                for tensor in state.values():
                    if torch.is_tensor(tensor):
                        tensor.zero_()
        contender.mover = contender.make_mover()

    def advance(self) -> None:
        """One step, and what the method makes of it."""
        contender = self.contender
        with self.on_stream():
            if self.graph is None or contender.mover.armed:
                self._eager()
            else:
                self.graph.replay()
                contender.mover.count()
            contender.steps += 1
            if contender.mover.step():
                contender.updates += 1
                if self.graph is not None and self._addresses() != self._captured_addresses:
                    self._capture()

    def begin_epoch(self) -> None:
        with self.on_stream():
            self.contender.model.train()
            self.at.zero_()
            self.losses.zero_()

    def test(self) -> None:
        """Launch the evaluation; `read` waits for it."""
        with self.on_stream():
            self.right = count_right(self.contender.model, self.data.x_test, self.data.y_test)

    def read(self, epoch: float, steps: int) -> None:
        """One point of the curve."""
        if self.is_card:
            self.stream.synchronize()
        self.contender.loss = self.losses.item() / max(1, steps)
        self.contender.curve.append((epoch, int(self.right) / len(self.data.x_test), self.contender.loss))

    def measure(self) -> None:
        """Times of single replays (of eager steps, where there is no card); the network is as before afterwards."""
        self.contender.model.train()
        chunk = min(CHUNK, self.steps)
        with self.on_stream(), self._preserved(), torch.random.fork_rng(devices=[self.order.device] if self.is_card else []):
            for _ in range(CHUNKS):
                self.at.zero_()
                self.number.zero_()
                self._wait()
                begin = time.perf_counter()
                for _ in range(chunk):
                    self._body() if self.graph is None else self.graph.replay()
                self._wait()
                self.contender.step_times.append((time.perf_counter() - begin) / chunk)

    def _wait(self) -> None:
        if self.is_card:
            self.stream.synchronize()

    def _body(self) -> None:
        """One step from the counters on; gradients are None or 0 before."""
        contender = self.contender
        rows = self.order.index_select(0, self.at + self.span)
        x, y = self.data.x_train.index_select(0, rows), self.data.y_train.index_select(0, rows)
        for group in contender.optimizer.param_groups:
            group["lr"].copy_(self.rates.index_select(0, self.number).squeeze(0))
        loss = loss_of(self.config, contender.model(x), y)
        loss.backward()
        contender.optimizer.step()
        self.losses += loss.detach()
        self.at += self.config.batch_size
        self.number += 1

    def _eager(self) -> None:
        self.contender.optimizer.zero_grad(set_to_none=False)  # the captured gradients, where there are any
        self._body()

    def _capture(self) -> None:
        if not self.is_card:
            return
        self._wait()
        self.graph = None
        self.contender.optimizer.zero_grad(set_to_none=True)  # so that the graph writes gradients and does not add
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self._body()
        self.graph, self._captured_addresses = graph, self._addresses()

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self.contender.model.parameters(), *self.contender.model.buffers())]

    @contextmanager
    def _preserved(self):
        """Parameters, buffers, state of the optimiser and counters are afterwards what they were."""
        tensors = [*(p.data for p in self.contender.model.parameters()), *self.contender.model.buffers(), self.at, self.number, self.losses]
        tensors += [t for state in self.contender.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
        kept = [t.clone() for t in tensors]
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(tensors, kept):
                    tensor.copy_(before)


def train(config: Config, dataset: Dataset, watch=lambda moment: None, should_stop=lambda: False) -> Run:
    """As `training.train`, by replays."""
    dataset = recipes.limited(dataset, config.rows)
    steps = steps_an_epoch(config, len(dataset.x_train))
    contenders = build(config, dataset)
    data = on_device(dataset, config.device)
    rows = torch.zeros(len(data.x_train), dtype=torch.int64, device=config.device)
    run = Run(config, dataset, contenders)
    moment = Moment(config.seed, 0, 0, config.epochs * steps * len(contenders), contenders[0], contenders)
    order = torch.Generator().manual_seed(config.seed)
    with seeded(config):
        replayed = [Replayed(config, c, data, rows, steps, stream) for c, stream in zip(contenders, _streams(config, len(contenders)))]
        _wait_for_all(rows.device)
        for side in replayed:
            side.prepare()
        for epoch in range(config.epochs):
            rows.copy_(torch.randperm(len(rows), generator=order))
            _wait_for_all(rows.device)
            moment.epoch, moment.epoch_end = epoch, False
            done = _epoch(replayed, steps, moment, watch, should_stop)
            for side in replayed:
                side.test()
            for side in replayed:
                side.read(epoch + done / steps, done)
            run.interrupted = done < steps
            if run.interrupted:
                break
            moment.epoch_end = True
            watch(moment)
        for side in replayed:
            side.measure()
    _wait_for_all(rows.device)
    finish(run, data)
    return run


def _epoch(replayed: list[Replayed], steps: int, moment: Moment, watch, should_stop) -> int:
    """All contenders, step by step together. Returns the steps that were made: fewer where the run was stopped."""
    for side in replayed:
        side.begin_epoch()
    for number in range(steps):
        for side in replayed:
            side.advance()
        moment.done += len(replayed)
        if number % WATCH == 0:
            watch(moment)
            if should_stop():
                return number + 1
    return steps


def _streams(config: Config, count: int) -> list[torch.cuda.Stream | None]:
    """One a contender. With dropout one for all: graphs read their place in PyTorch's random stream from memory that they share."""
    if torch.device(config.device).type != "cuda":
        return [None] * count
    if config.dropout > 0:
        return [torch.cuda.Stream(config.device)] * count
    return [torch.cuda.Stream(config.device) for _ in range(count)]


def _wait_for_all(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
