"""The names of PyTorch that are not public.

No other file uses one: ``tests/project/layering.py`` holds that. Where a release of PyTorch renames or removes one,
this file is adapted; ``docs/pytorch-versions.md`` says how a release is adopted. Operators in ``torch.ops`` and
members of public objects (``Tensor._make_subclass``, ``Module._parameters``) are used where they are needed.

This is also the first import of PyTorch. It goes without PyTorch's warning that numpy is not installed, since fshard
does not need numpy. A program that imports torch before fshard gets that warning.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch

from torch import _compile, overrides
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.nn.modules import batchnorm, conv
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

F = TypeVar("F", bound=Callable[..., Any])

# Transforms, modes and contexts.
functorch: Any = torch._C._functorch
custom_function_call: Any = torch._functorch.autograd_function.custom_function_call
peek_interpreter_stack = functorch.peek_interpreter_stack
BelowAutograd = torch._C._AutoDispatchBelowADInplaceOrView
DisableAutocast = torch._C._DisableAutocast
DisableFuncTorch = torch._C._DisableFuncTorch
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
DispatchModeKey = torch._C._TorchDispatchModeKey
dispatch_mode = torch._C._get_dispatch_mode
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
any_autocast = torch._C._is_any_autocast_enabled
disable_current_modes = _python_dispatch._disable_current_modes
dispatch_mode_stack: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
function_mode_stack: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
tracing_state = torch._C._get_tracing_state
dispatch_keys: Callable[[torch.Tensor], Any] = torch._C._dispatch_key_set
cudnn_deterministic = torch._C._get_cudnn_deterministic
cudnn_benchmark = torch._C._get_cudnn_benchmark

# Products in float8.
scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm


_GROUP_METHODS = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


def group_method(group: Any, name: str) -> Callable[..., Any]:
    """A collective of a process group by its name in PyTorch 2.13, which renamed it."""
    found: Callable[..., Any] = getattr(group, name, None) or getattr(group, _GROUP_METHODS[name])
    return found


# Base classes of modules.
BatchNorm = batchnorm._BatchNorm
NormBase = batchnorm._NormBase
ConvNd = conv._ConvNd

# Autograd.
graph_task = torch._C._current_graph_task_id
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

# Settings of attention, and where an operator of a graph is also found in C++.
sdp_flash = torch._C._get_flash_sdp_enabled
sdp_mem_efficient = torch._C._get_mem_efficient_sdp_enabled
sdp_math = torch._C._get_math_sdp_enabled
sdp_cudnn = torch._C._get_cudnn_sdp_enabled
sdp_order = torch._C._get_sdp_priority_order
nn_operators: Any = torch._C._nn

# Operators on lists of tensors, and fused ones.
foreach_add_ = torch._foreach_add_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sign_ = torch._foreach_sign_
foreach_zero_ = torch._foreach_zero_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_
assert_async = torch._assert_async
weight_norm = torch._weight_norm


def on_memory_of(x: torch.Tensor) -> torch.Tensor:
    """A tensor on the memory of a contiguous one, where it lies now; it keeps no memory and sees no mode."""
    with disable_current_modes():
        made = torch.empty(0, dtype=x.dtype, device=x.device)
        if not x.numel():
            return made.view(x.shape)
        storage = torch._C._construct_storage_from_data_pointer(x.data_ptr(), x.device, x.nbytes)
        return made.set_(storage, 0, x.shape, x.stride())


def untraced_by_dynamo(fn: F) -> F:
    """Let Dynamo break its graph at a function, without importing Dynamo, as ``torch.compiler.disable`` does."""
    return cast(F, _compile._disable_dynamo(fn))


def forward_ad_level() -> int:
    """Return the level of forward-mode differentiation that is active; negative if none is."""
    return int(torch.autograd.forward_ad._current_level)


def transforms_depth() -> int:
    """Return the number of transforms of ``torch.func`` around this call."""
    return int(functorch.get_dynamic_layer_stack_depth())


def forward_parts(x: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a tensor and its tangent at a level, both as they are below it; None for a tangent that is zero."""
    if not functorch.is_functorch_wrapped_tensor(x):
        return x, None
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    primal, tangent = unpack(x)
    primal = functorch._unwrap_for_grad(primal, level)
    if tangent is None:
        return primal, None
    tangent = functorch._unwrap_for_grad(tangent, level)
    return primal, None if of_zeros(tangent) else tangent


def of_zeros(x: torch.Tensor) -> bool:
    """Tell whether a tensor is one of zeros without memory, such as the tangent of a constant."""
    found: bool = x._is_zerotensor()
    return found


def vmap_size(level: Any) -> int:
    """Return the size of the batch of a ``vmap`` on the stack of transforms."""
    return int(functorch.CVmapInterpreterPtr(level).batchSize())


@contextmanager
def below_transforms(depth: int = 0) -> Iterator[list[Any]]:
    """Leave all transforms of ``torch.func`` but the ``depth`` outermost ones. Yields those that are left."""
    left: list[Any] = []
    try:
        while transforms_depth() > depth:
            left.insert(0, functorch.pop_dynamic_layer_stack())
        yield left
    finally:
        for layer in left:
            functorch.push_dynamic_layer_stack(layer)


@contextmanager
def without_function_mode(mode: Any) -> Iterator[None]:
    """Leave one of the active modes of functions."""
    left: list[Any] = []
    try:
        while not left or left[-1] is not mode:
            left.append(torch._C._pop_torch_function_stack())
        yield
    finally:
        for above in reversed(left):
            torch._C._push_on_torch_function_stack(above)


def batched(x: torch.Tensor, level: int) -> torch.Tensor:
    """Return a tensor whose first dim is the batch of the ``vmap`` of a level."""
    return cast(torch.Tensor, functorch._add_batch_dim(x, 0, level))


def set_cuda_device_guard() -> None:
    """Register the guard of CUDA devices for this process, on this thread, which must never end."""
    torch._C._ensureCUDADeviceGuardSet()


def graph_break(message: str) -> None:
    """Let Dynamo, which traces this call, go on without a graph."""
    torch._dynamo.graph_break(msg=message)


def default_group() -> Any:
    """Return the default process group of ``torch.distributed``."""
    return _distributed()._get_default_group()


def default_store() -> Any:
    """Return the store of the default process group."""
    return _distributed()._get_default_store()


def _distributed() -> Any:
    return import_module("torch.distributed.distributed_c10d")


# What takes long to import, or needs a compiler, is imported when it is first asked for.
if TYPE_CHECKING:
    from torch._functorch.partitioners import min_cut_rematerialization_partition as min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
    from torch._inductor.cpp_builder import get_cpp_compiler as get_cpp_compiler
    from torch._inductor.decomposition import select_decomp_table as select_decomp_table
    from torch._inductor.exc import InvalidCxxCompiler as InvalidCxxCompiler
    from torch._inductor.lowering import register_lowering as register_lowering
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
    from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
    from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily

FAKE_TENSORS = "torch._subclasses.fake_tensor"
LAZY = {
    "min_cut_rematerialization_partition": "torch._functorch.partitioners",
    "compile_fx_inner": "torch._inductor.compile_fx",
    "get_cpp_compiler": "torch._inductor.cpp_builder",
    "select_decomp_table": "torch._inductor.decomposition",
    "InvalidCxxCompiler": "torch._inductor.exc",
    "register_lowering": "torch._inductor.lowering",
    "DataDependentOutputException": FAKE_TENSORS,
    "DynamicOutputShapeException": FAKE_TENSORS,
    "FakeTensor": FAKE_TENSORS,
    "FakeTensorMode": FAKE_TENSORS,
    "UnsupportedFakeTensorException": FAKE_TENSORS,
    "UnsupportedOperatorException": FAKE_TENSORS,
    "unset_fake_temporarily": FAKE_TENSORS,
}
"""The module of each name that is imported late."""


def __getattr__(name: str) -> Any:
    if name == "StorageInfo":
        return import_module("torch.distributed.checkpoint.filesystem")._StorageInfo
    if name in ("inductor_config", "inductor_ir"):
        return import_module(name.replace("inductor_", "torch._inductor."))
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
