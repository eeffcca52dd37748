"""Every synchronising call of publishing and preparation is left out in turn: a run of some case
notices, or the list below says why none can."""

import numpy as np

from tests.emu._mutation import is_noticed, site_of
from tests.preparation_cases import CUTTING, Case, compare

# name: case, blocks of a kernel, warps of a block, calls one after the other; x lies in the heap
CASES = {
    "grid": (Case((40, 30), 8, 6, "mixed", **CUTTING), 4, 2, 2),
    "many rounds": (Case((150,), 6, 6, "mixed", save="all"), 2, 1, 1),
    "many experts": (Case((40,), 4, 80), 2, 1, 1),
    "many blocks": (Case((90, 50), 8, 8, "mixed", save="all"), 8, 4, 1),
    "one block": (Case((40, 30), 8, 6, "mixed", save="all"), 1, 4, 2),
    "small": (Case((20, 15), 4, 8, "mixed", save="all"), 3, 4, 2, True),
    "small, many experts": (Case((20,), 4, 80), 2, 2, 1),
    "small, copied": (Case((20, 15), 4, 8, "mixed", save="all"), 2, 4, 2),
    "many ids": (Case((520, 4), 4, 4), 4, 2, 1),
}
SEEDS = 4

# (file, part of the line): why no run can show that it is missing.
REDUNDANT = {
    ("comm/device/peer_barrier.cuh", "the next barrier of this kernel"): (
        "these kernels have one barrier between ranks each"
    ),
}


def runner(emulator, case: Case, blocks: int, warps: int, calls: int, x_in_heap: bool = False):
    ids = case.ids()
    x = [np.full((count, case.hidden), 7, np.int16) for count in case.tokens]

    def run(options):
        settings = (case.settings(), case.max_tokens)
        arguments = (*settings, ids, x, calls, blocks, warps, options)
        results = emulator.prepare(*arguments, x_in_heap=x_in_heap)
        for rank, result in enumerate(results):
            compare(result, case.expected(ids, rank), f"rank {rank}")
            for source, rows in enumerate(result["inputs"]):
                np.testing.assert_array_equal(rows, x[source])

    return run


def test_every_call_is_noticed(emulator):
    emulator.set_num_multiprocessors(8)
    runs, limits, sites = {}, {}, {}
    for name, case in CASES.items():
        runs[name] = runner(emulator, *case)
        runs[name](emulator.RunOptions(seed=0, collect_sites=True))
        clean = emulator.last_result()
        assert clean.warnings == []
        limits[name] = 20 * clean.stats.steps + 100_000
        for call in clean.sites:
            sites.setdefault((call.wrapper, call.file, call.line), (call, []))[1].append(name)
    assert len(sites) >= 25
    missed = []
    for left_out, (call, names) in sites.items():
        if not any(
            is_noticed(emulator, runs[name], left_out, seed, limits[name])
            for seed in range(SEEDS)
            for name in names
        ):
            missed.append(site_of(call))
    unexplained = [
        str(site)
        for site in missed
        if not any(site.file.endswith(file) and part in site.text for file, part in REDUNDANT)
    ]
    assert not unexplained, "\n".join(unexplained)
