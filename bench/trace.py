"""Count the functions and files of the package that a command executes.

    python bench/trace.py train images-vqgan --data images --steps 2 --out runs/trace
    python bench/trace.py sample runs/generator --prompt "a red circle" --count 1

Functions are counted once each, in all threads; lambdas, comprehensions, class bodies and generated
methods of dataclasses are left out. `--list` before the command prints the functions of each file.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "tessera"


def main(arguments: list[str]) -> None:
    prints_functions = arguments[:1] == ["--list"]
    executed = trace_command(arguments[1:] if prints_functions else arguments)
    by_file: dict[str, list[str]] = defaultdict(list)
    for code in executed:
        file = Path(code.co_filename)
        if is_function(code, file):
            by_file[file.relative_to(PACKAGE).as_posix()].append(code.co_qualname)
    for file, names in sorted(by_file.items()) if prints_functions else ():
        print(f"{file}: {', '.join(sorted(names))}")
    print(f"{sum(map(len, by_file.values()))} functions in {len(by_file)} files")


def trace_command(arguments: list[str]) -> set[CodeType]:
    """Run a command of `tessera` and return the code objects of the package that it executed."""
    executed: set[CodeType] = set()
    prefix = f"{PACKAGE}/"

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(prefix):
            executed.add(frame.f_code)

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
