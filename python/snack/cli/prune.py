"""``snack prune IN OUT --sparsity S``: the largest weights of a dense model file stay, the others are no longer stored."""

from __future__ import annotations

import warnings

from snack.cli.common import say
from snack.cli.convert import add_files, add_globs, finish, layers, read_input
from snack.errors import require

DESCRIPTION = """Prunes the layers of a model file by magnitude, without the model's code, and writes them sparse. A layer is a name with a 2-D
`weight`, perhaps a `bias` of as many entries as it has rows, and nothing else: that can be an embedding too, and a file does not say so, so
choose by name. Layers that share a weight stay dense, layers that are sparse already stay as they are."""


def add_parser(subparsers) -> None:
    """Registers the command and its options."""
    parser = subparsers.add_parser("prune", help="prune a dense model file by magnitude", description=DESCRIPTION)
    add_files(parser)
    parser.add_argument("--sparsity", type=float, required=True, help="fraction to remove over all pruned layers, 0 <= sparsity < 1")
    parser.add_argument("--distribution", default="uniform", choices=("uniform", "er", "erk"), help="which layers keep more (default: uniform)")
    parser.add_argument(
        "--scope", default="layer", choices=("layer", "global"), help="compare weights within a layer (default), or of all layers with each other"
    )
    add_globs(parser, "layers to prune (default: all)", "layers that stay dense")
    parser.set_defaults(run=run)


def run(arguments) -> int:
    """Prunes, writes, and prints the layers of the new file."""
    from snack import io, prune

    state = read_input(arguments)
    model = io.as_model(state)
    require(len(layers(model)) > 0, f"{arguments.input} holds no 2-D weight, so there is no layer to prune")
    notes = model.import_notes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = (arguments.include or None, arguments.exclude)
        model = prune.magnitude(model, arguments.sparsity, arguments.distribution, arguments.scope, *chosen)
    finish(arguments, state, model)
    for name, why in notes.items():
        say(f"{name}: {why}")
    for warning in caught:
        say(f"note: {warning.message}")
    return 0
