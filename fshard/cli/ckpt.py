"""``fshard ckpt``: the contents of a folder of checkpoints, mostly from the manifests alone."""

import argparse
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import torch

from fshard.arguments import bytes_of, size_text
from fshard.checkpoint.checkpointer import Checkpointer
from fshard.checkpoint.folder import LEFT, MANIFEST, choose_steps, list_steps, read_manifest, step_folder
from fshard.checkpoint.manifest import empty
from fshard.checkpoint.read import verify_step
from fshard.checkpoint.rewrite import load_tensor, to_file, to_folder
from fshard.cli.console_table import print_table
from fshard.errors import CheckpointError
from fshard.interchange.convert import Kind, kind_of, to_dcp, to_hf, to_state
from fshard.reading.files import file_errors, printable
from fshard.sharding.mesh import abstract_mesh
from fshard.state.entries import entries


def add_commands(parser: argparse.ArgumentParser) -> None:
    """The subcommands and their arguments."""
    commands = parser.add_subparsers(required=True, title="commands", metavar="ls|show|verify|convert|diff")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    where = "a folder of checkpoints, or of one step"
    ls = add("ls", run_ls, "List the steps in a folder.")
    ls.add_argument("dir", help="a folder of checkpoints")
    show = add("show", run_show, "Show what a step holds, from its manifest.")
    verify = add("verify", run_verify, "Read every byte of all steps, or of one, and compare it with the manifest.")
    convert = add("convert", run_convert, "Write a step in another form, or another library's folder as a step.")
    for command in (show, verify, convert):
        command.add_argument("dir", help=where)
        default = "all of them" if command is verify else "the newest"
        command.add_argument("--step", type=int, help=f"the step; {default} by default")
    show.add_argument("--match", default=".*", help="a regular expression on whole names of tensors")
    convert.add_argument("out", help="a file that ends in .safetensors, or a folder of checkpoints")
    convert.add_argument("--ranks", type=int, default=1, help="for a folder: cut for this many ranks")
    convert.add_argument("--state", help="the state to convert, of a checkpoint of several")
    convert.add_argument("--params", action="store_true", help="for a file: only parameters, without 'params.'")
    convert.add_argument("--to", choices=("hf", "dcp"), help="a folder for transformers, or of torch.distributed")
    convert.add_argument("--max-shard-size", default="5GB", help="with --to hf: bytes of a file at most")
    diff = add("diff", run_diff, "Compare two steps: names, shapes, dtypes, numbers; with --values the tensors too.")
    diff.add_argument("dir", help=where)
    diff.add_argument("other", help=where)
    diff.add_argument("--step", type=int, help="of the first; the newest by default")
    diff.add_argument("--other-step", type=int, help="of the other; the newest by default")
    diff.add_argument("--values", action="store_true", help="read and compare the tensors")


def find(path: str, step: int | None) -> str:
    """The folder of a step; a CheckpointError if there is none."""
    path = os.path.abspath(path)
    if step is None and os.path.lexists(os.path.join(path, MANIFEST)):
        return path
    return step_folder(path, choose_steps(path, step)[0])


def run_ls(args: argparse.Namespace) -> int:
    """List steps and leftovers of failed saves."""
    root = os.path.abspath(args.dir)
    steps = list_steps(root)
    rows, status = [], 0
    for step in steps:
        try:
            manifest = read_manifest(step_folder(root, step))
        except CheckpointError as error:
            rows.append([str(step), "-", "-", "-", str(error).splitlines()[0]])
            status = 1
            continue
        mesh = " x ".join(f"{axis}={size}" for axis, size in manifest.mesh.items())
        sizes = [str(len(manifest.tensors)), str(len(manifest.files)), size_text(manifest.nbytes)]
        rows.append([str(step), *sizes, mesh])
    if not steps:
        raise empty(root)
    print_table(["step", "tensors", "files", "bytes", "mesh"], rows)
    with file_errors("list", root):
        left = sorted(name for name in os.listdir(root) if LEFT.fullmatch(name))
    for name in left:
        print(f"{name}: of a save that is in progress or has failed; the next save removes it")
    return status


def run_show(args: argparse.Namespace) -> int:
    """Show a manifest."""
    folder = find(args.dir, args.step)
    manifest = read_manifest(folder)
    mesh = " x ".join(f"{axis}={size}" for axis, size in manifest.mesh.items())
    print(f"{folder}: step {manifest.step}, {size_text(manifest.nbytes)} in {len(manifest.files)} files")
    print(printable(f"written by {', '.join(f'{k} {v}' for k, v in manifest.versions.items())} on {mesh}"))
    if manifest.states:
        print(f"states: {', '.join(manifest.states)}")
    for name in ("scalars", "data", "metadata", "schedule"):
        value = getattr(manifest, name)
        if value is not None:
            print(f"{name}: {json.dumps(value)}")
    try:
        pattern = re.compile(args.match)
    except re.error as error:
        raise CheckpointError(f"--match {args.match!r} is not a regular expression: {error}") from error
    rows = [
        [name, str(info), info.spec, size_text(info.nbytes), str(len(info.extents))]
        for name, info in manifest.tensors.items()
        if pattern.fullmatch(name)
    ]
    print_table(["tensor", "type", "spec", "bytes", "extents"], rows)
    rows = [[name, str(info.size), info.sha256] for name, info in sorted(manifest.files.items())]
    print_table(["file", "bytes", "sha256"], rows)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Verify one step, or all of a folder."""
    root = os.path.abspath(args.dir)
    one = args.step is not None or os.path.lexists(os.path.join(root, MANIFEST))
    folders = [find(root, args.step)] if one else [step_folder(root, step) for step in list_steps(root)]
    if not folders:
        raise empty(root)
    status = 0
    for folder in folders:
        try:
            manifest = verify_step(folder)
        except CheckpointError as error:
            print(f"{os.path.basename(folder)}: {error}")
            status = 1
        else:
            print(f"{os.path.basename(folder)}: {size_text(manifest.nbytes)} in {len(manifest.files)} files, good")
    return status


def run_convert(args: argparse.Namespace) -> int:
    """Write a step in another form."""
    kind = kind_of(args.dir)
    if kind is not None:
        return _import(args, kind)
    folder = find(args.dir, args.step)
    manifest = read_manifest(folder)
    if args.state is not None or (manifest.states and (args.to or args.out.endswith(".safetensors"))):
        if args.state not in manifest.states:
            known = ", ".join(manifest.states) or "none, since it holds one without a name"
            raise CheckpointError(f"{folder} holds no state for --state {args.state}: give one of {known}")
        manifest = manifest.of(args.state)
    if args.to == "hf":
        limit = bytes_of(args.max_shard_size, "--max-shard-size ")
        print(f"{args.out}: {size_text(to_hf(folder, manifest, args.out, limit))}")
        return 0
    if args.to == "dcp":
        print(f"{args.out}: {size_text(to_dcp(folder, manifest, args.out))}, without param_groups")
        return 0
    if args.ranks < 1:
        raise CheckpointError(f"--ranks {args.ranks}: give 1 or more")
    if not args.out.endswith(".safetensors"):
        to_folder(folder, manifest, os.path.abspath(args.out), args.ranks)
        print(f"{step_folder(args.out, manifest.step)}: {size_text(manifest.nbytes)} for {args.ranks} ranks")
        return 0
    start = "params." if args.params else ""
    names = {name: name.removeprefix(start) for name in manifest.tensors if name.startswith(start)}
    print(f"{args.out}: {len(names)} tensors, {size_text(to_file(folder, manifest, args.out, names))}")
    return 0


def _import(args: argparse.Namespace, kind: Kind) -> int:
    """Write a folder of Hugging Face or of torch.distributed.checkpoint as a checkpoint."""
    if args.step is not None or args.to is not None or args.params or args.out.endswith(".safetensors"):
        raise CheckpointError(
            f"{args.dir} is not a checkpoint of fshard ({kind}): it converts to a folder of checkpoints"
        )
    state = to_state(args.dir, kind, abstract_mesh((1,), ("ranks",)))
    with Checkpointer(args.out) as ckpt:
        ckpt.save(state, metadata={"converted from": os.path.abspath(args.dir)})
    print(f"{step_folder(args.out, state.step)}: {len(entries(state))} tensors")
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """Print how two steps differ."""
    one, other = find(args.dir, args.step), find(args.other, args.other_step)
    found = list(differences(one, other, args.values))
    for line in found:
        print(printable(line, 2000))
    if not found:
        print("no difference" + ("" if args.values else " in what manifests say; --values compares the tensors"))
    return 1 if found else 0


def differences(one: str, other: str, values: bool) -> Iterator[str]:
    """The differences between the folders of two steps."""
    a, b = read_manifest(one), read_manifest(other)
    for name in ("states", "scalars", "data", "metadata", "schedule"):
        if getattr(a, name) != getattr(b, name):
            yield f"{name}: {json.dumps(getattr(a, name))} and {json.dumps(getattr(b, name))}"
    for name in dict.fromkeys([*a.tensors, *b.tensors]):
        if name not in b.tensors:
            yield f"{name}: {a.tensors[name]} is only in {one}"
        elif name not in a.tensors:
            yield f"{name}: {b.tensors[name]} is only in {other}"
        elif str(a.tensors[name]) != str(b.tensors[name]):
            yield f"{name}: {a.tensors[name]} and {b.tensors[name]}"
        elif values:
            x, y = load_tensor(one, a, name), load_tensor(other, b, name)
            wrong = x.view(-1).view(torch.uint8) != y.view(-1).view(torch.uint8)
            if wrong.any():
                off = int(wrong.view(x.numel(), -1).any(1).sum())
                far = (x.double() - y.double()).abs().max().item()
                yield f"{name}: {off} of {x.numel()} elements differ, by {far:.3g} at most"
