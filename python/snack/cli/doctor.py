"""``snack doctor``: what is loaded, what is not and why, and a self-test of every operation."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from snack.cli.common import human_bytes, print_table, say

DESCRIPTION = """Shows the compiled libraries, the instruction set chosen for this processor, the cards, and runs every operation on each of
them against the reference implementation. Exit status 1 when something that should work does not."""


def add_parser(subparsers) -> None:
    """Registers the command and its options."""
    parser = subparsers.add_parser("doctor", help="show what is loaded and test every operation", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(arguments) -> int:
    """Prints the report; 0 when all operations pass."""
    report = diagnose()
    if arguments.json:
        say(json.dumps(report, indent=1))
    else:
        print_table("SNACK", ["what", "value"], [[key.replace("_", " "), str(value)] for key, value in report["environment"].items()])
        _print_operations("on the CPU", report["operations"])
        for name, card in report["cards"].items():
            facts = f"{name}: {card['name']}, compute capability {card['capability']}, {human_bytes(card['memory_bytes'])}, driver {card['driver']}"
            if "not_run" in card:
                say(f"{facts}. Operations not run: {card['not_run']}.")
            else:
                say(f"{facts}. Topology rules: on the card.")
                _print_operations(f"on {name}", card["operations"])
        if not report["cards"]:
            say(f"operations on a card: not run: {report['cuda_not_run']}.")
    results = [*report["operations"].values(), *(r for card in report["cards"].values() for r in card.get("operations", {}).values())]
    return 0 if all(result["ok"] for result in results) else 1


def _print_operations(where: str, operations: dict) -> None:
    rows = [[name, "ok" if result["ok"] else "FAILED", result["detail"]] for name, result in operations.items()]
    print_table(f"operations against the reference, {where}", ["operation", "", "detail"], rows)


def diagnose() -> dict:
    """{"environment": facts, "operations": {name: {"ok", "detail"}}, "cards": {"cuda:0": facts and operations or "not_run"}}, and
    "cuda_not_run" where there is no card to speak of; a failing probe is a finding, not an exception."""
    try:
        import snack
        from snack import _lib
    except ImportError as error:
        environment = {"python": platform.python_version(), "problem": str(error)}
        failed = {"import snack": {"ok": False, "detail": str(error)}}
        return {"environment": environment, "operations": failed, "cards": {}, "cuda_not_run": "snack does not load"}
    environment = {"snack": snack.__version__, "python": platform.python_version(), **_lib.status()}
    report = {"environment": environment, "operations": {name: _guarded(test) for name, test in _tests("cpu").items()}, "cards": _cards()}
    return report if report["cards"] else report | {"cuda_not_run": _lib.cuda_problem() or "PyTorch shows no card"}


def _cards() -> dict:
    """What each card is and whether the operations are right there."""
    import torch

    from snack import _lib

    cards = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device, facts = torch.device("cuda", index), torch.cuda.get_device_properties(index)
        card = {"name": facts.name, "capability": f"{facts.major}.{facts.minor}", "memory_bytes": facts.total_memory, "driver": _driver()}
        problem = _lib.cuda_problem(device)
        if problem:
            card["not_run"] = problem
        else:
            card["operations"] = {name: _guarded(test) for name, test in _tests(device).items()}
        cards[str(device)] = card
    return cards


def _driver() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def _guarded(test) -> dict:
    try:
        return {"ok": True, "detail": test()}
    except Exception as error:
        return {"ok": False, "detail": f"{type(error).__name__}: {error}"}


def _tests(device) -> dict:
    """{operation: function that raises, or returns what was checked}: on `device` against the reference, which is on the CPU."""
    import torch

    from snack import Pattern

    ours, reference = torch.ops.snack, torch.ops.snack_reference
    shape = (129, 2050)
    pattern = Pattern.random(shape, 9000, 7)
    packed = (pattern.index, pattern.tile_ptr)
    generator = torch.Generator().manual_seed(0)
    values, bias = torch.randn(pattern.nnz, generator=generator), torch.randn(shape[0], generator=generator)
    x, dy = torch.randn(33, shape[1], generator=generator), torch.randn(33, shape[0], generator=generator)
    drop = ours.select_smallest(values, 50)
    grown = ours.grow_uniform(*packed, drop, 50, 3, *shape)

    def run(name, arguments):
        """(what the device gives, what the reference gives), both on the CPU."""
        there = (a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments)
        results = getattr(ours, name)(*there), getattr(reference, name)(*arguments)
        return tuple(tuple(t.cpu() for t in (r if isinstance(r, tuple) else (r,))) for r in results)

    def compared(a, b) -> str:
        error = float((a - b).abs().max() / b.abs().max())
        if not error < 1e-5:
            raise ArithmeticError(f"relative error {error:.1e}")
        return f"relative error {error:.1e}, float32, {shape[0]} x {shape[1]}, {pattern.nnz} connections, batch 33"

    def close(name, *arguments):
        def test() -> str:
            (a,), (b,) = run(name, (*arguments, *shape))
            return compared(a, b)

        return test

    def update() -> str:
        changed = []
        for operators, where in ((ours, device), (reference, "cpu")):
            index, tile_ptr, v, momentum, *operands = (t.to(where, copy=True) for t in (*packed, values, values.flip(0), dy, x))
            operators.sddmm_update(index, tile_ptr, v, [momentum], *operands, None, None, 0, [0.1, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0], *shape)
            changed.append(torch.cat([v, momentum]).cpu())
        return compared(*changed)

    def equal(name, *arguments):
        def test() -> str:
            a, b = run(name, arguments)
            if not all(torch.equal(p, q) for p, q in zip(a, b, strict=True)):
                raise ArithmeticError("differs from the reference")
            return "identical"

        return test

    return {
        "spmm": close("spmm", *packed, values, x, bias),
        "spmm_t": close("spmm_t", *packed, values, dy),
        "sddmm": close("sddmm", *packed, dy, x),
        "sddmm_update": update,
        "rewire": equal("rewire", *packed, drop, *grown, *shape),
        "select_smallest": equal("select_smallest", values, 50),
        "grow_uniform": equal("grow_uniform", *packed, drop, 50, 3, *shape),
        "grow_gradient": equal("grow_gradient", *packed, drop, dy.double(), x.double(), 20, *shape),
        "sample": equal("sample", *shape, 9000, 7),
    }
