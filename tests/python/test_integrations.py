"""The callbacks: a Trainer with one makes the same network, bit for bit, as a plain loop that calls `dst.step()`; so does a run that is
stopped and resumed from the trainer's own checkpoint.

Every comparison is made with RigL, whose updates need what the step before them saw, and which is therefore the first to notice an update
that is late, early or missing.
"""

import gc
import importlib
import json
import os
import pickle
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import snack
from snack.integrations.stepping import Stepping, numbers

BATCH, STEPS, IN, CLASSES = 8, 12, 20, 4
OPTIONS = {"every": 2, "drop_fraction": 0.4, "t_end": 0.75}


def package(name):
    """A package that tests need; `make test` installs it, so only a private environment may lack it."""
    return importlib.import_module(name) if os.environ.get("CI") else pytest.importorskip(name)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # conftest puts it back


def network(seed=0, dropout=0.0):
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(IN, 30), nn.ReLU(), nn.Dropout(dropout), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, CLASSES))
    return snack.sparsify(body, sparsity=0.8)


def samples(count):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, IN, generator=generator), torch.arange(count) % CLASSES


def new_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_loop(steps=STEPS, accumulate=1, skip=()):
    """(model, stepper) of the reference: one update check after every optimiser step."""
    model = network()
    optimizer = new_optimizer(model)
    dst = snack.RigL(model, optimizer, **OPTIONS | {"t_end": int(0.75 * steps)})
    batches = zip(*(part.split(BATCH) for part in samples(steps * accumulate * BATCH)))
    for number, (x, labels) in enumerate(batches, start=1):
        (cross_entropy(model(x), labels) / accumulate).backward()
        if number % accumulate == 0:
            if number // accumulate not in skip:
                optimizer.step()
                dst.step()
            optimizer.zero_grad()
    return model, dst


def assert_same(model, expected):
    mine, theirs = model.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def timeless(history):
    return [(u.step, u.number, u.fraction, u.layers) for u in history]


class ScalerThatSkips(torch.amp.GradScaler):
    """Finds an infinite gradient in the steps of these numbers, as a real scaler does now and then."""

    def __init__(self, skip):
        super().__init__("cpu", init_scale=2.0**20, growth_interval=10**6)
        self.skip, self.calls = skip, 0

    def unscale_(self, optimizer):
        self.calls += 1
        if self.calls in self.skip:
            optimizer.param_groups[0]["params"][0].grad.fill_(torch.inf)
        super().unscale_(optimizer)


# ---- Hugging Face ----


class Classifier(nn.Module):
    """What the Trainer expects: forward returns the loss."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def hugging_face(folder, callback, model, accumulate=1, in_order=True, optimizer=None, **options):
    transformers = package("transformers")
    x, labels = samples(STEPS * accumulate * BATCH)
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulate,
        "train_sampling_strategy": "sequential" if in_order else "random",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    arguments = transformers.TrainingArguments(str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **defaults | options)
    data = [{"x": one, "labels": label} for one, label in zip(x, labels)]
    callbacks = [] if callback is None else [callback]
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks, optimizers=(optimizer, None))


def transformers_callback(**options):
    package("transformers")
    return snack.integrations.TransformersCallback(snack.RigL, **OPTIONS | options)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_transformers_trains_as_the_plain_loop(tmp_path, accumulate):
    body, callback = network(), transformers_callback()
    hugging_face(tmp_path, callback, Classifier(body), accumulate, optimizer=new_optimizer(body)).train()
    expected, dst = plain_loop(accumulate=accumulate)
    assert_same(body, expected)
    assert timeless(callback.dst.history) == [(u.step, u.number, u.fraction, {f"body.{k}": n for k, n in u.layers.items()}) for u in dst.history]
    assert [u.step for u in dst.history] == [2, 4, 6, 8]


def test_transformers_does_not_count_skipped_steps(tmp_path):
    body, callback = network(), transformers_callback()
    trainer = hugging_face(tmp_path, callback, Classifier(body), optimizer=new_optimizer(body))
    trainer.accelerator.scaler = scaler = ScalerThatSkips({2, 5})
    trainer.train()
    expected, dst = plain_loop(skip={2, 5})
    assert callback.dst.steps == dst.steps == STEPS - 2 and callback.dst.scaler is scaler
    assert [u.step for u in callback.dst.history] == [u.step for u in dst.history] == [2, 4, 6, 8]
    assert_same(body, expected)


def test_transformers_resumes_bit_for_bit(tmp_path):
    """Dropout, shuffling, a schedule of the learning rate and AdamW: all of the state is needed, and the next update is due at once."""
    options = {"in_order": False, "lr_scheduler_type": "linear", "learning_rate": 0.01, "save_strategy": "steps", "save_steps": 5}
    whole = Classifier(network(dropout=0.2))
    trainer = hugging_face(tmp_path, transformers_callback(), whole, **options)
    trainer.train()
    resumed, callback = Classifier(network(seed=7, dropout=0.2)), transformers_callback()
    again = hugging_face(tmp_path, callback, resumed, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same(resumed, whole)
    assert [u.step for u in callback.dst.history] == [6, 8] and callback.dst.steps == STEPS
    logged = [[entry["dst/step"] for entry in t.state.log_history if "dst/step" in entry] for t in (trainer, again)]
    assert logged == [[2, 4, 6, 8]] * 2


def test_transformers_says_that_a_checkpoint_has_no_stepper(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 5}
    hugging_face(tmp_path, None, Classifier(network()), **options).train()
    trainer = hugging_face(tmp_path, callback := transformers_callback(), Classifier(network()), **options)
    with pytest.warns(UserWarning, match="step 10 holds no state of a stepper"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    assert callback.dst.steps == 2


def test_transformers_starts_anew_when_trained_again(tmp_path):
    callback = transformers_callback()
    trainer = hugging_face(tmp_path, callback, Classifier(network()))
    trainer.train()
    first = callback.dst
    trainer.train()
    assert callback.dst is not first and callback.dst.steps == STEPS
    assert first.steps == 2 * STEPS and len(first.history) == len(callback.dst.history) == 4, "the first one only counts on"


def test_transformers_logs_updates_through_the_trainer(tmp_path):
    transformers = package("transformers")
    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append((state.global_step, "dst/dropped" in logs, "loss" in logs))

    trainer = hugging_face(tmp_path, Reporter(), Classifier(network()), logging_strategy="steps", logging_steps=4)
    callback = transformers_callback().attach(trainer)
    assert callback.attach(trainer) is callback, "attached once"
    trainer.train()
    updates, losses = [(s, True, False) for s in (2, 4, 6, 8)], [(s, False, True) for s in (4, 8, 12)]
    assert sorted(seen[:-1]) == sorted(updates + losses)
    entry = next(e for e in trainer.state.log_history if e.get("dst/step") == 2)
    assert entry["dst/dropped"] == callback.dst.history[0].dropped > 0 and entry["step"] == 2
    with pytest.raises(snack.SnackError, match="attach was given a dict"):
        callback.attach({})


def test_transformers_saves_models_that_snack_loads(tmp_path):
    model = Classifier(network())
    trainer = hugging_face(tmp_path, transformers_callback(), model)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    other = Classifier(network(seed=9))
    snack.load(tmp_path / "saved" / "model.safetensors", like=other)
    assert_same(other, model)


def pretrained():
    """A PreTrainedModel with sparse layers, and its configuration."""
    transformers = package("transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "snack-test"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config, seed=0):
            super().__init__(config)
            self.classifier = Classifier(network(seed))
            self.post_init()

        def forward(self, x, labels):
            return self.classifier(x, labels)

    return Model, Config


def test_transformers_trains_and_saves_a_pretrained_model(tmp_path):
    """Of a PreTrainedModel the Trainer saves by save_pretrained, and it decays what it knows: values too."""
    Model, Config = pretrained()
    model, callback = Model(Config()), transformers_callback()
    trainer = hugging_face(tmp_path, callback, model, save_strategy="steps", save_steps=6, load_best_model_at_end=False)
    trainer.train()
    assert len(callback.dst.history) == 4
    decayed = trainer.get_decay_parameter_names(model)
    assert {f"classifier.body.{n}.values" for n in (0, 3, 5)} <= set(decayed) and not any(name.endswith("bias") for name in decayed)
    other = Model(Config(), seed=9)
    snack.load(tmp_path / f"checkpoint-{STEPS}" / "model.safetensors", like=other)
    assert_same(other, model)


def test_from_pretrained_cannot_read_topologies_and_says_so(tmp_path):
    """It fills a model without memory piece by piece, and would leave the topology as its memory was; snack.load reads the same file."""
    Model, Config = pretrained()
    model = Model(Config())
    model.save_pretrained(tmp_path)
    with pytest.raises(snack.SnackError, match="from_pretrained of transformers .* read the file by snack.load"):
        Model.from_pretrained(tmp_path)
    other = Model(Config(), seed=9)
    snack.load(tmp_path / "model.safetensors", like=other)
    assert_same(other, model)


def test_transformers_runs_recorded_steps_of_a_compiled_model_eagerly(tmp_path):
    body, callback = network(), transformers_callback()
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = hugging_face(tmp_path, callback, Classifier(body), optimizer=new_optimizer(body), **compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that a layer took no part
        trainer.train()
    assert_same(body, plain_loop()[0])


# ---- Lightning ----


def lightning():
    return package("pytorch_lightning")


def lightning_callback(**options):
    lightning()
    return snack.integrations.LightningCallback(snack.RigL, **OPTIONS | options)


def module(body, manual=0, optimizer=new_optimizer):
    """A LightningModule; manual: optimiser steps a batch that it takes itself, each on a part of the batch."""

    class Module(lightning().LightningModule):
        def __init__(self):
            super().__init__()
            self.body = body
            self.automatic_optimization = not manual

        def training_step(self, batch, number):
            x, labels = batch
            if not manual:
                return cross_entropy(self.body(x), labels)
            for part, its_labels in zip(x.chunk(manual), labels.chunk(manual)):
                self.optimizers().zero_grad()
                self.manual_backward(cross_entropy(self.body(part), its_labels))
                self.optimizers().step()

        def configure_optimizers(self):
            return optimizer(self)

    return Module()


def fit(folder, callback, model, accumulate=1, batch=BATCH, ckpt_path=None, callbacks=(), **options):
    x, labels = samples(STEPS * accumulate * BATCH)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=batch)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": bool(callbacks), "logger": False}
    trainer = lightning().Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1, accumulate_grad_batches=accumulate, callbacks=[callback, *callbacks],
        **quiet | {"max_epochs": 1} | options,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(num_workers|litlogger|log_every_n_steps|deprecated|tensorboard).*")
        trainer.fit(model, loader, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("accumulate", [1, 3])
def test_lightning_trains_as_the_plain_loop(tmp_path, accumulate):
    body, callback = network(), lightning_callback()
    fit(tmp_path, callback, module(body), accumulate)
    expected, dst = plain_loop(accumulate=accumulate)
    assert_same(body, expected)
    assert [u.step for u in callback.dst.history] == [u.step for u in dst.history] == [2, 4, 6, 8]
    assert [u.dropped for u in callback.dst.history] == [u.dropped for u in dst.history]


@pytest.mark.parametrize("steps", [1, 3])
def test_lightning_follows_manual_optimisation(tmp_path, steps):
    """Several steps a batch: an update belongs between two of them."""
    body, callback = network(), lightning_callback(t_end=int(0.75 * STEPS))
    fit(tmp_path, callback, module(body, manual=steps), batch=BATCH * steps)
    assert_same(body, plain_loop()[0])


def test_lightning_does_not_count_skipped_steps(tmp_path):
    body, callback = network(), lightning_callback()
    scaler = ScalerThatSkips({2, 5})
    plugin = lightning().plugins.MixedPrecision("bf16-mixed", "cpu")
    plugin.scaler, plugin.autocast_context_manager = scaler, lambda: torch.autocast("cpu", enabled=False)
    fit(tmp_path, callback, module(body), plugins=[plugin])
    expected, dst = plain_loop(skip={2, 5})
    assert scaler.calls == STEPS and callback.dst.steps == dst.steps == STEPS - 2 and callback.dst.scaler is scaler
    assert_same(body, expected)


def test_lightning_moves_connections_in_mixed_precision(tmp_path):
    body, callback = network(), lightning_callback()
    before = {name: entry.clone() for name, entry in body.state_dict().items() if name.endswith(("rows", "cols"))}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # that a layer took no part
        fit(tmp_path, callback, module(body), precision="bf16-mixed")
    assert [u.dropped > 0 for u in callback.dst.history] == [True] * 4
    after = body.state_dict()
    assert not torch.equal(torch.stack([before["0.rows"], before["0.cols"]]), torch.stack([after["0.rows"], after["0.cols"]]))
    assert all(layer.values.dtype == torch.float32 for layer in body.modules() if isinstance(layer, snack.SparseLinear))


def test_lightning_resumes_bit_for_bit(tmp_path):
    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def run(body, name, **options):
        keep = lightning().callbacks.ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1, every_n_epochs=1)
        callback = lightning_callback(every=7)  # not at the end of an epoch
        return fit(tmp_path, callback, module(body, optimizer=adamw), max_epochs=3, callbacks=[keep], **options), callback

    whole = network()
    _, callback = run(whole, "whole")
    assert [u.step for u in callback.dst.history] == [7, 14, 21]
    resumed = network(seed=7)
    _, callback = run(resumed, "resumed", ckpt_path=tmp_path / "whole" / "epoch=0.ckpt")
    assert [u.step for u in callback.dst.history] == [14, 21] and callback.dst.steps == 3 * STEPS
    assert_same(resumed, whole)


def test_lightning_goes_on_when_fitted_again(tmp_path):
    body, callback = network(), lightning_callback()
    model = module(body)
    trainer = fit(tmp_path, callback, model)
    trainer.fit_loop.max_epochs = 2
    x, labels = samples(STEPS * BATCH)
    trainer.fit(model, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=BATCH))
    assert trainer.global_step == callback.dst.steps == 2 * STEPS


def test_lightning_logs_updates(tmp_path):
    logger = lightning().loggers.CSVLogger(tmp_path)
    callback = lightning_callback()
    fit(tmp_path, callback, module(network()), logger=logger)
    table = [line.split(",") for line in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()]
    logged = [dict(zip(table[0], row)) for row in table[1:]]
    assert [int(row["step"]) for row in logged] == [2, 4, 6, 8]
    assert [int(row["dst/dropped"]) for row in logged] == [u.dropped for u in callback.dst.history]


def two_optimizers(model):
    return [torch.optim.SGD(model.body[5].parameters(), lr=0.1), torch.optim.SGD([*model.body[0].parameters(), *model.body[3].parameters()], lr=0.1)]


def test_lightning_follows_the_optimiser_of_the_sparse_layers(tmp_path):
    class Alternating(lightning().LightningModule):
        def __init__(self, body):
            super().__init__()
            self.body, self.automatic_optimization = body, False

        def training_step(self, batch, number):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(cross_entropy(self.body(batch[0]), batch[1]))
            self.optimizers()[number % 2].step()

        configure_optimizers = two_optimizers

    body = network()
    body[5] = nn.Linear(30, CLASSES)
    callback = lightning_callback(t_end=6)
    fit(tmp_path, callback, Alternating(body))
    assert callback.dst.steps == STEPS // 2 and [u.step for u in callback.dst.history] == [2, 4]
    with pytest.raises(snack.SnackError, match="2 optimisers hold values of sparse layers"):
        fit(tmp_path, lightning_callback(t_end=6), Alternating(network()))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"t_end": 0.5}, "with manual optimisation .* give start and t_end in steps"), ({"t_end": 6, "every": 0}, "every=0 must be a whole number")],
)
def test_lightning_refuses_what_it_cannot_know(tmp_path, options, complaint):
    with pytest.raises(snack.SnackError, match=complaint):
        fit(tmp_path, lightning_callback(**options), module(network(), manual=1))


# ---- what both have in common ----


def begun(options, total=100, method=snack.RigL):
    model = network()
    stepping = Stepping(method, **options)
    stepping._begin(model, [new_optimizer(model)], lambda: total)
    return stepping.dst


@pytest.mark.parametrize(
    ("given", "steps"), [(0.75, 75), (1.0, 100), (0.999, 99), (1, 1), (40, 40), (30.5, 30), (0.0, 0)]
)
def test_t_end_as_a_part_of_the_training(given, steps):
    assert begun({"t_end": given}).t_end == steps


def test_start_as_a_part_of_the_training():
    dst = begun({"start": 0.25, "t_end": 0.5})
    assert (dst.start, dst.t_end) == (25, 50)


@pytest.mark.parametrize("total", [float("inf"), -1])
def test_a_part_of_an_endless_training_is_refused(total):
    with pytest.raises(snack.SnackError, match="t_end=0.5 is a part of all steps, and the trainer does not know how many"):
        begun({"t_end": 0.5}, total)


def test_what_a_method_may_be():
    assert isinstance(begun({"alpha": 0.2}, method=lambda m, o, alpha: snack.SET(m, o, drop_fraction=alpha)), snack.SET)
    with pytest.raises(snack.SnackError, match="the method is 'RigL', expected a class such as snack.RigL"):
        Stepping("RigL")
    with pytest.raises(snack.SnackError, match="the method returned a int, expected a stepper"):
        begun({}, method=lambda m, o: 3)
    with pytest.raises(snack.SnackError, match="the model has no sparse layers"):
        model = nn.Linear(2, 2)
        Stepping(snack.SET)._begin(model, [new_optimizer(model)], lambda: 1)
    with pytest.raises(snack.SnackError, match="the training has no optimiser"):
        Stepping(snack.SET)._begin(network(), [], lambda: 1)


def test_a_callback_can_be_sent_to_another_process():
    copied = pickle.loads(pickle.dumps(Stepping(snack.RigL, t_end=0.5)))
    assert copied.method is snack.RigL and copied.options == {"t_end": 0.5}


def test_a_training_that_failed_leaves_nothing_behind():
    compiled = []

    def is_compiling():
        compiled.clear()
        torch.compiler.reset()
        torch.compile(lambda x: x + 1, backend=lambda graph, _: compiled.append(graph) or graph.forward)(torch.ones(2))
        return bool(compiled)

    model = network()
    optimizer = new_optimizer(model)
    stepping = Stepping(snack.RigL, every=1, t_end=10)
    stepping._begin(model, [optimizer], lambda: 10)
    assert not is_compiling(), "the first step is recorded"
    before = model[0].pattern.coordinates()
    del stepping
    gc.collect()
    assert is_compiling()
    model(torch.randn(BATCH, IN)).sum().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model[0].pattern.coordinates()))


def test_numbers_of_a_record_are_plain():
    counts = {"a": 3, "b": 4}
    record = snack.dst.Update(10, 1, 0.25, counts, counts, {"a": 30, "b": 40}, 0.5, overlap={"a": 0.5, "b": 0.75})
    wanted = {"dst/step": 10, "dst/update": 1, "dst/dropped": 7, "dst/grown": 7, "dst/nnz": 70, "dst/overlap/b": 0.75}
    assert json.loads(json.dumps(numbers(record))).items() >= wanted.items()


@pytest.mark.parametrize(("name", "package"), [("TransformersCallback", "transformers"), ("LightningCallback", "pytorch_lightning")])
def test_a_missing_package_is_named(monkeypatch, name, package):
    for missing in (package, "lightning.pytorch", "lightning"):
        monkeypatch.setitem(sys.modules, missing, None)
    for module in ("hugging_face", "lightning"):
        monkeypatch.delitem(sys.modules, f"snack.integrations.{module}", raising=False)
    extra = name.removesuffix("Callback").lower()
    with pytest.raises(snack.SnackError, match=rf"{name} needs .*{package[:7]}.* cannot be imported .*pip install 'snack-sparse\[{extra}\]'"):
        getattr(snack.integrations, name)
    with pytest.raises(AttributeError):
        snack.integrations.NothingOfThatName  # noqa: B018


@pytest.mark.parametrize(("heading", "needed"), [("Hugging Face", "transformers"), ("Lightning", "pytorch_lightning")])
def test_examples_of_the_page_run(tmp_path, monkeypatch, capsys, heading, needed):
    package(needed)
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).resolve().parents[2] / "docs/integrations.md").read_text()
    code = re.search(rf"## {heading}\n.*?```python\n(.*?)```", text, re.DOTALL)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of workers, loggers and the like
        exec(compile(code, "integrations.md", "exec"), {"__name__": "__main__"})
    dropped = re.search(r"^\[(.*)\]$", capsys.readouterr().out, re.MULTILINE)[1]
    assert len(dropped.split(",")) == {"transformers": 4, "pytorch_lightning": 5}[needed]
