"""``fshard train``: trains from a config, or says what it would do."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fshard.arguments import size_text
from fshard.cli.plan_command import (
    add_hardware,
    foreseen,
    read_hardware,
    seldom_collected,
    show,
    show_stages,
    telling,
)
from fshard.errors import PlanError
from fshard.foresight.foresee import state_bytes
from fshard.foresight.hardware import Hardware
from fshard.foresight.staged_foresight import foresee_stages
from fshard.launching.caller import launch
from fshard.pipeline.pipeline_step import PipelineStep
from fshard.recipe.config_checks import check_config
from fshard.recipe.read_config import ReadConfig, read_config
from fshard.recipe.run_config import key_table, planned, to_toml, train
from fshard.recipe.train_script import script_of
from fshard.writing import write_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes; the help ends with every key."""
    parser.set_defaults(run=run)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    rows = [f"  {name}: {kind}, default {default}\n      {text}" for name, kind, default, text in key_table()]
    parser.epilog = "\n".join(["keys of a config:", *rows, "", parser.epilog or ""])
    parser.add_argument("config", help="a TOML file")
    parser.add_argument("changes", nargs="*", default=[], metavar="key=value", help="in place of what the file says")
    parser.add_argument("--ranks", type=int, help="start this many processes; without it, it joins those of torchrun")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its forecast, and stop")
    parser.add_argument("--print-config", action="store_true", help="print every key with its value, and stop")
    parser.add_argument("--emit-script", metavar="FILE", help="write a Python script that does the same, and stop")
    add_hardware(parser.add_argument_group("hardware of a dry run"))


def run(args: argparse.Namespace) -> int:
    """Train, or do what the options say in place of it."""
    if args.ranks is not None and args.ranks < 1:
        raise PlanError(f"--ranks {args.ranks}: give the number of processes, 1 or more")
    read = read_config(args.config, args.changes)
    if args.print_config:
        print(to_toml(read.config), end="")
    elif args.emit_script:
        check_config(read)
        write_whole(Path(args.emit_script), script_of(read.config))
    elif args.dry_run:
        return forecast(read, args)
    elif args.ranks is None:
        _train(args.config, args.changes)
    else:
        planned(read, args.ranks)  # an error here starts no process
        launch(_train, args.config, args.changes, ranks=args.ranks)
    return 0


def _train(config: str, changes: Sequence[str]) -> None:
    """Train on this rank; rank 0 says where the run is."""
    state = train(config, changes)
    out = read_config(config, changes).config.out
    if state.plan.mesh.rank == 0:
        print(f"trained to step {state.step}" + (f": {out}" if out else ""))


def forecast(read: ReadConfig, args: argparse.Namespace) -> int:
    """Print the plan, the memory of a rank here, and the forecast of ``fshard plan``; returns the exit status."""
    machines = read_hardware(args)
    step, batch = planned(read, args.ranks or 1)
    if isinstance(step, PipelineStep):
        return _forecast_stages(step, batch, machines)
    trace, state = step.trace(batch), size_text(state_bytes(step, step.plan))
    peak = size_text(trace.footprint.peak_bytes) if trace.needs else None
    print(f"{step.plan}\nschedule: {trace.schedule!r}")
    print(f"state of a rank: {state} of parameters and optimizer state")
    print(f"step of a rank here: {'unknown until it has run' if peak is None else f'{peak} more at its peak'}\n")
    if peak is None:
        return 0
    with telling(silent=False) as progress, seldom_collected():
        seen, found = foreseen((step, batch), step.plan.mesh, machines, None, progress)
    show(seen, found)
    return 0 if seen.fits else 1


def _forecast_stages(step: PipelineStep, batch: Any, machines: Hardware) -> int:
    """Print the plan, the schedules, and the forecast of stages; returns the exit status."""
    whole = step.plan.whole
    assert whole is not None
    with telling(silent=False) as progress, seldom_collected():
        seen = foresee_stages((step, batch), whole.mesh, machines, progress)
    print(f"{whole}\n{seen.chosen.schedules}")
    show_stages(seen)
    return 0 if seen.fits else 1
