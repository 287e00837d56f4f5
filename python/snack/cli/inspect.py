"""``snack inspect FILE``: what a model file holds, without loading it."""

from __future__ import annotations

import json

from snack.cli.common import human_bytes, print_table, say

DESCRIPTION = """Lists the layers of a safetensors file written by `snack train --save` or `snack.save`: shape, connections, sparsity, bytes."""


def add_parser(subparsers) -> None:
    """Registers the command and its options."""
    parser = subparsers.add_parser("inspect", help="list the layers of a model file", description=DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="a .safetensors file")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(arguments) -> int:
    """Prints the layers, the dense tensors and the metadata of a file."""
    from snack.nn import persistence

    header = persistence.read_header(arguments.file)
    if arguments.json:
        say(json.dumps(header, indent=1))
        return 0
    in_layer = {f"{layer['name']}.{key}" for layer in header["layers"] for key in ("values", "rows", "cols", "shape", "slot_order")}
    rows = [
        [e["name"], "sparse", _shape(e["shape"]), f"{e['nnz']:,}", f"{e['sparsity']:.4g}", e["dtype"], human_bytes(e["bytes"])]
        for e in header["layers"]
    ]
    for tensor in header["tensors"]:
        if tensor["name"] not in in_layer:
            rows.append([tensor["name"], "dense", _shape(tensor["shape"]), "", "", tensor["dtype"], human_bytes(tensor["bytes"])])
    columns = ["name", "kind", "shape", "connections", "sparsity", "dtype", "bytes"]
    print_table(f"{header['path']} ({human_bytes(header['file_bytes'])})", columns, rows)
    notes = {key: value for key, value in header["metadata"].items() if key not in ("format", "snack.shared")}
    if notes:
        print_table("metadata", ["key", "value"], [[key, value] for key, value in notes.items()])
    return 0


def _shape(shape) -> str:
    return " x ".join(map(str, shape)) or "scalar"
