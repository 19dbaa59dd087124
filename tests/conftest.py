"""What all tests share: one thread for torch, sixty examples without deadlines, and the pools of gloo processes."""

import gc
import getpass
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize

# Ranks inherit it: several threads a rank would fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor compiles a kernel or two in a test: processes of its own would take longer to start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Its libraries read it when they are imported. Without it names of no model are looked up again and again.
os.environ["HF_HUB_OFFLINE"] = "1"
# Processes of tests would each compile the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.shared.virtual import Job, Virtual  # noqa: E402
from tests.shared.workers import RARELY, Pools  # noqa: E402

LAST = -1000
"""After multiprocessing has removed its own files there."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep the test process itself on one thread, and let generated examples take as long as a busy machine needs."""
    torch.set_num_threads(1)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        own_temp_directory()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.register_profile("patient", deadline=None, max_examples=60 if config.option.markexpr == "slow" else 20)
    settings.load_profile("patient")
    gc.disable()  # nothing of a collection is garbage


def own_temp_directory() -> None:
    """Let what ranks leave in the temp directory go with the session. Compiled kernels and pytest's folders stay."""
    usual = tempfile.gettempdir()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(usual, f"torchinductor_{getpass.getuser()}"))
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", usual)
    own = tempfile.mkdtemp(prefix="fshard-tests-")
    os.chmod(own, 0o1777)  # as the usual one
    Finalize(None, shutil.rmtree, (own, True), exitpriority=LAST)
    os.environ["TMPDIR"] = tempfile.tempdir = own


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use pools of processes, and as slow what a sample of a family leaves out."""
    families: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
        if item.get_closest_marker("sample") is not None:
            families.setdefault((str(item.path), getattr(item, "originalname", item.name)), []).append(item)
    for family in families.values():
        mark = family[0].get_closest_marker("sample")
        for item in left_out(family, mark.args[0] if mark is not None else 1):
            item.add_marker(pytest.mark.slow)


def left_out(family: list[pytest.Item], share: int) -> list[pytest.Item]:
    """The tests of a family that are no part of its sample, which is every so many, from the first on."""
    return [item for number, item in enumerate(family) if number % share]


def pytest_collection_finish() -> None:
    """Look for garbage in what tests leave behind, and seldom: what was imported for them is none."""
    gc.freeze()
    gc.set_threshold(*RARELY)
    gc.enable()


def modes_of_torch() -> dict[str, object]:
    """Settings of PyTorch that a test must leave as it found them, lest later tests fail in its place."""
    return {
        "transform of torch.func": torch._C._functorch.peek_interpreter_stack(),
        "modes for functions": torch._C._len_torch_function_stack(),
        "modes for operators": torch._C._len_torch_dispatch_stack(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "how tensors are printed": str(torch._tensor_str.PRINT_OPTS),
        "a derivative": torch.func.grad(torch.square)(torch.tensor(0.25, device="cpu")).item(),
    }


@pytest.fixture(autouse=True)
def modes_stay() -> Iterator[None]:
    """Fail the test that leaves a transform or a mode of PyTorch behind, not the tests after it."""
    before = modes_of_torch()
    yield
    assert modes_of_torch() == before


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """``pool(world).run(function, *args, timeout=60)``: what each of ``world`` gloo ranks returned."""
    pools = Pools()
    try:
        yield pools
    finally:
        pools.close()


@pytest.fixture
def job(request: pytest.FixtureRequest, pool: Pools) -> Job:
    """``job(world).run(function, *args)`` as of ``pool``; three ranks or more are virtual, but in the slow tests."""
    slow = request.node.get_closest_marker("slow") is not None
    return lambda world: pool(world) if slow or world < 3 else Virtual(world)
