"""The entry point of the command line: parse the command, run it, and turn errors into exit codes.

Exit codes: 0 success, 1 failure or nothing usable, 2 an invalid request, 130 and 143 stopped by a
signal.
"""

from __future__ import annotations

import contextlib
import difflib
import signal
import sys
from io import TextIOWrapper

from tessera.run.errors import UserError, printable

USAGE = """\
Tessera trains and samples discrete-token generative models of images, videos, audio, music and
meshes.

tessera recipes                                   list what can be trained
tessera train RECIPE [--data PATH] [--out RUN]    start a run, or resume it; --help lists its flags
tessera train --config FILE [--out RUN]           start a run with the settings of another
tessera import MODULE:MODEL FILE --trainer NAME --out RUN    read a research package's checkpoint
tessera sample RUN [--data PATH] [--out DIR]      generate samples, or reconstruct examples
tessera speak RUN --text "..." [--voice FILE]     speak a text, in the voice of a recording
tessera tokenize RUN --data PATH --out DIR        encode a folder of files as codes
tessera decode RUN CODES --out DIR                decode codes to files
tessera evaluate RUN [--data PATH]                compute the metrics of a run
tessera index RUN --data PATH --out INDEX         embed a folder of music for search
tessera search INDEX "slow piano, minor key"      find the nearest music to a text or a recording
tessera check PATH                                inspect a folder: what can be used, and what not
tessera export RUN --out DIR                      write a model to be handed on
tessera pack PATH --out SHARDS                    write files and captions as tar shards
tessera view [RUNS...]                            show runs and a playground in the browser
tessera demo                                      train and sample on synthetic data

`tessera COMMAND --help` shows the flags of a command."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit."""
    from tessera.cli.launch import exit_process, stop_process

    # Until a run installs its own handlers.
    signal.signal(signal.SIGTERM, stop_process)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as by nohup
        signal.signal(signal.SIGINT, stop_process)
    from tessera.engine.signals import Interrupted

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names of files may be no UTF-8
            stream.reconfigure(errors="backslashreplace")
    try:
        code = run_command(sys.argv[1:] if arguments is None else arguments)
    except (UserError, Interrupted) as error:
        print_error(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        print_error("stopped")
        code = 130
    except BrokenPipeError:  # the output is piped into a program that has ended
        code = 0
    except OSError as error:  # of a disk or file, which no code can prevent
        where = f"{error.filename}: " if error.filename else ""
        print_error(f"{where}{error.strerror or error}")
        code = 1
    exit_process(code)


def print_error(message: str) -> None:
    with contextlib.suppress(OSError):
        print(f"tessera: {printable(message)}", file=sys.stderr)


def run_command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if arguments[0] == "--version":
        from tessera import __version__

        print(__version__)
        return 0
    from tessera.cli.commands import COMMANDS, list_recipes

    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.4)
        hint = f": did you mean {near[0]!r}?" if near else f".\n\n{USAGE}"
        raise UserError(f"There is no command {name!r}{hint}")
    if name == "train":
        return COMMANDS[name](*rest)  # it parses its flags itself
    if name == "recipes" and not rest:
        return list_recipes()
    import tyro

    return tyro.cli(COMMANDS[name], prog=f"tessera {name}", args=rest)
