"""Steps, recomputation, transforms and errors on a device whose backwards have a thread, as on CUDA."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device import cases, messages, waits
from tests.device.own import build, compiler
from tests.shared.workers import Pool

pytestmark = [pytest.mark.long, pytest.mark.processes]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def device(pytestconfig: pytest.Config) -> Iterator[tuple[Pool, str]]:
    """A process that has not run a backward yet, and the library."""
    if compiler() is None:
        pytest.skip("the device of our own needs a C++ compiler (c++, g++ or clang++), and there is none")
    library = build(Path(str(pytestconfig.cache.mkdir("own_device"))))
    pool = Pool(1)
    try:
        yield pool, str(library)
    finally:
        pool.close()


@pytest.mark.sample(3)
@pytest.mark.timeout(900)  # the first one compiles the device
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in cases.LIKE_OTHERS)) for name in cases.CASES]
)
def test_on_a_device_of_our_own(device: tuple[Pool, str], case: str) -> None:
    pool, library = device
    assert pool.run(cases.run, library, case, timeout=120) == [[]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seldom", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "seldom"])
def test_a_step_reads_its_device_once_and_nothing_else_waits(device: tuple[Pool, str], seldom: bool) -> None:
    """No other read, no copy from the host, and no operator whose result has a size that depends on data."""
    pool, library = device
    assert {*waits.SELDOM} < {*waits.KINDS}
    assert pool.run(waits.run, library, seldom, timeout=300) == [{}]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_the_thread_of_the_device_collectives_by_name_fail(device: tuple[Pool, str], ranks: int) -> None:
    """What steps did before their backwards ran on the thread that calls them."""
    pool, library = device
    assert "AxisError: no mesh is in scope" in pool.run(cases.run_threaded, library, ranks, timeout=120)[0]


@pytest.mark.timeout(900)
def test_messages_over_nccl_lie_on_the_device_and_others_on_the_host(device: tuple[Pool, str]) -> None:
    pool, library = device
    assert pool.run(messages.run, library, timeout=120) == [[]]


@pytest.mark.timeout(900)
def test_a_snapshot_needs_its_events_and_its_wait(device: tuple[Pool, str]) -> None:
    """From the compute stream to the copies, from these to the host, and before an update."""
    pool, library = device
    found = pool.run(cases.run_dropped, library, timeout=120)[0]
    assert len(found) == 4 and all(found.values()), found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_event_between_host_and_device_is_needed(device: tuple[Pool, str]) -> None:
    """In one of these cases."""
    pool, library = device
    found = [pool.run(cases.run_events, library, name, timeout=300)[0] for name in cases.HOSTED[::2]]
    sites = {site for each in found for site in each}
    assert len(sites) > 10 and any("Snapshot" in site for site in sites)
    assert [site for site in sorted(sites) if not any(each.get(site) for each in found)] == []
