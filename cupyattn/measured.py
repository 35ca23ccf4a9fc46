"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.fastest`` from experiments/results/ladder.json:
NVIDIA H200, revision 0c8de3cc59.
"""

RECORD = "experiments/results/ladder.json"

#: Compute capability times ten, dtype, head_dim, length, causal, and the microseconds of each rung.
MEASURED: tuple[tuple[int, str, int, int, bool, dict[str, float]], ...] = (
    (90, "float16", 64, 4096, False, {
        "unfused": 34418.3,
        "fa": 31920.4,
        "fa_warps": 13487.8,
        "fa_tc": 482.7,
        "fa_int8": 933.1,
    }),
    (90, "float16", 64, 4096, True, {
        "unfused": 34416.3,
        "fa": 16589.4,
        "fa_warps": 7016.7,
        "fa_tc": 265.3,
        "fa_int8": 561.0,
    }),
    (90, "float16", 128, 4096, False, {
        "unfused": 64864.0,
        "fa": 79059.3,
        "fa_warps": 23597.3,
        "fa_tc": 745.7,
        "fa_int8": 1684.1,
    }),
    (90, "float16", 128, 4096, True, {
        "unfused": 64812.1,
        "fa": 40439.2,
        "fa_warps": 12283.0,
        "fa_tc": 406.0,
        "fa_int8": 984.0,
    }),
    (90, "float16", 256, 4096, False, {
        "unfused": 144867.2,
        "fa": 181181.0,
        "fa_warps": 76618.5,
        "fa_tc": 1447.2,
        "fa_int8": 3115.8,
    }),
    (90, "float16", 256, 4096, True, {
        "unfused": 145640.7,
        "fa": 90811.8,
        "fa_warps": 38702.9,
        "fa_tc": 760.4,
        "fa_int8": 1759.8,
    }),
)  # fmt: skip
