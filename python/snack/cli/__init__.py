"""The command line, ``snack``: the only part of the package that prints. One module a command, each with ``add_parser(subparsers)``."""
