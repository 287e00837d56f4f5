"""The tools that judge a build: kernel budgets, the wheel, the GPU suite, and how they fail."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_wheel  # noqa: E402
import gpu_suite  # noqa: E402
import kernel_budget  # noqa: E402

DUMP = """
Fatbin elf code:
================
arch = sm_80

Resource usage:
 Common:
  GLOBAL:0
 Function void snack::cuda::k<float, 4>(snack::cuda::Args<float>):
  REG:40 STACK:0 SHARED:80 LOCAL:0 CONSTANT[0]:472 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function void cub::detail::Scan<int>(int):
  REG:90 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:472 TEXTURE:0 SURFACE:0 SAMPLER:0
Fatbin elf code:
================
arch = sm_90a
 Function snack::cuda::(anonymous namespace)::plain(long const*, long):
  REG:12 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:472 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function snack::cuda::(anonymous namespace)::plain(long const*, long):
  REG:14 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:472 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


# ---- kernel budgets ----


def test_an_update_excuses_no_new_stack():
    kernel = {"registers": 40, "stack": 16, "shared": 80}
    old = {"excused": {**kernel, "stack": 24}, "smaller": {**kernel, "stack": 8}}
    new = json.loads(kernel_budget.renewed({"excused": kernel, "smaller": kernel, "new": kernel}, old))
    assert {name: budget["stack"] for name, budget in new.items()} == {"excused": 16, "smaller": 8, "new": 0}


def test_budgets_are_read_out_of_the_dump():
    assert kernel_budget.parse(DUMP) == {
        "sm_80": {"snack::cuda::k<float, 4>": {"registers": 40, "stack": 0, "shared": 80}},
        "sm_90a": {"snack::cuda::plain": {"registers": 14, "stack": 16, "shared": 1024}},
    }


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("snack::cuda::a(long, snack::Geometry)", "snack::cuda::a"),
        ("void snack::cuda::b<__half, unsigned int, true>(snack::cuda::S<__half>*)", "snack::cuda::b<__half, unsigned int, true>"),
        ("void snack::cuda::(anonymous namespace)::c<float>(float const*)", "snack::cuda::c<float>"),
    ],
)
def test_names_of_kernels_lose_return_type_and_parameters(demangled, name):
    assert kernel_budget.short_name(demangled) == name


def test_a_kernel_out_of_its_budget_is_named():
    used = {"registers": 40, "stack": 0, "shared": 80}
    assert kernel_budget.compare("sm_80", {"k": used}, {"k": used}) == []
    for field in used:
        problems = kernel_budget.compare("sm_80", {"k": {**used, field: used[field] + 1}}, {"k": used})
        assert len(problems) == 1 and field in problems[0] and "sm_80" in problems[0]
    assert "no budget" in kernel_budget.compare("sm_80", {"k": used}, {})[0]
    assert "not in the library" in kernel_budget.compare("sm_80", {}, {"k": used})[0]


def test_budgets_are_committed_for_what_the_tests_compile():
    preset = next(p for p in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"] if p["name"] == "cuda")
    compiled = {f"sm_{part.removesuffix('-real')}" for part in preset["cacheVariables"]["SNACK_CUDA_ARCHITECTURES"].split(";")}
    budgets = {file.stem: json.loads(file.read_text()) for file in (ROOT / "tests/budget").glob("sm_*.json")}
    assert budgets.keys() == compiled
    for kernels in budgets.values():  # a spill is excused kernel by kernel, and only a small one
        assert kernels and all(kernel["stack"] <= 64 and kernel["registers"] <= 255 for kernel in kernels.values())


# ---- the wheel ----

DYNAMIC = "  NEEDED               libtorch.so\n  NEEDED               libc.so.6\n"


@pytest.mark.parametrize(
    ("dynamic", "symbols", "word"),
    [
        ("  NEEDED               libcudart.so.13\n", "", "libcudart.so.13"),
        ("  RUNPATH              /home/someone/torch/lib:\n", "", "/home/someone"),
        ("", "                 U cudaMalloc@libcudart.so.13\n", "would not load"),
        ("", "                 U cuLaunchKernel\n", "would not load"),
        ("", "                 U aoti_torch_get_current_cuda_stream\n", "would not load"),
        ("", "                 w aoti_torch_cuda_stream_of_something_cuda_stream\n", "not expected"),
        ("", "0000000000001000 T cudaMalloc\n", "exports"),
    ],
)
def test_links_that_break_elsewhere_are_found(dynamic, symbols, word):
    fine = "   w aoti_torch_get_current_cuda_stream\n   U aoti_torch_device_type_cuda\n   U memcpy@GLIBC_2.14\n"
    assert check_wheel.link_problems("x.so", DYNAMIC, fine) == []
    problems = check_wheel.link_problems("x.so", DYNAMIC + dynamic, fine + symbols)
    assert len(problems) == 1 and word in problems[0]


def test_stable_abi_and_tags_are_judged():
    torch = {"uses_torch": True, "stable": True, "unstable_symbols": [], "min_torch_version": "2.11.0"}
    assert check_wheel.abi_problems("x.so", {"bundled_libs": [{"torch": torch}]}) == []
    for change in ({"stable": False, "unstable_symbols": ["at::add"]}, {"min_torch_version": "2.12.0"}, {"uses_torch": False}):
        assert len(check_wheel.abi_problems("x.so", {"bundled_libs": [{"torch": torch | change}]})) == 1
    assert check_wheel.tag_problems("snack-0-py3-none-manylinux_2_34_x86_64.whl") == []
    assert check_wheel.tag_problems("snack-0-py3-none-manylinux_2_41_x86_64.whl") and check_wheel.tag_problems("snack-0-py3-none-linux_x86_64.whl")


# ---- the GPU suite ----


def run_suite(*arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, ROOT / "tools/gpu_suite.py", *arguments], env=environment, capture_output=True, text=True)


def test_gpu_suite_fails_without_a_gpu(tmp_path):
    result = run_suite("--out", tmp_path)
    assert result.returncode == 2 and "no GPU" in result.stderr and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert "is no step" in run_suite("--only", "nothing").stderr


def report(tmp_path, tests=3, failures=0, errors=0, skipped=0):
    path = tmp_path / "report.xml"
    counts = f'tests="{tests}" failures="{failures}" errors="{errors}" skipped="{skipped}"'
    path.write_text(f"<testsuites><testsuite {counts}/></testsuites>")
    return path


def test_gpu_suite_fails_on_failures_skips_and_silence(tmp_path):
    good = gpu_suite.Output(0, "3 passed")
    assert gpu_suite.judge(good, report(tmp_path)) == {"status": "passed", "tests": 3, "detail": ""}
    for counts in ({"failures": 1}, {"errors": 1}, {"skipped": 1}, {"tests": 0}):
        assert gpu_suite.judge(good, report(tmp_path, **counts))["status"] == "failed"
    assert gpu_suite.judge(gpu_suite.Output(None, "stopped after 5 s"), report(tmp_path))["status"] == "failed"
    assert gpu_suite.judge(good, tmp_path / "absent.xml")["status"] == "failed"


def test_gpu_suite_runs_side_by_side_what_measures_no_time(monkeypatch):
    both, running = threading.Barrier(2, timeout=20), []

    def step(name):
        def run(suite):
            running.append(name)
            if name in gpu_suite.TOGETHER:
                both.wait()  # fails where they run one after the other
            return {"one": {"status": "passed"}} if name == "doctor" else {"status": "passed", "detail": name}

        return run

    names = ["doctor", "python tests", *gpu_suite.TOGETHER[:2], "benchmark"]
    monkeypatch.setattr(gpu_suite, "STEPS", {name: step(name) for name in names})
    found = list(gpu_suite.run_steps(None, names))
    assert [name for name, _ in found] == names and running[:2] == names[:2] and running[-1] == "benchmark"
    assert found[0][1] == {"one": {"status": "passed"}} and all("seconds" in step for _, step in found[1:])


def test_gpu_suite_fails_on_fewer_tests():
    before = {"steps": [{"name": "python tests", "tests": 10}]}
    assert gpu_suite.hold("python tests", {"status": "passed", "tests": 10}, before) == {"status": "passed", "tests": 10, "most_tests": 10}
    fewer = gpu_suite.hold("python tests", {"status": "passed", "tests": 9}, before)
    assert fewer["status"] == "failed" and "fewer than the 10" in fewer["detail"]
    assert gpu_suite.hold("C++ tests", {"status": "passed", "tests": 1}, before)["status"] == "passed"
    assert gpu_suite.hold("doctor", {"status": "passed"}, before) == {"status": "passed"}


@pytest.mark.parametrize("between", [{"status": "failed", "tests": 7}, {"status": "failed"}, {"status": "not run"}, None])
def test_gpu_suite_never_forgets_how_many_tests_there_were(between):
    before = {"provenance": {"suite_hash": "a"}, "steps": [{"name": "x", "status": "passed", "tests": 100}, {"name": "doctor", "status": "passed"}]}
    if between is None:  # a run that did not come to it, on other sources
        steps = gpu_suite.earlier_steps(before, "b", True)
        assert [(s["name"], s["status"], s["most_tests"]) for s in steps] == [("x", "not run", 100)]
    else:
        steps = [{"name": "x", **gpu_suite.hold("x", between, before)}]
    for _ in range(2):  # nor by failing once more
        step = gpu_suite.hold("x", {"status": "passed", "tests": 5}, {"steps": steps})
        assert step["status"] == "failed" and "fewer than the 100" in step["detail"] and step["most_tests"] == 100
        steps = [{"name": "x", **step}]
    assert gpu_suite.hold("x", {"status": "passed", "tests": 101}, {"steps": steps})["most_tests"] == 101


def test_gpu_suite_keeps_steps_of_the_same_sources_only():
    before = {"provenance": {"source_hash": "a", "suite_hash": "b"}, "steps": [{"name": "doctor", "status": "passed"}]}
    assert gpu_suite.earlier_steps(before, "b", True) == before["steps"]
    assert gpu_suite.earlier_steps(before, "a", True) == gpu_suite.earlier_steps(before, "b", False) == []
    assert gpu_suite.earlier_steps({}, "b", True) == []


def test_suite_hash_follows_tests_and_tools_but_not_what_they_leave(tmp_path, monkeypatch):
    root = tmp_path / ".hidden/checkout"  # where the checkout lies does not matter
    shutil.copytree(ROOT / "tests", root / "tests", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (root / "python/snack/bench").mkdir(parents=True)
    shutil.copy(ROOT / "python/snack/bench/hashing.py", root / "python/snack/bench")
    monkeypatch.setattr(gpu_suite, "ROOT", root)
    before = gpu_suite.fingerprints()
    for left in ("tests/python/.hypothesis/constants/a", "tests/python/.pytest_cache/b", "tests/__pycache__/c.pyc", "tools/.d"):
        (root / left).parent.mkdir(parents=True, exist_ok=True)
        (root / left).write_text("generated")
    assert gpu_suite.fingerprints() == before
    (root / "tools/e.py").write_text("")
    assert gpu_suite.fingerprints()[:2] == before[:2] and gpu_suite.fingerprints()[2] != before[2]


@pytest.mark.parametrize(
    ("says", "status", "expected"),
    [
        ("12 cases, 0 wrong\n========= ERROR SUMMARY: 0 errors", 0, "passed"),
        ("12 cases, 0 wrong\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, "passed"),
        ("12 cases, 0 wrong\n========= ERROR SUMMARY: 2 errors", 9, "failed"),
        ("12 cases, 1 wrong\n========= ERROR SUMMARY: 0 errors", 1, "failed"),
        ("========= ERROR SUMMARY: 0 errors", 0, "failed"),
        ("========= Error: Device not supported. Please refer to the manual", 1, "not run"),
        ("UserWarning: Failed to initialize NumPy: No module named 'numpy'", 139, "failed"),
        ("UserWarning: Failed to initialize NumPy: No module named 'numpy'", 1, "failed"),
        ("========= Error: Failed to initialize\nSegmentation fault", 139, "failed"),
        ("========= Error: Device not supported\n12 cases, 1 wrong", 1, "failed"),
    ],
)
def test_gpu_suite_reads_the_sanitizer(tmp_path, monkeypatch, says, status, expected):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    suite = gpu_suite.Suite(tmp_path, tmp_path, None, time.monotonic() + 100, False, dict(os.environ))
    found = gpu_suite.sanitizer(suite, "memcheck")
    assert found["status"] == expected and found["detail"]
    assert says.splitlines()[0] in (tmp_path / "gpu-suite.log").read_text()


@pytest.mark.parametrize("says", ["UserWarning: Failed to initialize NumPy", "========= Error: Failed to initialize"])
def test_gpu_suite_fails_a_sanitizer_whose_time_was_up(tmp_path, monkeypatch, says):
    monkeypatch.setattr(gpu_suite.shutil, "which", lambda name, path=None: name)
    monkeypatch.setattr(gpu_suite.Suite, "run", lambda *arguments, **environment: gpu_suite.Output(None, f"{says}\nstopped after 170 s"))
    assert gpu_suite.sanitizer(gpu_suite.Suite(tmp_path, tmp_path, None, 0.0, False), "memcheck")["status"] == "failed"


@pytest.mark.parametrize(
    ("accuracies", "status", "expected"),
    [
        ([0.977], 0, "passed"), ([0.975], 0, "failed"), ([0.99, 0.975], 0, "failed"), ([], 0, "failed"), ([0.99], 1, "failed"),
        ([0.99], None, "failed"),
    ],
)
def test_gpu_suite_wants_the_accuracy_of_the_cpu(tmp_path, monkeypatch, accuracies, status, expected):
    def train(suite, command, limit):
        records = [{"contender": "snack", "accuracy": a} for a in accuracies] + [{"contender": "dense", "accuracy": 0.1}]
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"records": records}))
        return gpu_suite.Output(status, "its last line")

    monkeypatch.setattr(gpu_suite.Suite, "run", train)
    cpu = [{"contender": "snack", "accuracy": a} for a in (0.98, 0.982)] + [{"contender": "dense", "accuracy": 0.99}]
    (tmp_path / "cpu.json").write_text(json.dumps({"records": cpu}))
    monkeypatch.setattr(gpu_suite, "CPU_TRAINING", tmp_path / "cpu.json")
    suite = gpu_suite.Suite(tmp_path, tmp_path, tmp_path, 0.0, False)
    assert "no MNIST" in gpu_suite.training(suite)["detail"]
    (tmp_path / "mnist").mkdir()
    found = gpu_suite.training(suite)
    assert found["status"] == expected
    assert ("98.10 %" in found["detail"] and "97.60 %" in found["detail"]) if status == 0 else found["detail"] == "its last line"


def test_committed_training_of_the_cpu_is_the_one_that_the_gpu_suite_repeats():
    records = [r for r in json.loads(gpu_suite.CPU_TRAINING.read_text())["records"] if r["contender"] == "snack"]
    assert records and all((r["data"], r["sparsity"], r["epochs"]) == ("mnist", 0.9, 10) for r in records)


def test_gpu_suite_stops_a_command_at_its_limit(tmp_path):
    suite = gpu_suite.Suite(tmp_path, tmp_path, None, time.monotonic() + 6, False, dict(os.environ))
    output = suite.run([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 300)
    assert output.status is None and "begun" in output.text and "stopped after" in output.text
    assert suite.run([sys.executable, "-c", ""], 300) == gpu_suite.Output(None, "no time was left for it")
