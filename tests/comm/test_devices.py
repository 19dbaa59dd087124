"""Which device a rank works on: without a GPU, by numbers that a process with GPUs would see."""

import ast
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard.errors import BatchError, CommError, PeerError, PlanError
from fshard.runtime.comm import joining
from fshard.runtime.comm.devices import (
    DevicePlace,
    carried,
    choose_device,
    device_of_group,
    keep_device_guard,
    problem_of,
    with_nccl,
)
from fshard.runtime.comm.joining import join
from fshard.runtime.comm.processes import ProcessTransport
from fshard.runtime.engine.batch import check_device
from tests.shared.children import Child
from tests.shared.workers import Pools

CUDA0, CUDA1 = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("given", "visible", "local", "found"),
    [
        (None, 0, 0, "cpu"),
        (None, 8, 3, "cuda:3"),
        (None, 1, 3, "cuda:0"),  # CUDA_VISIBLE_DEVICES shows each rank its own
        ("cuda", 8, 3, "cuda:3"),
        ("cuda:1", 8, 3, "cuda:1"),
        (CUDA1, 8, 0, "cuda:1"),
        ("cpu", 8, 3, "cpu"),
        ("cpu", 2, 5, "cpu"),
    ],
)
def test_the_device_of_a_rank(given: Any, visible: int, local: int, found: str) -> None:
    assert str(choose_device(given, visible, local)) == found


@pytest.mark.parametrize(
    ("given", "visible", "local", "said"),
    [
        (None, 4, 5, "LOCAL_RANK=5, and this process sees 4 GPUs"),
        ("cuda", 0, 0, "sees no CUDA device"),
        ("cuda:7", 4, 0, "'cuda:7', and this process sees 4 GPUs: give one of 0 to 3"),
        ("gpu", 4, 0, "'gpu' is no device"),
        (3.5, 4, 0, "3.5 is no device"),
        ("meta", 4, 0, "holds no values"),
    ],
)
def test_devices_that_there_are_not(given: Any, visible: int, local: int, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        choose_device(given, visible, local)


def test_gpus_of_several_ranks_need_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert with_nccl(torch.device("cpu")).type == "cpu"
    with pytest.raises(PlanError, match="this build of PyTorch has only .*gloo.*: install one with NCCL"):
        with_nccl(CUDA0)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert with_nccl(CUDA0) == CUDA0


def test_the_device_of_a_process_group_is_obeyed() -> None:
    def current() -> torch.device:
        return CUDA0

    assert device_of_group(None, "nccl", CUDA1, current) == CUDA1
    assert device_of_group("cuda", "nccl", CUDA1, current) == CUDA1
    assert device_of_group(None, "nccl", None, current) == CUDA0
    assert device_of_group("cuda:1", "nccl", None, current) == CUDA1
    assert device_of_group(None, "gloo", None, current) == device_of_group("cpu", "nccl", CUDA1, current)
    with pytest.raises(PlanError, match="bound to cuda:1"):
        device_of_group("cuda:0", "nccl", CUDA1, current)
    with pytest.raises(PlanError, match="gloo, which serves tensors of the CPU"):
        device_of_group("cuda", "gloo", None, current)


def test_a_guard_of_cuda_devices_outlives_the_ranks_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps the first one for all threads, and frees it with the thread that asked for it."""
    made: list[threading.Thread] = []
    monkeypatch.setattr(
        "fshard.runtime.comm.devices.set_cuda_device_guard", lambda: made.append(threading.current_thread())
    )
    for built, there, count in ((False, False, 0), (True, True, 0), (True, False, 1)):
        keep_device_guard.cache_clear()
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda built=built: built)
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        keep_device_guard()
        keep_device_guard()
        assert len(made) == count
    assert made[0].is_alive() and made[0].daemon
    keep_device_guard.cache_clear()


def test_what_is_wrong_with_the_places_of_all_ranks() -> None:
    assert not problem_of([DevicePlace("cpu", "a"), DevicePlace("cpu", "a")])
    assert not problem_of([DevicePlace("cuda:0", "a", "GPU-1"), DevicePlace("cuda:0", "b", "GPU-2")])
    mixed = problem_of([DevicePlace("cuda:0", "a", "GPU-1"), DevicePlace("cpu", "b"), DevicePlace("cpu", "b")])
    assert "rank 0: cuda" in mixed and "ranks 1, 2: cpu" in mixed
    shared = problem_of(
        [DevicePlace("cuda:1", "a", "GPU-1"), DevicePlace("cuda:0", "a", "GPU-2"), DevicePlace("cuda:0", "a", "GPU-1")]
    )
    assert "ranks 0, 2: cuda:1 of host a (GPU-1)" in shared and "GPU-2" not in shared
    assert problem_of([DevicePlace("", problem="no"), DevicePlace("", problem="no")]) == "no"
    assert "rank 1: no" in problem_of([DevicePlace("cpu"), DevicePlace("", problem="no")])


def seen(monkeypatch: pytest.MonkeyPatch, visible: int) -> list[Any]:
    """Let this process see so many GPUs; returns the devices that become current ones."""
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_one_process_without_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    current = seen(monkeypatch, 2)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert fs.make_mesh((1,), ("shard",), device="cpu").device == torch.device("cpu") and not current
    assert fs.make_mesh((1,), ("shard",)).device == CUDA0
    assert fs.make_mesh((1,), ("shard",), device="cuda:1").device == CUDA1
    assert current == [CUDA0, CUDA1]
    assert fs.virtual_mesh((2,), ("shard",), device="cuda:1").run(lambda: fs.make_mesh((2,), ("shard",)).device) == [
        CUDA1,
        CUDA1,
    ]


def test_a_script_on_another_device_than_its_virtual_mesh() -> None:
    mesh = fs.virtual_mesh((2,), ("shard",))
    assert mesh.run(lambda: fs.make_mesh((2,), ("shard",), device="cpu").rank) == [0, 1]
    with pytest.raises(PlanError, match="give the device to fs.virtual_mesh"):
        mesh.run(lambda: fs.make_mesh((2,), ("shard",), device="cuda"))


def joined(case: str) -> str:
    """What a rank of a pool gets where ranks are on devices that do not go together."""
    from fshard.runtime.comm import joining

    rank, real = dist.get_rank(), joining.place_of
    places = {"same": DevicePlace("cuda:0", "a", "GPU-1"), "mixed": DevicePlace(["cuda:0", "cpu"][rank], "a")}
    given = "cuda" if case == "gloo" and rank else None
    joining.place_of = lambda device: places.get(case, real(device))
    try:
        found = join(20.0, given, lambda world: fs.abstract_mesh((world + (case == "sizes"),), ("shard",), rank=rank))
        return str(found and found.device)
    except PlanError as error:
        return str(error)
    finally:
        joining.place_of = real


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("same", "ranks 0, 1: cuda:0 of host a (GPU-1)"),
        ("mixed", "rank 0: cuda\n  rank 1: cpu"),
        ("gloo", "rank 1: device='cuda' with a process group of gloo"),
        ("fine", "cpu"),
    ],
)
def test_all_ranks_get_one_error(pool: Pools, case: str, said: str) -> None:
    first, second = pool(2).run(joined, case)
    assert first == second and said in first


def sized(size: int) -> str:
    """What a rank gets that expects a number of ranks."""
    try:
        fs.make_mesh((size + dist.get_rank(),), ("shard",))
    except PlanError as error:
        return str(error)
    return ""


def test_sizes_that_one_rank_gives_wrong_are_an_error_of_all(pool: Pools) -> None:
    first, second = pool(2).run(sized, 2)
    assert first == second and "rank 1: mesh sizes (3,) multiply to 3" in first


@pytest.mark.parametrize(
    ("visible", "gpus", "nccl", "said"),
    [
        (1, ("GPU-1", "GPU-1"), True, "ranks 0, 1: cuda:0 of host a (GPU-1)"),
        (1, ("GPU-1", ""), True, "rank 0: cuda\n  rank 1: cpu"),
        (2, ("", "no driver"), True, "rank 1: no driver"),
        (2, ("GPU-1", "GPU-2"), False, "ranks on GPUs communicate by NCCL"),
    ],
)
def test_ranks_that_meet_in_a_file_compare_their_devices(
    visible: int, gpus: tuple[str, str], nccl: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads stand for two ranks: none gets so far as to make a process group."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    errors: dict[int, str] = {}

    def place(device: torch.device) -> DevicePlace:
        gpu = gpus[threading.current_thread().rank]  # type: ignore[attr-defined]
        if "driver" in gpu:
            raise PlanError(gpu)
        return DevicePlace(str(device) if gpu else "cpu", "a", gpu)

    def rank(number: int) -> None:
        try:
            joining.join_by_file(str(tmp_path / "store"), number, 2, 20.0)
        except PlanError as error:
            errors[number] = str(error)

    monkeypatch.setattr(joining, "place_of", place)
    monkeypatch.setattr(
        joining, "_in_time", lambda body, seconds, alive=None: body()
    )  # in this thread, which is the rank
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for number, thread in enumerate(threads):
        thread.rank = number  # type: ignore[attr-defined]
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors[0] == errors[1] and said in errors[0]


def test_an_nccl_that_does_not_start_on_a_rank_is_an_error_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one of two ranks; the other waits for it inside of NCCL, at most as long as ranks wait for others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(joining, "place_of", lambda device: DevicePlace(str(device), "a", str(device)))
    monkeypatch.setattr(joining, "GRACE", 0.1)
    never, errors = threading.Event(), dict[int, str]()

    def start(backend: str, store: Any, rank: int, world: int, device: torch.device) -> None:
        assert backend == "nccl"
        if rank:
            raise RuntimeError("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)\nmore")
        never.wait(60)

    def rank(number: int) -> None:
        try:
            joining.join_by_file(str(tmp_path / "store"), number, 2, 1.0)
        except CommError as error:
            errors[number] = str(error)

    monkeypatch.setattr(joining, "_init", start)
    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    never.set()
    assert "joining the process group failed: NCCL error: unhandled system error" in errors[1]
    assert "timed out after 1.1 s" in errors[0] and "Not all of 2 ranks came" in errors[0]


def of_two_gpus(device: str) -> None:
    """A rank of a job that sees two GPUs: says what became of its mesh."""
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 2)
    torch.cuda.set_device = lambda device: None
    joining.place_of = lambda device: DevicePlace(str(device), "a", str(device) * (device.type == "cuda"))  # type: ignore[assignment]
    try:
        with fs.make_mesh((-1,), ("shard",), timeout=20, device=device or None) as mesh:
            assert isinstance(mesh.transport, ProcessTransport)
            print("joined", mesh.device, mesh.transport.backend)
    except PlanError as error:
        print("PlanError", error)


def started(tmp_path: Path, local: list[int], device: str = "") -> list[str]:
    """What the ranks of a job print that see two GPUs each and have these local numbers."""
    port = str(20000 + os.getpid() % 20000)
    base = {"WORLD_SIZE": str(len(local)), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    ranks = [
        Child(
            of_two_gpus,
            device,
            out=tmp_path / str(rank),
            environment={**base, "RANK": f"{rank}", "LOCAL_RANK": f"{number}"},
        )
        for rank, number in enumerate(local)
    ]
    try:
        return [rank.printed(60).strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.processes
def test_more_local_ranks_than_gpus_are_an_error_of_all(tmp_path: Path) -> None:
    first, second = started(tmp_path, [0, 2])
    assert first == second and first.startswith("PlanError") and "rank 1: LOCAL_RANK=2" in first


@pytest.mark.slow
@pytest.mark.processes
def test_a_job_on_the_cpu_of_machines_with_gpus_uses_gloo(tmp_path: Path) -> None:
    assert started(tmp_path, [0, 5], "cpu") == ["joined cpu gloo"] * 2


def test_batches_on_another_device_are_refused() -> None:
    class There(torch.Tensor):
        """A tensor that says it lies on a GPU."""

        device = CUDA1  # type: ignore[assignment]

    x, number = torch.ones(2).as_subclass(There), torch.tensor(1.0).as_subclass(There)
    check_device({"x": x, "scale": torch.tensor(2.0)}, CUDA1)
    check_device({"x": x}, torch.device("cuda"))
    for wrong in (x, number):
        with pytest.raises(BatchError, match="parameters are on cuda:0"):
            check_device({"x": wrong}, CUDA0)
    with pytest.raises(BatchError, match="parameters are on cuda:0"):
        check_device({"x": torch.ones(2)}, CUDA0)


def test_a_batch_of_one_rank_that_lies_elsewhere_is_an_error_of_all() -> None:
    def rank() -> list[str]:
        mesh, said = fs.make_mesh((2,), ("shard",)), list[str]()
        plan = fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
        opt = fs.optim.sgd(0.1)
        step = fs.make_train_step(lambda p, x: (p["w"] * x).square().mean(), opt, plan)
        state = fs.init_state(plan, opt, params={"w": torch.ones(4)})
        for device in ("meta" if mesh.rank else "cpu", "cpu"):
            try:
                state, metrics = step(state, torch.ones(2, 4, device=device))
                said.append(f"{metrics.loss.item():g}")
            except (BatchError, PeerError) as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    first, second = fs.virtual_mesh((2,), ("shard",)).run(rank)
    assert first[0].startswith("PeerError") and "batch is on meta" in first[0]
    assert second[0].startswith("BatchError") and "the parameters are on cpu" in second[0]
    assert first[1] == second[1] == "1"


def test_threads_work_on_the_device_of_their_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their first call of CUDA opens a context on GPU 0."""
    began: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: began.append((threading.current_thread().name, device))
    )
    thread = threading.Thread(target=carried(lambda: None), name="writer")
    thread.start()
    thread.join(5)
    assert began == [("writer", 3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    carried(lambda: None)()
    assert len(began) == 1


FACTORIES = {"tensor", "as_tensor", "scalar_tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "randn"}
OUTSIDE = ("parallel/zigzag.py", "generation/", "cli/")
"""Files without control tensors: places and prompts that a user gets or gives, and commands without a job."""


def test_every_new_tensor_names_its_device() -> None:
    """Else ``torch.set_default_device("cuda")`` would put control tensors there."""
    root, found = Path(fs.__file__).parent, []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            torches = node.func.attr in FACTORIES and ast.unparse(node.func.value) == "torch"
            if torches and not {"device", None} & {word.arg for word in node.keywords}:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}")
    assert [line for line in found if not line.startswith(OUTSIDE)] == []
