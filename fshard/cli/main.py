"""The ``fshard`` command. Each subcommand is a function of parsed arguments that prints and returns an exit status."""

import argparse
import io
import sys
from collections.abc import Sequence

from fshard.cli import ckpt, doctor, plan_command, trace_command, train_command
from fshard.errors import ShardError
from fshard.version import VERSION


def parser() -> argparse.ArgumentParser:
    """All commands."""
    root = argparse.ArgumentParser(prog="fshard", description="Tools for fshard's files, and for the machine.")
    root.add_argument("--version", action="version", version=f"fshard {VERSION}")
    tools = root.add_subparsers(required=True, title="commands", metavar="train|ckpt|plan|trace|doctor")
    text = "train from a config, in TOML"
    ends = "Exit status: 0; 1 if a dry run fits into no memory; 2 if the config cannot be used, or the run failed."
    train_command.add_arguments(tools.add_parser("train", help=text, description=f"{text.capitalize()}.", epilog=ends))
    text = "list, verify and convert checkpoints"
    ends = "Exit status: 0; 1 if something differs or is damaged; 2 if the command failed."
    ckpt.add_commands(tools.add_parser("ckpt", help=text, description=f"{text.capitalize()}.", epilog=ends))
    text = "foresee a step: memory, bytes, time, policies; without processes and weights"
    ends = "Exit status: 0; 1 if no policy fits into the memory; 2 if the command failed."
    plan_command.add_arguments(tools.add_parser("plan", help=text, description=f"{text.capitalize()}.", epilog=ends))
    text = "join the records of all ranks of a run to one trace, and say who waits for whom"
    trace_command.add_arguments(tools.add_parser("trace", help=text, description=f"{text.capitalize()}."))
    text = "say what this machine has for fshard, and test it on two ranks"
    ends = "Exit status: 0; 1 if something is wrong."
    doctor.add_arguments(tools.add_parser("doctor", help=text, description=f"{text.capitalize()}.", epilog=ends))
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with these arguments, by default the process' own; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names in files may hold any character
        sys.stdout.reconfigure(errors="backslashreplace")
    root = parser()
    arguments, rest = root.parse_known_args(argv)
    if any(each.startswith("-") for each in rest) or rest and "changes" not in arguments:
        root.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # key=value behind options
        arguments.changes += rest
    try:
        return int(arguments.run(arguments))
    except (ShardError, ImportError) as error:
        print(f"fshard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fshard: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fshard ckpt show ... | head`
        sys.stderr.close()
        return 0
