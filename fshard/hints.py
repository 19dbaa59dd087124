"""Names of other libraries that people try first on this library's values, and the way to what they mean."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

OF_MODULES: Mapping[str, Mapping[str, str]] = {
    "fshard": {
        "jit pjit compile": "fs.make_train_step(loss_fn, opt, plan) and fs.make_step(fn, plan) make steps",
        "grad vmap jvp vjp hvp jacrev jacfwd": "fs.value_and_grad and fs.func have derivatives of sharded losses",
        "fully_shard FSDP FullyShardedDataParallel": "fs.make_plan(fs.split(net), mesh, rules) says what is sharded",
        "init_device_mesh DeviceMesh": 'fs.make_mesh((-1,), ("data",)) makes a mesh',
        "PartitionSpec NamedSharding": 'fs.P("data") is a spec; fs.make_plan gives each leaf one',
        "save load save_checkpoint load_checkpoint": "fs.Checkpointer(folder), or fs.io for other formats",
        "all_gather psum all_reduce reduce_scatter": "fs.collectives has collectives by axis name",
        "fit Trainer TrainingArguments": "fs.train(config), or fs.train_loop(step, start, batches, steps=...)",
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
    "fshard.optim.schedules": {
        "cosine cosine_decay CosineAnnealingLR": "fs.optim.schedules.warmup_cosine(peak, warmup=0, total=steps)",
        "wsd WSD": "fs.optim.schedules.warmup_stable_decay(peak, warmup, total, cooldown)",
        "OneCycleLR StepLR ExponentialLR exponential": "any function of the step is a schedule",
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


OF_CALLS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "make_mesh": (
        'fs.make_mesh((-1,), ("data",))',
        {
            "backend": "device=, since NCCL serves CUDA devices and gloo the CPU",
            "mesh_dim_names names": "the second argument, axis_names",
            "mesh_shape shape axis_shapes": "the first argument, sizes",
            "device_type devices": 'device="cpu" or device="cuda"',
            "world_size rank init_method": "the variables of torchrun, RANK and WORLD_SIZE",
        },
    ),
    "virtual_mesh": ('fs.virtual_mesh((2,), ("data",))', {"ranks world_size": "the product of sizes"}),
    "make_plan": (
        'fs.make_plan(model, mesh, [(r".*", fs.fsdp("data"))], batch=fs.P("data"))',
        {
            "mixed_precision mp_policy dtype": "precision=fs.Precision(compute=torch.bfloat16)",
            "cpu_offload offload_policy": 'fs.Rule(pattern, spec, memory_kind="pinned_host")',
            "reshard_after_forward": "schedule=fs.Policy(reshard=...) of fs.make_train_step",
            "batch_size": 'batch=fs.P("data"), a spec of any batch',
            "spec sharding shardings": "the third argument, rules",
        },
    ),
    "init_state": (
        "fs.init_state(plan, opt, seed=0)",
        {"model module": "params=model.params, to keep its values"},
    ),
    "make_train_step": (
        "fs.make_train_step(loss_fn, opt, plan)",
        {
            "precision mixed_precision dtype amp": "fs.make_plan(..., precision=fs.Precision(compute=torch.bfloat16))",
            "optimizer": "the second argument, opt",
            "max_norm max_grad_norm grad_clip clip clip_grad_norm": "clip_norm=",
            "accumulation_steps gradient_accumulation_steps grad_accum accumulation": "accumulate=",
            "scheduler lr_scheduler": "the rate of the optimizer, as a function of the step: fs.optim.schedules",
            "gradient_checkpointing checkpoint": "remat=",
        },
    ),
    "value_and_grad": ("fs.value_and_grad(loss_fn, plan)", {"argnums": "only=, a pattern of paths"}),
    "make_update": ("fs.make_update(opt, plan)", {"max_norm grad_clip clip": "clip_norm="}),
    "make_step": ("fs.make_step(fn, plan)", {"donate_argnums": "donate="}),
    "unshard": ("fs.unshard(state.params, plan)", {}),
    "launch": (
        "fs.launch(fn, *args, ranks=2)",
        {
            "nproc nprocs nproc_per_node num_processes world_size": "ranks=",
            "args": "the arguments themselves, after fn",
        },
    ),
    "train_loop": (
        "fs.train_loop(step, start, batches, steps=1000)",
        {
            "checkpoint checkpointer ckpt": "checkpoints=",
            "epochs num_epochs": "steps=, or fs.data.Loader(..., epochs=)",
            "max_steps num_steps total": "steps=",
            "tracker trackers logger callbacks": "track=",
        },
    ),
    "Loader": (
        "fs.data.Loader(dataset, plan, batch=32)",
        {"batch_size": "batch=, the rows of a batch over all ranks"},
    ),
}
"""By function: a right call, and names of arguments that other libraries have, separated by spaces, with what to give
in their place."""


def teaching(fn: Callable[P, R], name: str = "") -> Callable[P, R]:
    """A function that says how it is called where its arguments do not fit.

    Args:
        fn: the function, which ``OF_CALLS`` knows by its name.
        name: another name of it there.

    >>> teaching(lambda loss_fn, plan: 0, "value_and_grad")(1, 2, argnums=0)
    Traceback (most recent call last):
    TypeError: value_and_grad: got an unexpected keyword argument 'argnums'. Call fs.value_and_grad(...
    """
    name = name or fn.__name__
    right, hints = OF_CALLS[name]
    told = {word: hint for words, hint in hints.items() for word in words.split()}
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            hints = [f". For {word}=: {told[word]}" for word in kwargs if word in told]
            raise TypeError(f"{name}: {error}. Call {right}{''.join(hints)}") from None
        return fn(*args, **kwargs)

    return call


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
