"""Names of other libraries that people try first on this library's values, and the way to what they mean."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

OF_MODULES: Mapping[str, Mapping[str, str]] = {
    "fshard": {
        "jit pjit compile": "fs.make_train_step(loss_fn, opt, plan) and fs.make_step(fn, plan) make steps",
        "grad vmap jvp vjp hvp jacrev jacfwd": "fs.value_and_grad and fs.func have derivatives of sharded losses",
        "fully_shard FSDP FullyShardedDataParallel": "fs.make_plan(fs.split(net), mesh, rules) says what is sharded",
        "init_device_mesh DeviceMesh": 'fs.make_mesh((-1,), ("data",)) makes a mesh',
        "PartitionSpec NamedSharding": 'fs.P("data") is a spec; fs.make_plan gives each leaf one',
        "save load save_checkpoint load_checkpoint": "fs.Checkpointer(folder), or fs.io for other formats",
        "all_gather psum all_reduce reduce_scatter": "fs.collectives has collectives by axis name",
        "init_process_group": "fs.make_mesh joins the processes of torchrun",
    },
    "fshard.optim": {
        "Adam AdamW": "fs.optim.adamw(lr, weight_decay=...); weight_decay=0.0 is Adam",
        "SGD": "fs.optim.sgd(lr, momentum=...)",
        "Adagrad Adadelta RMSprop NAdam RAdam Adamax ASGD Rprop": "fs.optim.from_torch(torch.optim.RMSprop, lr=...)",
        "Lion Muon Adafactor AdamW8bit Adam8bit": "names are lower-case: fs.optim.lion, muon, adafactor, adamw8bit",
        "clip_by_global_norm clip_grad_norm clip_norm": "clip_norm= of fs.make_train_step clips over all shards",
        "cosine_decay_schedule lr_scheduler LambdaLR": "a rate is any function of the step, as in fs.optim.schedules",
        "apply_updates init update": "the step calls the rule: fs.make_train_step(loss_fn, opt, plan)",
    },
    "fshard.tree": {
        "sub subtract": "fs.tree.add(a, b, -1.0)",
        "mul multiply": "fs.tree.scale(tree, factor), or fs.tree.map(fn, tree) for what is elementwise",
        "dot": "fs.tree.vdot(a, b, plan)",
        "tree_map map_structure": "fs.tree.map(fn, tree)",
        "zeros_like ones_like": "fs.tree.map(torch.zeros_like, tree)",
        "random randn normal_like": "fs.tree.normal(key, plan)",
        "global_norm": "fs.tree.norm(tree, plan), or norms for one by leaf",
    },
}
"""By module, names of other libraries that people try in it, separated by spaces: what is done in their place."""


def unknown_name(module: str, name: str) -> AttributeError:
    """The error of a name that a module does not have.

    >>> unknown_name("fshard", "jit")
    AttributeError("module 'fshard' has no attribute 'jit': fs.make_train_step(loss_fn, opt, plan) and ...
    """
    hint = next((hint for names, hint in OF_MODULES[module].items() if name in names.split()), "")
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint and f': {hint}'}", name=name)


def hinting(hints: Mapping[str, str]) -> Callable[[Any, str], NoReturn]:
    """A ``__getattr__``, which Python calls for attributes that are not there.

    Args:
        hints: by names, separated by spaces: what is done in their place.

    >>> class Value:
    ...     __getattr__ = hinting({"train eval": "the mode is an argument"})
    >>> Value().eval()
    Traceback (most recent call last):
    AttributeError: 'Value' object has no attribute 'eval': the mode is an argument
    """
    told = {name: hint for names, hint in hints.items() for name in names.split()}

    def hint(self: Any, name: str) -> NoReturn:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{text}: {told[name]}" if name in told else text, name=name, obj=self)

    return hint
