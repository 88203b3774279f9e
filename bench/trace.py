"""Count the functions and files of the package that a command executes.

    python bench/trace.py train images-vqgan --data images --steps 2 --out runs/trace
    python bench/trace.py --within Engine.load_batches,Engine.run_step train images-vqgan \
        --data images --steps 2 --out runs/trace
    python bench/trace.py sample runs/generator --prompt "a red circle" --count 1

Functions are counted once each, in all threads; lambdas, comprehensions, class bodies and generated
methods of dataclasses are left out. Before the command, `--within NAMES` counts only what the named
functions execute, themselves included, and `--list` prints the functions of each file.
"""

from __future__ import annotations

import argparse
import ast
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "tessera"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--within", default="", metavar="NAMES", help="qualified names, separated by commas"
    )
    parser.add_argument("--list", action="store_true", help="print the functions of each file")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a command of tessera")
    args = parser.parse_args(arguments)
    by_file: dict[str, list[str]] = defaultdict(list)
    for code in trace_command(args.command, frozenset(filter(None, args.within.split(",")))):
        file = Path(code.co_filename)
        if is_function(code, file):
            by_file[file.relative_to(PACKAGE).as_posix()].append(code.co_qualname)
    for file_name, names in sorted(by_file.items()) if args.list else ():
        print(f"{file_name}: {', '.join(sorted(names))}")
    print(f"{sum(map(len, by_file.values()))} functions in {len(by_file)} files")


def trace_command(arguments: list[str], within: frozenset[str]) -> set[CodeType]:
    """Run a command of `tessera` and return the code objects of the package that it executed,
    where `within` is not empty only those below a function with one of these names."""
    executed: set[CodeType] = set()
    prefix = f"{PACKAGE}/"
    depth: dict[int, int] = defaultdict(int)  # of the functions in `within`, for each thread

    def record(frame: FrameType, event: str, argument: Any) -> None:
        code, thread = frame.f_code, threading.get_ident()
        if event not in ("call", "return") or not code.co_filename.startswith(prefix):
            return
        is_limit = code.co_qualname in within
        depth[thread] += is_limit and event == "call"
        if event == "call" and (not within or depth[thread]):
            executed.add(code)
        depth[thread] -= is_limit and event == "return"

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        from tessera.cli.main import main as run_command

        run_command(arguments)
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
    return executed


def is_function(code: CodeType, file: Path) -> bool:
    """Return whether the code is that of a `def` statement."""
    functions = {
        (node.name, min([node.lineno, *(one.lineno for one in node.decorator_list)]))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    return (code.co_name, code.co_firstlineno) in functions


if __name__ == "__main__":
    main(sys.argv[1:])
