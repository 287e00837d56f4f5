"""A training that is saved, thrown away and loaded equals the one that never stopped, bit for bit; and files that do not fit change nothing."""

import copy
import itertools
import json
import os
import random

import numpy
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks
import snack
from checks import fails
from snack import dst
from snack.nn import SparseLinear, topology_hash

METHODS = {
    "Static": lambda m, o: dst.Static(m, o),
    "SET": lambda m, o: dst.SET(m, o, every=2, seed=4),
    "ITOP": lambda m, o: dst.ITOP(m, o, every=3),
    "RigL": lambda m, o: dst.RigL(m, o, every=3, t_end=100),
    "SRigL": lambda m, o: dst.SRigL(m, o, every=2, t_end=9),
    "MEST": lambda m, o: dst.MEST(m, o, every=3, t_end=100, track=True),
    "SNFS": lambda m, o: dst.SNFS(m, o, every=5, t_end=100, grow=dst.MomentumGrowth(window=4)),
    "GMP": lambda m, o: dst.GMP(m, o, sparsity=0.95, every=2, t_end=10),
    "global": lambda m, o: dst.DST(m, o, drop="magnitude", grow="gradient", scope="global", every=3),
}
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "fused": lambda p: snack.optim.AdamW(p, lr=1e-2, fused_grad=True),
}
STEPS = 12


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Training:
    """Everything a script holds. `at` is the place in the data."""

    def __init__(self, method="RigL", optimizer="momentum", seed=0, dtype=torch.float32, wrap=lambda m: m, sparsity=0.7):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            SparseLinear(20, 16, sparsity=sparsity, dtype=dtype), nn.BatchNorm1d(16, dtype=dtype), nn.Dropout(0.2), nn.ReLU(),
            SparseLinear(16, 12, sparsity=sparsity, dtype=dtype), nn.Linear(12, 3, dtype=dtype),
        )
        self.wrapped = wrap(self.model)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.stepper = METHODS[method](self.wrapped, self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=4), torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6])],
            milestones=[4],
        )
        self.at = 0

    def run(self, until):
        dtype = self.model[0].values.dtype
        while self.at < until:
            self.at += 1
            # Data, noise and labels from every generator that a script may use.
            x = (torch.randn(8, 20) + random.random() + float(numpy.random.rand())).to(dtype)
            self.optimizer.zero_grad()
            (self.wrapped(x) - 1).square().mean().backward()
            self.optimizer.step()
            self.stepper.step()
            self.scheduler.step()
        return self

    def save(self, path):
        snack.save_training(path, self.wrapped, self.optimizer, self.stepper, scheduler=self.scheduler, more={"at": self.at})

    def load(self, path):
        self.at = snack.load_training(path, self.wrapped, self.optimizer, self.stepper, scheduler=self.scheduler)["at"]
        return self

    def everything(self):
        """Names and exact contents of all that must be equal."""
        found = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"state {number} {key}": entry for key, entry in state.items()}
        history = [{key: entry for key, entry in u.as_dict().items() if key != "seconds"} for u in self.stepper.history]
        found["history"] = history
        found["stepper"] = self.stepper.state_dict()
        found["groups"] = self.optimizer.state_dict()["param_groups"]
        found["scheduler"] = str(self.scheduler.state_dict())
        found["random"] = (torch.rand(3).tolist(), random.random(), float(numpy.random.rand()))
        return found


def seed_all():
    random.seed(1)
    numpy.random.seed(2)


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        if torch.is_tensor(a[key]):
            assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key
        else:
            assert a[key] == b[key], key


@pytest.mark.parametrize("method, optimizer", list(itertools.product(METHODS, OPTIMIZERS)))
def test_stopped_and_resumed_equals_uninterrupted(method, optimizer, tmp_path):
    stops = (1, 2, 3, 4, 6, 7, 11)
    seed_all()
    whole = Training(method, optimizer)
    for stop in stops:
        whole.run(stop).save(tmp_path / f"{stop}.safetensors")  # saving does not disturb the run either
    expected = whole.run(STEPS).everything()

    seed_all()
    assert_equal(Training(method, optimizer).run(STEPS).everything(), expected)
    for stop in stops:
        random.seed(99), numpy.random.seed(98)
        resumed = Training(method, optimizer, seed=7).load(tmp_path / f"{stop}.safetensors")
        assert resumed.at == stop
        assert_equal(resumed.run(STEPS).everything(), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype, tmp_path):
    seed_all()
    whole = Training(dtype=dtype)
    whole.run(5).save(tmp_path / "a.safetensors")
    expected = whole.run(STEPS).everything()
    assert_equal(Training(dtype=dtype, seed=3).load(tmp_path / "a.safetensors").run(STEPS).everything(), expected)


def test_states_of_another_dtype_than_the_values(tmp_path):
    """torch's load_state_dict would round them to the dtype of their parameter."""

    class Precise(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["sum"] = state.get("sum", torch.zeros(p.shape)) + p.grad.float() * (1 + 2**-20)
                p.sub_(0.1 * state["sum"].to(p.dtype))

    def start():
        torch.manual_seed(0)
        layer = SparseLinear(20, 10, sparsity=0.5, dtype=torch.bfloat16)
        optimizer = Precise(layer.parameters())
        return layer, optimizer, dst.SET(layer, optimizer, every=2)

    def go(layer, optimizer, stepper):
        for number in range(3):
            optimizer.zero_grad()
            layer(torch.full((4, 20), 0.1 + number, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
            stepper.step()

    a = start()
    go(*a)
    snack.save_training(tmp_path / "a.safetensors", *a)
    b = start()
    snack.load_training(tmp_path / "a.safetensors", *b)
    for run in (a, b):
        go(*run)
    assert torch.equal(a[0].values, b[0].values)
    assert torch.equal(a[1].state[a[0].values]["sum"], b[1].state[b[0].values]["sum"]) and b[1].state[b[0].values]["sum"].dtype == torch.float32


def test_lbfgs_and_a_gradient_scaler(tmp_path):
    def start(seed):
        torch.manual_seed(seed)
        layer = SparseLinear(20, 10, sparsity=0.5, dtype=torch.float64)
        optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.1, max_iter=3, history_size=4)
        return layer, optimizer, dst.SET(layer, optimizer, every=2)

    def go(layer, optimizer, stepper, steps):
        x = torch.linspace(-1, 1, 160, dtype=torch.float64).reshape(8, 20)
        for _ in range(steps):

            def closure():
                optimizer.zero_grad()
                loss = (layer(x).sin() - 0.2).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            stepper.step()

    a, b = start(0), start(1)
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=2.0**power) for power in (5, 9))
    go(*a, 3)
    snack.save_training(tmp_path / "a.safetensors", *a, scaler=scaler)
    assert snack.load_training(tmp_path / "a.safetensors", *b, scaler=other) is None
    assert other.get_scale() == 32.0
    for run in (a, b):
        go(*run, 3)
    assert torch.equal(a[0].values, b[0].values) and topology_hash(a[0]) == topology_hash(b[0])


def test_the_file_is_a_model_file_too(tmp_path):
    training = Training().run(3)
    training.save(tmp_path / "a.safetensors")
    like = Training(seed=5).model
    snack.load(tmp_path / "a.safetensors", like)
    assert torch.equal(like[0].values, training.model[0].values) and like[0].pattern.equals(training.model[0].pattern)
    assert [entry["name"] for entry in snack.nn.read_header(tmp_path / "a.safetensors")["layers"]] == ["0", "4"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    training = Training().run(3)
    training.save(path)
    before = path.read_bytes()
    training.run(4)

    def cut(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", cut)
    fails(["no space left", "save_training"], training.save, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.safetensors"]


# ---- what does not fit ----


def with_header(source, target, change):
    tensors = safetensors.torch.load_file(source)
    with safetensors.safe_open(source, "pt") as file:
        header = file.metadata()
    change(header, tensors)
    safetensors.torch.save_file(tensors, target, metadata=header)
    return target


def unchanged(training, words, path):
    """Loading fails in one sentence, and everything is as it was."""
    torch.manual_seed(3), seed_all()
    before = copy.deepcopy(training.everything())
    torch.manual_seed(3), seed_all()
    fails(words, training.load, path)
    assert_equal(training.everything(), before)


def test_files_that_do_not_fit_change_nothing(tmp_path):
    path = tmp_path / "a.safetensors"
    Training("RigL").run(5).save(path)

    unchanged(Training("SET").run(2), ["the state is of RigL"], path)
    unchanged(Training("RigL", "AdamW").run(2), ["the optimiser was SGD and is AdamW"], path)
    unchanged(Training(dtype=torch.float64).run(2), ["'0.values' is torch.float32 there and torch.float64"], path)

    other = Training().run(2)
    other.model[4] = SparseLinear(16, 13, sparsity=0.7)
    other.model[5] = nn.Linear(13, 3)
    other.optimizer = OPTIMIZERS["momentum"](other.model.parameters())
    other.stepper = METHODS["RigL"](other.model, other.optimizer)
    other.scheduler.optimizer = other.optimizer
    unchanged(other, ["shape", "unchanged"], path)

    stale = Training().run(2)
    stale.model[4] = SparseLinear(16, 12, sparsity=0.7)
    unchanged(stale, ["group 0", "parameters that the model does not have"], path)

    shuffled = Training().run(2)
    shuffled.optimizer.param_groups[0]["params"].reverse()
    unchanged(shuffled, ["had parameter '0.values' where it has '5.bias'"], path)

    fresh = Training()
    arguments = (fresh.model, fresh.optimizer, fresh.stepper)
    fails(["saved with scheduler=, and none is given"], snack.load_training, path, *arguments)
    fails(["saved with dst=, and none is given"], snack.load_training, path, fresh.model, fresh.optimizer, scheduler=fresh.scheduler)
    fails(["saved without scaler="], snack.load_training, path, *arguments, scheduler=fresh.scheduler, scaler=torch.amp.GradScaler("cpu"))
    wrong = torch.optim.lr_scheduler.StepLR(fresh.optimizer, 3)
    fails(["scheduler was a SequentialLR and is a StepLR"], snack.load_training, path, *arguments, scheduler=wrong)

    def put(key, value):
        return lambda header, tensors: header.update({key: value})

    bad = tmp_path / "bad.safetensors"
    unchanged(fresh, ["version '7'", "this one reads 1"], with_header(path, bad, put("snack.training", "7")))
    unchanged(fresh, ["is damaged"], with_header(path, bad, put("snack.training.state", "{}")))
    unchanged(fresh, ["is damaged"], with_header(path, bad, put("snack.training.state", "[")))

    def of_version_1(header, tensors):
        state = json.loads(header["snack.training.state"])
        dict(state["dst"]["of"])["state"]["of"][0][1] = 1
        header["snack.training.state"] = json.dumps(state)

    unchanged(fresh, ["the state has version 1"], with_header(path, bad, of_version_1))
    unchanged(fresh, ["is damaged"], with_header(path, bad, lambda header, tensors: tensors.pop(next(k for k in tensors if "momentum" in k))))
    unchanged(fresh, ["row 99", "unchanged"], with_header(path, bad, lambda header, tensors: tensors["0.rows"].fill_(99)))
    bad.write_bytes(path.read_bytes()[:-9])
    unchanged(fresh, ["not a readable safetensors file"], bad)
    unchanged(fresh, ["there is no file"], tmp_path / "missing.safetensors")
    snack.save(fresh.model, bad)
    unchanged(fresh, ["is not a resume file"], bad)


def test_saving_between_an_armed_step_and_its_update_is_refused(tmp_path):
    training = Training("RigL").run(2)
    (training.model(torch.randn(8, 20)) - 1).square().mean().backward()
    fails(["the gradient of the coming step has begun"], training.save, tmp_path / "a.safetensors")
    training.optimizer.step()
    fails(["an update is due", "dst.step()"], training.save, tmp_path / "a.safetensors")
    training.stepper.step()
    training.save(tmp_path / "a.safetensors")
    stale = Training()
    stale.optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    fails(["does not have", "after snack.sparsify"], stale.save, tmp_path / "b.safetensors")
    strange = Training()
    fails(["save_training", "more.f", "builtin_function_or_method"], snack.save_training, tmp_path / "b.safetensors", strange.model,
          strange.optimizer, more={"f": print})


# ---- several processes ----


def _stop_and_go(rank, world, path, until, start_from, seed):
    torch.manual_seed(100 * seed + rank)
    random.seed(rank), numpy.random.seed(rank)
    training = Training("SNFS", wrap=DistributedDataParallel)
    torch.manual_seed(100 * seed + rank)
    if start_from:
        training.load(path)
    loaded = topology_hash(training.model[0]), training.model[0].values.detach().clone()
    training.run(until)
    if path and not start_from:
        training.save(path)
    return training.everything(), loaded


def test_resume_on_several_processes(tmp_path):
    """The same number of processes: bit for bit, also in the middle of a window of recorded steps; another: topology and values as saved."""
    path = tmp_path / "a.safetensors"
    whole = ranks.run(_stop_and_go, 2, None, STEPS, False, 1)
    stopped = ranks.run(_stop_and_go, 2, path, 8, False, 1)
    resumed = ranks.run(_stop_and_go, 2, path, STEPS, True, 5)
    for (a, _), (b, _) in zip(whole, resumed):
        assert_equal(a, b)
    assert whole[0][0]["random"] != whole[1][0]["random"]
    for world in (1, 4):
        found = [_alone(path)] if world == 1 else ranks.run(_stop_and_go, world, path, STEPS, True, 5)
        hashes = {loaded[0] for _, loaded in found}
        assert len(hashes) == 1 and all(torch.equal(loaded[1], stopped[0][0]["0.values"]) for _, loaded in found)
        assert len({str(everything["history"]) for everything, _ in found}) == 1


def _alone(path):
    training = Training("SNFS", seed=8).load(path)
    loaded = topology_hash(training.model[0]), training.model[0].values.detach().clone()
    return training.run(STEPS).everything(), loaded


def _dies(rank, world, path):
    torch.manual_seed(rank)
    training = Training("RigL", wrap=DistributedDataParallel)
    torch.manual_seed(rank), random.seed(rank), numpy.random.seed(rank)
    for step in range(1, STEPS + 1):
        training.run(step)
        training.save(path)
        if step == 7 and rank == 1:
            os._exit(9)


def _goes_on(rank, world, path):
    if path is None:
        training = Training("RigL", wrap=DistributedDataParallel)
        torch.manual_seed(rank), random.seed(rank), numpy.random.seed(rank)
        return training.run(STEPS).everything()
    training = Training("RigL", seed=9, wrap=DistributedDataParallel).load(path)
    return training.at, training.run(STEPS).everything()


def test_a_killed_rank_leaves_a_file_from_which_the_job_resumes(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises((EOFError, AssertionError, ConnectionError)):
        ranks.run(_dies, 2, path)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    whole = ranks.run(_goes_on, 2, None)
    for expected, (at, found) in zip(whole, ranks.run(_goes_on, 2, path)):
        assert at == 7
        assert_equal(found, expected)


def _files_differ(rank, world, folder):
    training = Training("SET", wrap=DistributedDataParallel)
    errors = []
    for path in (folder / f"{rank}.safetensors", folder / ("0.safetensors" if rank == 0 else "none.safetensors")):
        before = topology_hash(training.model[0]), training.model[0].values.clone()
        try:
            training.load(path)
            errors.append(None)
        except snack.SnackError as error:
            errors.append(str(error))
        assert before[0] == topology_hash(training.model[0]) and torch.equal(before[1], training.model[0].values)
    return errors


def test_ranks_with_different_files_load_nothing(tmp_path):
    training = Training("SET")
    for rank in range(2):
        training.run(rank + 1).save(tmp_path / f"{rank}.safetensors")
    (different, missing), (other, own) = ranks.run(_files_differ, 2, tmp_path)
    assert "rank 1 and rank 0 disagree about what is in the file" in different and "disagree" in other
    assert "rank 1 failed" in missing and "there is no file" in missing and "there is no file" in own
