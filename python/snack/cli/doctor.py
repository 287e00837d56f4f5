"""``snack doctor``: what is loaded, what is not and why, and a self-test of every operation."""

from __future__ import annotations

import json
import platform

from snack.cli.common import print_table, say

DESCRIPTION = """Shows the compiled library, the instruction set chosen for this processor, the devices, and runs every operation against the
reference implementation. Exit status 1 when something that should work does not."""


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
        rows = [[name, "ok" if result["ok"] else "FAILED", result["detail"]] for name, result in report["operations"].items()]
        print_table("operations against the reference, on the CPU", ["operation", "", "detail"], rows)
    return 0 if all(result["ok"] for result in report["operations"].values()) else 1


def diagnose() -> dict:
    """{"environment": facts, "operations": {name: {"ok", "detail"}}}; a failing probe is a finding, not an exception."""
    try:
        import snack
        from snack import _lib
    except ImportError as error:
        environment = {"python": platform.python_version(), "problem": str(error)}
        return {"environment": environment, "operations": {"import snack": {"ok": False, "detail": str(error)}}}
    environment = {"snack": snack.__version__, "python": platform.python_version(), **_lib.status(), "cuda_devices": _cuda_devices()}
    return {"environment": environment, "operations": {name: _guarded(test) for name, test in _tests().items()}}


def _cuda_devices() -> str:
    import torch

    try:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except RuntimeError as error:
        return f"none usable: {error}"
    return ", ".join(names) if names else "none (this PyTorch build or machine has no CUDA device)"


def _guarded(test) -> dict:
    try:
        return {"ok": True, "detail": test()}
    except Exception as error:
        return {"ok": False, "detail": f"{type(error).__name__}: {error}"}


def _tests() -> dict:
    """{operation: function that raises, or returns what was checked}."""
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

    def close(name, *arguments):
        def test() -> str:
            a, b = getattr(ours, name)(*arguments, *shape), getattr(reference, name)(*arguments, *shape)
            error = float((a - b).abs().max() / b.abs().max())
            if not error < 1e-5:
                raise ArithmeticError(f"relative error {error:.1e}")
            return f"relative error {error:.1e}, float32, {shape[0]} x {shape[1]}, {pattern.nnz} connections, batch 33"

        return test

    def equal(name, *arguments):
        def test() -> str:
            results = getattr(ours, name)(*arguments), getattr(reference, name)(*arguments)
            a, b = (r if isinstance(r, tuple) else (r,) for r in results)
            if not all(torch.equal(p, q) for p, q in zip(a, b, strict=True)):
                raise ArithmeticError("differs from the reference")
            return "identical"

        return test

    return {
        "spmm": close("spmm", *packed, values, x, bias),
        "spmm_t": close("spmm_t", *packed, values, dy),
        "sddmm": close("sddmm", *packed, dy, x),
        "rewire": equal("rewire", *packed, drop, *grown, *shape),
        "select_smallest": equal("select_smallest", values, 50),
        "grow_uniform": equal("grow_uniform", *packed, drop, 50, 3, *shape),
        "grow_gradient": equal("grow_gradient", *packed, drop, dy.double(), x.double(), 20, *shape),
        "sample": equal("sample", *shape, 9000, 7),
    }
