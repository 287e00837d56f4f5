"""What only a GPU can prove, in under ten minutes: Python and C++ tests on CUDA, compute-sanitizer, the C++ example, training, a benchmark.

Writes gpu-suite.json (one entry a step: passed, failed, or "not run" where the machine refuses a tool), cuda.json and train-mnist.json
(records of the benchmark and of a training) and gpu-suite.log into --out, after every step. Fails without a GPU, when a step fails, when
a test is skipped, and when there are fewer tests than ever before ("most_tests" of the committed results). Uses the running
interpreter and this tree's Python files; the compiled parts come from build/gpu (`make gpu-bundle`, for a machine without the means to
build) or are built here.

With --only, the other steps keep what the committed results say of the same sources, tests and tools ("suite_hash"). The profile and the
suites of the paper run only so (`--only paper-layer`): of a suite as much as fits into --limit; the next run goes on where it stopped.

Usage: python tools/gpu_suite.py [--out FOLDER] [--only STEP,STEP] [--quick] [--limit SECONDS]
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "build/gpu"
CPU_TRAINING = ROOT / "benchmarks/results/cpu-avx512/train-mnist.json"
TOLERANCE = 0.005  # of a test accuracy in [0, 1]: a card sums in another order
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
REFUSALS = ("Device not supported", "not supported on this", "Unable to find injection library", "Failed to initialize", "InvalidDevice")


@dataclass
class Output:
    """What a command printed and how it ended: exit status, or None where its time was up."""

    status: int | None
    text: str


@dataclass
class Suite:
    """Where everything is, and what is left of the time."""

    out: Path
    compiled: Path  # folder of the libraries, snack_cuda_tests and train_mnist
    data: Path | None
    deadline: float
    is_quick: bool
    committed: Path = Path()  # folder of the committed results of this device
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, command: list[object], limit: float, **environment: str) -> Output:
        """Runs a command under a time limit; its output goes to the log, too."""
        limit = min(limit, self.deadline - time.monotonic())
        words = [str(part) for part in command]
        if limit < 5:
            return Output(None, "no time was left for it")
        try:
            done = subprocess.run(
                words, cwd=ROOT, env={**self.environment, **environment}, timeout=limit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            output = Output(done.returncode, done.stdout.decode(errors="replace"))
        except subprocess.TimeoutExpired as error:
            output = Output(None, (error.stdout or b"").decode(errors="replace") + f"\nstopped after {limit:.0f} s")
        except OSError as error:
            output = Output(-1, f"{words[0]} cannot be started: {error}")
        with open(self.out / "gpu-suite.log", "a") as log:
            log.write(f"$ {' '.join(words)}\n{output.text}\n-> {output.status}\n\n")
        return output


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was printed"


# ---- steps: each returns {"status", "detail"} and, where there are tests, "tests" --------------------------------------------------


def doctor(suite: Suite) -> dict:
    """snack doctor: every operation computes on every card."""
    output = suite.run([sys.executable, "-m", "snack", "doctor", "--json"], 60)
    try:
        report = json.loads(output.text[output.text.index("{") :])
        cards = report["cards"]
    except (ValueError, KeyError):
        return {"status": "failed", "detail": last_line(output.text)}
    idle = [f"{name}: {card['not_run']}" for name, card in cards.items() if "not_run" in card] or ([] if cards else ["it saw no card"])
    good = output.status == 0 and not idle
    return {"status": "passed" if good else "failed", "detail": "; ".join(idle) or ", ".join(cards)}


def junit(path: Path) -> dict[str, int]:
    """Counts of a JUnit file: tests, failed, skipped."""
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    count = {key: sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "failures", "errors", "skipped", "disabled")}
    return {"tests": count["tests"], "failed": count["failures"] + count["errors"], "skipped": count["skipped"] + count["disabled"]}


def judge(output: Output, report: Path) -> dict:
    """Of a run with a JUnit report: a failure, a skipped test and a run without a report all fail."""
    if not report.is_file():
        return {"status": "failed", "detail": last_line(output.text)}
    count = junit(report)
    good = output.status == 0 and count["tests"] > 0 and not count["failed"] and not count["skipped"]
    detail = f"{count['failed']} failed, {count['skipped']} skipped; {last_line(output.text)}"
    return {"status": "passed" if good else "failed", "tests": count["tests"], "detail": "" if good else detail}


def tests_of(suite: Suite, path: str, which: str, *options: str) -> dict:
    """The tests below a path that a marker expression chooses."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", path, "-m", which, "-p", "no:cacheprovider", f"--junitxml={report}", *options]
        return judge(suite.run(command, 330), report)


def python_tests(suite: Suite) -> dict:
    """Every Python test that runs on a card: products, autograd, graphs, streams, compile, rewire, training, errors. Side by side, as most
    of the time goes to the reference on the CPU; then those that need the card for themselves."""
    side_by_side = ["-n", str(max(1, min(14, (os.cpu_count() or 1) - 2)))] if importlib.util.find_spec("xdist") else []
    parts = [tests_of(suite, "tests/python", "cuda and not alone", *side_by_side), tests_of(suite, "tests/python", "cuda and alone")]
    failed = [part["detail"] for part in parts if part["status"] != "passed"]
    return {"status": "failed" if failed else "passed", "tests": sum(part.get("tests", 0) for part in parts), "detail": "; ".join(failed)}


def several_cards(suite: Suite) -> dict:
    """Two cards in one process; part of the Python tests where there are two."""
    import torch

    if torch.cuda.device_count() < 2:
        return {"status": "not run", "detail": "there is one card here; two are needed"}
    return tests_of(suite, "tests/python/test_cuda_devices.py", "cuda")


def cpp_tests(suite: Suite) -> dict:
    """snack_cuda_tests: the backend tests of tests/cpp on the card."""
    program = find(suite.compiled, "snack_cuda_tests")
    if program is None:
        return {"status": "failed", "detail": "snack_cuda_tests was not built: GoogleTest is missing here; carry it (make gpu-bundle)"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        return judge(suite.run([program, f"--gtest_output=xml:{report}"], 150), report)


def sanitizer(suite: Suite, tool: str) -> dict:
    """One tool of compute-sanitizer over tools/sanitizer_driver.py."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        return {"status": "not run", "detail": "compute-sanitizer is not installed"}
    # Kernels of CUB wait for each other on purpose, and PyTorch's are not ours to judge.
    only_ours = ["--kernel-name", "kns=snack"] if tool in ("racecheck", "synccheck") else []
    command = [program, "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no", *only_ours]
    output = suite.run([*command, sys.executable, "tools/sanitizer_driver.py"], 170, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    result = re.search(r"^(\d+) cases, (\d+) wrong$", output.text, re.MULTILINE)
    cases = result and result[2] == "0"
    summary = re.search(r"(ERROR|RACECHECK) SUMMARY: (.+)", output.text)
    said = summary[2].strip() if summary else last_line(output.text)
    if output.status == 0 and cases and summary and re.match(r"0 (errors|hazards)", summary[2]):
        return {"status": "passed", "tests": int(result[1]), "detail": said}
    # A refusal is the tool's own word and its own end: no time-out, no signal (128 + number where a shell passes it on).
    crashed = output.status is None or output.status < 0 or 128 < output.status < 192
    own_lines = (line.strip() for line in output.text.splitlines() if line.startswith("========="))
    refused = next((line for line in own_lines if any(words in line for words in REFUSALS)), None)
    if refused and not (crashed or result or summary):
        return {"status": "not run", "detail": refused[:300]}
    return {"status": "failed", "detail": said if cases else f"{said}; {last_line(output.text)}"}


def sanitizers(suite: Suite) -> dict[str, dict]:
    """All four at once: each keeps one core busy and the card idle."""
    def timed(tool: str) -> dict:
        start = time.monotonic()
        return {**sanitizer(suite, tool), "seconds": round(time.monotonic() - start, 1)}

    with ThreadPoolExecutor(len(TOOLS)) as pool:
        return dict(zip((f"compute-sanitizer {tool}" for tool in TOOLS), pool.map(timed, TOOLS)))


def cpp_example(suite: Suite) -> dict:
    """The C++ example trains on the card, on the digits."""
    program = find(suite.compiled, "train_mnist")
    if program is None:
        return {"status": "failed", "detail": "train_mnist was not built; carry it (make gpu-bundle)"}
    data = suite.data and next((suite.data / name for name in ("mnist", "digits") if (suite.data / name).is_dir()), None)
    if data is None:
        return {"status": "failed", "detail": "no data for the example: the bundle holds none and SNACK_DATA names none"}
    lowest = {"mnist": 97.0, "digits": 95.0}[data.name]
    epochs = {"mnist": "10", "digits": "20"}[data.name]
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "network.safetensors"
        output = suite.run([program, "--data", data, "--device", "cuda", "--epochs", epochs, "--save", saved], 120)
        if output.status != 0 or not saved.is_file():
            return {"status": "failed", "detail": last_line(output.text)}
        inspected = suite.run([sys.executable, "-m", "snack", "inspect", saved], 60)
    accuracies = re.findall(r"test accuracy ([\d.]+)", output.text)
    good = bool(accuracies) and float(accuracies[-1]) >= lowest and inspected.status == 0
    detail = f"{data.name}: test accuracy {accuracies[-1] if accuracies else 'not printed'} % after {epochs} epochs, at least {lowest} wanted"
    return {"status": "passed" if good else "failed", "detail": detail}


def training(suite: Suite) -> dict:
    """snack train on the card -> train-mnist.json: SNACK learns as well as in the committed records of the CPU."""
    if suite.data is None or not (suite.data / "mnist").is_dir():
        return {"status": "failed", "detail": "no MNIST in the bundle; run make gpu-bundle with SNACK_DATA naming a folder that holds mnist"}
    path = suite.out / "train-mnist.json"
    settings = ["--data", "mnist", "--sparsity", "0.9", "--seeds", "1", "--epochs", "10"]
    command = [sys.executable, "-m", "snack", "train", *settings, "--device", "cuda", "--quiet", "--no-figure", "--json", path]
    output = suite.run(command, 150)
    if output.status != 0 or not path.is_file():
        return {"status": "failed", "detail": last_line(output.text)}
    lowest, mean = min(final_accuracies(path), default=0.0), statistics.fmean(final_accuracies(CPU_TRAINING))
    detail = f"test accuracy {100 * lowest:.2f} %, at least {100 * (mean - TOLERANCE):.2f} % wanted: the CPU reaches {100 * mean:.2f} %"
    return {"status": "passed" if lowest >= mean - TOLERANCE else "failed", "detail": detail}


def final_accuracies(path: Path) -> list[float]:
    """Final test accuracies of SNACK, one a seed, in what snack train wrote."""
    return [record["accuracy"] for record in json.loads(path.read_text())["records"] if record["contender"] == "snack"]


def benchmark(suite: Suite) -> dict:
    """snack bench cuda -> cuda.json."""
    return bench(suite, "cuda", max(30.0, min(300.0, suite.deadline - time.monotonic() - 30)), *(["--quick"] if suite.is_quick else []))


def paper(name: str) -> Callable[[Suite], dict]:
    """A suite of the paper, or as much of it as fits into this run; the next run goes on."""
    return lambda suite: bench(suite, name, max(30.0, suite.deadline - time.monotonic() - 60))


def bench(suite: Suite, name: str, limit: float, *options: str) -> dict:
    """snack bench NAME -> NAME.json; "not run" where records remain. The command stops in time by itself."""
    path = suite.out / f"{name}.json"
    if not path.is_file() and (suite.committed / path.name).is_file():
        shutil.copy(suite.committed / path.name, path)  # it goes on with that
    command = [sys.executable, "-m", "snack", "bench", name, *options, "--limit", f"{limit:.0f}", "--json", path]
    output = suite.run(command, limit + 50)
    records = len(json.loads(path.read_text())["records"]) if path.is_file() else 0
    if output.status != 0 or not records:
        return {"status": "failed", "detail": f"{records} records; {last_line(output.text)}"}
    remain = re.search(r"^(\d+) of \d+ records remain", output.text, re.MULTILINE)
    if remain:
        return {"status": "not run", "detail": f"{records} records, {remain[1]} remain: the same command goes on"}
    return {"status": "passed", "detail": f"{records} records"}


def profile(suite: Suite) -> dict:
    """tools/profile_kernels.py -> profile.json; "not run" where Nsight Compute is not installed or may not count."""
    path = suite.out / "profile.json"
    output = suite.run([sys.executable, "tools/profile_kernels.py", "--json", path], 240)
    if output.status == 3:
        return {"status": "not run", "detail": last_line(output.text)}
    if output.status != 0 or not path.is_file():
        return {"status": "failed", "detail": last_line(output.text)}
    return {"status": "passed", "detail": f"{len(json.loads(path.read_text())['records'])} records"}


STEPS: dict[str, Callable[[Suite], dict]] = {
    "doctor": doctor, "python tests": python_tests, "several cards": several_cards, "C++ tests": cpp_tests, "compute-sanitizer": sanitizers,
    "C++ example": cpp_example, "training": training, "benchmark": benchmark,
}
# Neighbours among these run at once: none measures a time, and each keeps few cores busy and the card mostly idle.
TOGETHER = ("C++ tests", "compute-sanitizer", "C++ example", "training")
# Only where --only names them: each may take all the time of a run, or several runs.
PARTS: dict[str, Callable[[Suite], dict]] = {name: paper(name) for name in ("paper-kernels", "paper-layer", "paper-memory", "tune")}
PARTS["profile"] = profile


# ---- the compiled parts ------------------------------------------------------------------------------------------------------------


def find(folder: Path, name: str) -> Path | None:
    """A program below a folder; one that was carried may have lost its permission to run."""
    path = next((path for path in sorted(folder.rglob(name)) if path.is_file()), None)
    if path is not None and not os.access(path, os.X_OK):
        path.chmod(0o755)
    return path


def bundle_problem(compiled_hash: str) -> str:
    """Why build/gpu cannot be used, or nothing."""
    if not (BUNDLE / "bundle.json").is_file():
        return f"{BUNDLE.relative_to(ROOT)} does not exist"
    if json.loads((BUNDLE / "bundle.json").read_text())["compiled_hash"] != compiled_hash:
        return f"{BUNDLE.relative_to(ROOT)} was made from other sources; run make gpu-bundle again, or remove it to build here"
    return ""


def build_here() -> Path:
    """Libraries, and tests where GoogleTest is, for the H200; then the example against the installed package."""
    has_tests = Path("/usr/include/gtest/gtest.h").is_file() or "GTest_ROOT" in os.environ
    folder = ROOT / "build/h200"
    commands: list[list[object]] = [
        ["cmake", "--preset", "h200", f"-DPython_EXECUTABLE={sys.executable}", f"-DSNACK_TESTS={'ON' if has_tests else 'OFF'}"],
        ["cmake", "--build", "--preset", "h200"],
        ["cmake", "--install", folder, "--component", "snack_cpp", "--prefix", folder / "prefix"],
        ["cmake", "-S", "examples/cpp", "-B", folder / "example", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}"],
        ["cmake", "--build", folder / "example"],
    ]
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()), **os.environ}
    for command in commands:
        done = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"gpu-suite: {' '.join(map(str, command))} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return folder


def fingerprints() -> tuple[str, str, str]:
    """Hashes of what can change a number, of the compiled sources, and of all that a step of this suite depends on.

    Without importing snack, which needs its library.
    """
    spec = importlib.util.spec_from_file_location("hashing", ROOT / "python/snack/bench/hashing.py")
    hashing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hashing)
    suite = (*hashing.COMPILED, *hashing.HASHED, "python/snack", "tests", "tools")
    return hashing.source_hash(ROOT), hashing.source_hash(ROOT, hashing.COMPILED), hashing.source_hash(ROOT, suite)


# ---- the run -------------------------------------------------------------------------------------------------------------------------


def hold(name: str, step: dict, before: dict) -> dict:
    """The step with the most tests that it ever had, as far as the committed results know; failed when it has fewer now."""
    old = next((s for s in before.get("steps", []) if s["name"] == name), {})
    counts = [s[key] for s, key in ((old, "most_tests"), (old, "tests"), (step, "tests")) if key in s]
    if not counts:
        return step
    if step.get("tests", max(counts)) < max(counts):
        fewer = f"{step['tests']} tests, fewer than the {max(counts)} of an earlier run (removed on purpose? lower its most_tests by hand)"
        step = {**step, "status": "failed", "detail": "; ".join(w for w in (fewer, step.get("detail")) if w)}
    return {**step, "most_tests": max(counts)}


def earlier_steps(before: dict, suite_hash: str, is_part: bool) -> list[dict]:
    """What a run starts from: the committed steps where it is a part on the same sources, else no more than how many tests they had."""
    steps = [hold(step["name"], step, before) for step in before.get("steps", [])]
    if is_part and before.get("provenance", {}).get("suite_hash") == suite_hash:
        return steps
    unknown = {"status": "not run", "detail": "this run did not come to it", "seconds": 0.0}
    return [{"name": step["name"], **unknown, "most_tests": step["most_tests"]} for step in steps if "most_tests" in step]


def run_steps(suite: Suite, names: list[str]) -> Iterator[tuple[str, dict]]:
    """Names and results in the order given, with "seconds"; neighbours that are in TOGETHER run at once."""
    def timed(name: str) -> dict:
        start = time.monotonic()
        found = (STEPS | PARTS)[name](suite)
        return {**found, "seconds": round(time.monotonic() - start, 1)} if "status" in found else found

    for together, group in itertools.groupby(names, lambda name: name in TOGETHER):
        group = list(group)
        with ThreadPoolExecutor(len(group) if together else 1) as pool:
            yield from zip(group, pool.map(timed, group))


def provenance(suite: Suite) -> dict:
    code = "import json, torch; from snack.bench import records; print(json.dumps(records.provenance(torch.device('cuda', 0))))"
    output = suite.run([sys.executable, "-c", code], 60)
    if output.status != 0:
        raise SystemExit(f"gpu-suite: SNACK does not load here: {last_line(output.text)}")
    return {key: value for key, value in json.loads(output.text.splitlines()[-1]).items() if key != "command"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default benchmarks/results/<device>")
    parser.add_argument("--only", default="", help=f"some of the steps: {', '.join((*STEPS, *PARTS))}; the last {len(PARTS)} run only so")
    parser.add_argument("--quick", action="store_true", help="the short benchmark")
    parser.add_argument("--limit", type=float, default=570, metavar="SECONDS", help="for everything (default 570)")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.limit
    chosen = [name.strip() for name in arguments.only.split(",") if name.strip()] or list(STEPS)
    unknown = [name for name in chosen if name not in STEPS | PARTS]
    if unknown:
        print(f"gpu-suite: --only {unknown[0]!r} is no step; choose among {', '.join(STEPS | PARTS)}", file=sys.stderr)
        return 2
    try:
        import torch
    except ImportError:
        print(f"gpu-suite: {sys.executable} has no PyTorch; run it with the interpreter that has a CUDA build of it", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(f"gpu-suite: no GPU: PyTorch {torch.__version__} sees no CUDA device here; run this on a machine that has one", file=sys.stderr)
        return 2

    everything, compiled_hash, suite_hash = fingerprints()
    problem = bundle_problem(compiled_hash)
    if problem and BUNDLE.is_dir():
        print(f"gpu-suite: {problem}", file=sys.stderr)
        return 2
    compiled = build_here() if problem else BUNDLE
    data = os.environ.get("SNACK_DATA")
    suite = Suite(Path(), compiled, Path(data) if data else BUNDLE / "data" if (BUNDLE / "data").is_dir() else None, deadline, arguments.quick)
    if suite.data is None and (compiled / "example/digits").is_dir():
        suite.data = compiled / "example"
    suite.environment = {**os.environ, "SNACK_LIB_DIR": str(compiled), "PYTHONPATH": str(ROOT / "python"), "PYTHONUNBUFFERED": "1",
                         "SNACK_COSTS": ""}  # the built-in table is what is tested
    if suite.data is not None:
        suite.environment["SNACK_DATA"] = str(suite.data)
    if not problem:
        suite.environment.setdefault("SNACK_COMMIT", json.loads((BUNDLE / "bundle.json").read_text())["commit"])
    with tempfile.TemporaryDirectory() as folder:  # the device's name decides where results go
        suite.out = Path(folder)
        facts = provenance(suite)
    suite.out = (arguments.out or ROOT / "benchmarks/results" / str(facts["device"])).resolve()  # commands run in ROOT
    suite.out.mkdir(parents=True, exist_ok=True)
    if not arguments.only:  # a part adds to the log
        (suite.out / "gpu-suite.log").write_text("")
    suite.committed = ROOT / "benchmarks/results" / str(facts["device"])
    committed = suite.committed / "gpu-suite.json"
    before = json.loads(committed.read_text()) if committed.is_file() else {}
    facts |= {"source_hash": everything, "suite_hash": suite_hash}
    steps = earlier_steps(before, suite_hash, bool(arguments.only))  # a suite may run in pieces
    document = {"schema": 1, "suite": "gpu-suite", "provenance": facts, "steps": steps}

    ran: list[dict] = []
    for name, found in run_steps(suite, chosen):
        for title, step in ({name: found} if "status" in found else found).items():
            step = hold(title, step, before)
            ran.append({"name": title, **step})
            document["steps"] = [s for s in document["steps"] if s["name"] != title] + ran[-1:]
            tests = f", {step['tests']} tests" if "tests" in step else ""
            print(f"{step['status']:>8}  {title}: {step['seconds']} s{tests}  {step.get('detail', '')}", flush=True)
        (suite.out / "gpu-suite.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    failed = [step["name"] for step in ran if step["status"] == "failed"]
    print(f"gpu-suite: failed: {', '.join(failed)}; see {suite.out / 'gpu-suite.log'}" if failed else "gpu-suite: everything that ran has passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
