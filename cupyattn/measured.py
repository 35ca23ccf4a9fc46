"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.fastest``.
"""

#: Compute capability times ten, dtype, head_dim, length, causal, and microseconds by name.
Rows = tuple[tuple[int, str, int, int, bool, dict[str, float]], ...]

#: Every rung: NVIDIA H200, revision 0c8de3cc59.
RECORD = "experiments/results/ladder.json"
MEASURED: Rows = (
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

#: fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise: NVIDIA H200, revision eb17011be7.
RECORD_8_BIT = "experiments/results/peers_int8.json"
MEASURED_8_BIT: Rows = (
    (90, "float16", 128, 1024, False, {
        "fa_tc": 207.6,
        "balanced": 281.1,
        "aggressive": 405.3,
    }),
    (90, "float16", 128, 4096, False, {
        "fa_tc": 720.0,
        "balanced": 725.1,
        "aggressive": 911.2,
    }),
    (90, "float16", 128, 8192, False, {
        "fa_tc": 1413.1,
        "balanced": 1332.0,
        "aggressive": 1566.4,
    }),
    (90, "float16", 128, 16384, False, {
        "fa_tc": 2799.8,
        "balanced": 2556.2,
        "aggressive": 2960.2,
    }),
    (90, "float16", 64, 8192, False, {
        "fa_tc": 1730.6,
        "balanced": 1958.8,
        "aggressive": 2233.4,
    }),
    (90, "float16", 256, 8192, False, {
        "fa_tc": 1357.0,
        "balanced": 1130.6,
        "aggressive": 1314.8,
    }),
    (90, "float16", 128, 8192, True, {
        "fa_tc": 730.0,
        "balanced": 782.3,
        "aggressive": 875.5,
    }),
)  # fmt: skip
