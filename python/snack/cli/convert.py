"""``snack convert IN OUT``: model files of pruned models become truly sparse ones, and the way back. No model code is needed."""

from __future__ import annotations

from snack.cli.common import check_writable, human_bytes, print_table, say
from snack.errors import SnackError

DESCRIPTION = """Converts a model file: .safetensors, .pt, .pth, .bin, .ckpt (read without running any code in them) or .npz (arrays by name, or a
matrix of scipy.sparse.save_npz). Layers whose connections the file names become sparse: masks of torch.nn.utils.prune and torch.ao.pruning,
`weight_mask` beside `weight`, torch.sparse tensors, scipy matrices, and sparse layers of this library. In other layers zeros are only numbers,
until --include says that they are absent connections (SparseGPT, Wanda, prune.remove). The suffix of OUT chooses the format."""

_RESERVED = ("format", "snack", "snack.shared")


def add_parser(subparsers) -> None:
    """Registers the command and its options."""
    parser = subparsers.add_parser("convert", help="turn the file of a pruned model into a sparse one, or back", description=DESCRIPTION)
    add_files(parser)
    parser.add_argument("--dense", action="store_true", help="write every layer dense, zeros where there is no connection")
    add_globs(parser, "layers whose zeros are absent connections", "layers that are written dense")
    parser.add_argument("--masks", metavar="FILE", help="a file of masks of 0 and 1, named like the weights or layers")
    parser.add_argument("--sum-duplicates", action="store_true", help="add the entries of a position that a sparse matrix lists several times")
    parser.set_defaults(run=run)


def add_files(parser) -> None:
    """The arguments IN and OUT."""
    parser.add_argument("input", metavar="IN", help="a .safetensors, .pt, .pth, .bin, .ckpt or .npz file")
    parser.add_argument("output", metavar="OUT", help="the file to write; its suffix chooses the format")


def add_globs(parser, included: str, excluded: str) -> None:
    """The options --include and --exclude, which can be given several times."""
    parser.add_argument("--include", metavar="GLOB", action="append", default=[], help=f"{included}, such as '*' or 'model.layers.*'")
    parser.add_argument("--exclude", metavar="GLOB", action="append", default=[], help=excluded)


def run(arguments) -> int:
    """Converts, writes, and prints the layers of the new file."""
    from snack import io
    from snack.nn import SparseLinear, densify

    state = read_input(arguments)
    masks = None if arguments.masks is None else io.read(arguments.masks)
    model = io.as_model(state, arguments.include, arguments.exclude, masks, arguments.sum_duplicates)
    notes = model.import_notes
    if arguments.dense:
        model = densify(model)
    elif not any(isinstance(module, SparseLinear) for module in model.modules()):
        raise SnackError(f"no layer of {arguments.input} says which connections exist: {_hint(model)}")
    finish(arguments, state, model)
    for name, why in notes.items():
        say(f"{name}: {why}")
    return 0


def _hint(model) -> str:
    """What to do about a file without masks: its layers with the most zeros."""
    dense = [(1.0 - float(layer.weight.count_nonzero()) / max(1, layer.weight.numel()), name) for name, layer in layers(model)]
    if not dense:
        return "it has no 2-D weight"
    dense.sort(key=lambda item: -item[0])
    listed = ", ".join(f"'{name or '(model)'}' ({zeros:.1%} zeros)" for zeros, name in dense[:6]) + (", ..." if len(dense) > 6 else "")
    return f"if their zeros are absent connections, choose layers with --include: {listed}; to make zeros, use `snack prune`"


def read_input(arguments) -> dict:
    """{name: tensor} of the input; SnackError before that where the output could not be written."""
    from snack.io import files

    files.check_suffix(arguments.output, "OUT")
    check_writable(arguments.output, "OUT")
    return files.read(arguments.input)


def finish(arguments, state: dict, model) -> None:
    """Writes the model and prints a row a layer, and what is no layer."""
    from snack.io import write

    write(model, arguments.output, _metadata(arguments) or None)
    after = model.state_dict()
    rows, known = [], set()
    for name, layer in layers(model):
        prefix = f"{name}." if name else ""
        known |= {key for key in after if _belongs(key, prefix)}
        positions, nnz = layer.out_features * layer.in_features, getattr(layer, "nnz", None)
        count = int(layer.weight.count_nonzero()) if nnz is None else nnz
        row = [name or "(model)", "dense" if nnz is None else "sparse", f"{layer.out_features} x {layer.in_features}", f"{count:,}"]
        sizes = [human_bytes(sum(_bytes(t) for key, t in tensors.items() if _belongs(key, prefix))) for tensors in (state, after)]
        rows.append([*row, f"{1.0 - count / positions if positions else 0.0:.4g}", *sizes])
    title = f"{arguments.input} ({_file_bytes(arguments.input)}) -> {arguments.output} ({_file_bytes(arguments.output)})"
    print_table(title, ["layer", "kind", "shape", "non-zero", "sparsity", "bytes before", "after"], rows)
    rest = [key for key in after if key not in known]
    if rest:
        more = f" and {len(rest) - 12} more" if len(rest) > 12 else ""
        say(f"not converted: {', '.join(rest[:12])}{more}")


def layers(model) -> list[tuple[str, object]]:
    """(name, layer) of every linear layer, dense or sparse."""
    from torch import nn

    from snack.nn import SparseLinear

    return [(name, m) for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, (nn.Linear, SparseLinear))]


def _belongs(key: str, prefix: str) -> bool:
    rest = key[len(prefix) :]
    return key.startswith(prefix) and ("." not in rest or rest.startswith("parametrizations."))


def _bytes(tensor) -> int:
    import torch

    if tensor.layout == torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc):
        rows_first = tensor.layout == torch.sparse_csr
        indices = (tensor.crow_indices(), tensor.col_indices()) if rows_first else (tensor.ccol_indices(), tensor.row_indices())
        return sum(part.nbytes for part in (*indices, tensor.values()))
    return tensor.nbytes


def _file_bytes(path) -> str:
    from pathlib import Path

    return human_bytes(Path(path).stat().st_size)


def _metadata(arguments) -> dict:
    """What the header of a safetensors file says besides the format, for the next one."""
    from snack.nn import read_header

    if not all(str(path).lower().endswith(".safetensors") for path in (arguments.input, arguments.output)):
        return {}
    return {key: value for key, value in read_header(arguments.input)["metadata"].items() if key not in _RESERVED}
