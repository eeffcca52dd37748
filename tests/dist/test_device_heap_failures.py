"""What a heap on GPUs says when the machine lacks something: ranks, what, and a way out."""

import os

import pytest

from mok import _C, _rendezvous
from mok.errors import SymmetricHeapError
from tests._harness import run_ranks
from tests.dist._device_heaps import build_fake_driver, fake_driver, open_or_tell
from tests.dist._heaps import outcome_of

OUT_OF_MEMORY, NO_DEVICE, SYSTEM_NOT_READY = 2, 100, 802


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    return build_fake_driver(tmp_path_factory.mktemp("fake-cuda"))


def fail_on_rank_1(rank, group, library, settings, failures, wanted=""):
    os.environ["MOK_HEAP_BACKING"] = wanted
    try:
        with fake_driver(library) as driver:
            if rank == 1:
                driver.set(**settings)
                for failure in failures:
                    driver.fail(*failure)
            error = open_or_tell(rank, group)
            driver.reset()
            return error, driver.live()
    finally:
        os.environ.pop("MOK_HEAP_BACKING")


# name: what rank 1 lacks, the class of its error, what the sentence must have
CASES = {
    "no virtual memory": (
        {"vmm": 0},
        [],
        "SymmetricHeapError",
        ["rank 1", "Fake GPU (cuda:1)", "no virtual memory management", 'backend="collective"'],
    ),
    "no way to export": (
        {"posix_fd": 0},
        [],
        "SymmetricHeapError",
        ["rank 1", "neither as file descriptor nor as fabric handle", 'backend="collective"'],
    ),
    "no memory": (
        {"memory": 1 << 21 - 1},
        [],
        "SymmetricHeapError",
        ["rank 1 wants 2097152 bytes on Fake GPU (cuda:1)", "are free", "lower max_tokens"],
    ),
    "no memory for the window itself": (
        {},
        [("cuMemCreate", OUT_OF_MEMORY, 1)],
        "SymmetricHeapError",
        ["rank 1 wants 2097152 bytes", "CUDA_ERROR_OUT_OF_MEMORY", "MOK_ARENA_BYTES"],
    ),
    "no shareable memory": (
        {},
        [("cuMemCreate", 800)],
        "SymmetricHeapError",
        ["rank 1 may not make memory", "CUDA_ERROR_NOT_PERMITTED", 'backend="collective"'],
    ),
    "export refused": (
        {},
        [("cuMemExportToShareableHandle",)],
        "SymmetricHeapError",
        ["rank 1 cannot export its window", "as a file descriptor", "ulimit -n"],
    ),
    "import refused": (
        {},
        [("cuMemImportFromShareableHandle",)],
        "SymmetricHeapError",
        ["rank 1", "cannot import the window of rank 0 (process ", "CUDA_VISIBLE_DEVICES"],
    ),
    "own access refused": (
        {},
        [("cuMemSetAccess",)],
        "SymmetricHeapError",
        ["rank 1 cannot map its own window", "max_tokens"],
    ),
    "access to the peer refused": (
        {},
        [("cuMemSetAccess", 999, 1)],
        "SymmetricHeapError",
        ["rank 1", "cannot map the window of rank 0 (process ", "nvidia-smi topo"],
    ),
    "mapping the peer refused": (
        {},
        [("cuMemMap", 999, 1)],
        "SymmetricHeapError",
        ["rank 1", "cannot map the window of rank 0 (process ", "nvidia-smi topo"],
    ),
    "no addresses": (
        {},
        [("cuMemAddressReserve",)],
        "SymmetricHeapError",
        ["rank 1 cannot reserve 4194304 bytes of addresses for 2 windows", "max_tokens"],
    ),
    "no pinned memory": (
        {},
        [("cuMemHostAlloc",)],
        "SymmetricHeapError",
        ["rank 1 cannot pin", "ulimit -l"],
    ),
    "no context": (
        {},
        [("cuDevicePrimaryCtxRetain",)],
        "SymmetricHeapError",
        ["no CUDA context can be had on Fake GPU (cuda:1)", "nvidia-smi"],
    ),
    "a kernel failed before": (
        {},
        [("cuStreamSynchronize", 719)],
        "SymmetricHeapError",
        ["rank 1 cannot zero its window", "workspace.check()"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sentence(library, case):
    settings, failures, error_class, parts = CASES[case]
    (other, _), (error, live) = run_ranks(2, fail_on_rank_1, library, settings, failures)
    assert error.startswith(error_class + ": ")
    for part in parts:
        assert part in error
    assert error.endswith(".")
    assert live == {}
    # The peer has its window, or it learns of rank 1 by name.
    assert other == "" or "rank 1" in other


def test_fabric_handles_asked_for_without_imex(library):
    results = run_ranks(2, fail_on_rank_1, library, {"fabric": 2}, [], "fabric")
    for rank, (error, live) in enumerate(results):
        assert f"rank {rank} is to use fabric handles (MOK_HEAP_BACKING=fabric)" in error
        assert "nvidia-imex" in error
        assert live == {}
    assert "the driver makes none (CUDA_ERROR_NOT_PERMITTED" in results[1][0]
    assert "the driver offers none" in results[0][0]


def no_peer_access(rank, group, library):
    with fake_driver(library) as driver:
        driver.set(p2p=0 if rank == 2 else 1)
        return open_or_tell(rank, group)


def test_a_pair_without_peer_access_is_named_on_all_ranks(library):
    # Ranks 0 and 2 are on GPU 0, rank 1 is on GPU 1, which rank 2 cannot reach.
    for text in run_ranks(3, no_peer_access, library):
        assert text.startswith("PeersNotLocalError: GPUs of this group cannot access each other")
        assert "(rank 2 on Fake GPU (cuda:0) and rank 1 on Fake GPU (cuda:1))" in text
        assert "NVLink" in text


def differ_in_setting(rank, group, library):
    os.environ["MOK_HEAP_BACKING"] = ("auto", "posix_fd")[rank]
    try:
        with fake_driver(library):
            return open_or_tell(rank, group)
    finally:
        os.environ.pop("MOK_HEAP_BACKING")


def test_the_setting_must_be_equal(library):
    for text in run_ranks(2, differ_in_setting, library):
        assert "MOK_HEAP_BACKING is " in text
        assert "must be equal on all ranks" in text


def in_another_container(rank, group, library):
    from tests.dist._heaps import exchange

    with fake_driver(library):
        heap = _C.SymmHeap(rank, 2, 4096, 0, device=0)
        addresses = exchange(group, heap.address())
        addresses[1] = addresses[1].replace("network=", "network=other-")
        outcome = outcome_of(heap.connect, addresses, 5.0)
        exchange(group, None)
        heap.close()
        return outcome


def test_descriptors_do_not_cross_containers(library):
    for outcome in run_ranks(2, in_another_container, library):
        assert outcome.error == "PeersNotLocalError"
        assert "2 network namespaces" in outcome.text


def test_no_driver_at_all():
    _C.set_cuda_libraries("/nonexistent/libcuda.so.1", "")
    try:
        for _ in range(2):
            with pytest.raises(
                SymmetricHeapError, match=r"driver's library cannot be loaded \(/non"
            ):
                _C.SymmHeap(0, 1, 4096, 0, device=0)
        assert "cannot be loaded" in _C.describe_device(0).reason
    finally:
        _C.set_cuda_libraries("", "")


def test_a_driver_that_is_too_old(tmp_path):
    with (
        fake_driver(build_fake_driver(tmp_path, old=True)),
        pytest.raises(
            SymmetricHeapError, match=r"\(for CUDA 11\.4\) has no cuMemSetAccess; .* was built"
        ),
    ):
        _C.SymmHeap(0, 1, 4096, 0, device=0)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (NO_DEVICE, "CUDA_VISIBLE_DEVICES"),
        (SYSTEM_NOT_READY, "nvidia-fabricmanager"),
        (999, "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_start(library, result, text):
    with fake_driver(library) as driver:
        driver.fail("cuInit", result)
        with pytest.raises(SymmetricHeapError, match=text):
            _C.SymmHeap(0, 1, 4096, 0, device=0)


def test_a_device_that_is_not_visible(library):
    with (
        fake_driver(library),
        pytest.raises(SymmetricHeapError, match="device is cuda:2, but this"),
    ):
        _C.SymmHeap(0, 1, 4096, 0, device=2)


def test_a_setting_that_does_not_exist(library, monkeypatch):
    monkeypatch.setenv("MOK_HEAP_BACKING", "nvlink")
    with fake_driver(library), pytest.raises(ValueError, match="MOK_HEAP_BACKING is 'nvlink'"):
        _C.SymmHeap(0, 2, 4096, 0, device=0)


# The ranks agree that all have mapped all windows


class Core:
    """Stands for a workspace whose peers cannot all be mapped."""

    def __init__(self, failure: str):
        self.failure = failure
        self.closed = False

    def address(self) -> str:
        return "somewhere"

    def connect(self, addresses, timeout_s) -> None:
        if self.failure:
            raise SymmetricHeapError(self.failure)

    def close(self, seconds) -> None:
        self.closed = True


def confirm(rank, group, failing):
    cores = []

    def new_core():
        cores.append(Core("no access" if rank == failing else ""))
        return cores[-1]

    ours = _rendezvous.group_of(group)
    outcome = outcome_of(_rendezvous.create, ours, {"a": 1}, new_core, 20.0, confirm=True)
    return outcome, cores[-1].closed


def test_a_rank_that_cannot_map_ends_the_creation_for_all():
    (zero, closed_zero), (one, closed_one), (two, closed_two) = run_ranks(3, confirm, 1)
    assert (closed_zero, closed_one, closed_two) == (True, True, True)
    assert one.text == "no access"
    assert zero.text == two.text == "rank 1 could not map its peers' windows: no access"
    assert all(outcome.error == "" and not closed for outcome, closed in run_ranks(3, confirm, -1))
