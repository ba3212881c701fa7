"""The command line: ``contrastile COMMAND ...``. A command's module is imported only when the command runs.

Exit codes: 0 success, 1 failure, 2 the command could not run, 130 it was interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from contrastile import __version__
from contrastile.backends import settings
from contrastile.reporting import CannotRunError, StoppedError, cannot_run

COMMANDS = {
    "verify": ("contrastile.verify.command", "compare every backend with the float64 oracle, within derived bounds"),
    "mutate": ("contrastile.mutate.command", "plant known defects one at a time and say which of them verify catches"),
    "doctor": ("contrastile.doctor", "say what is available here, what is missing and how to install or repair it"),
    "plan": ("contrastile.capacity", "say what memory a batch takes, loss and encoders apart, and which way fits"),
    "bench": ("contrastile.bench.command", "measure time and peak memory against a plain full-logits loss"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``, or in the process's arguments, and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = f"contrastile {words[0] if words else ''}".rstrip()
    try:
        directory = os.getcwd()
    except FileNotFoundError:
        print(f"{name}: the current directory must exist, got a deleted one; change to another", file=sys.stderr)
        return 2
    if not {"", directory} & set(sys.path):
        # like python -m, but unlike a console script: "module:attribute" may be a file of the current directory
        sys.path.insert(0, directory)
    if sys.stdout is None:
        print(f"{name}: the standard output must be open, got a closed one; send it to a file", file=sys.stderr)
        return 2
    try:
        return _run(words)
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        # redirect stdout: flushing it at exit would fail again, uncaught
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"{name}: the standard output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return cannot_run(words[0] if words else "", StoppedError("interrupted"))


def _run(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="contrastile", description="Contrastive losses at any batch size.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name in words[:1]:
            try:
                command_module = importlib.import_module(module)
            except ImportError as error:
                return cannot_run(name, error)
            command_module.add_arguments(command)
            command.set_defaults(run=command_module.main, words=words)
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 2
    try:
        settings.check()
    except ValueError as error:
        return cannot_run(args.command, error)
    try:
        code = int(args.run(args))
    except CannotRunError as error:
        return cannot_run(args.command, error)
    # flush here, because the error of a closed pipe cannot be caught at exit
    sys.stdout.flush()
    return code
