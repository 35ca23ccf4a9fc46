"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.fastest``.
"""

#: Compute capability times ten, dtype, head_dim, length, causal, and microseconds by name.
Rows = tuple[tuple[int, str, int, int, bool, dict[str, float]], ...]

#: Every rung: NVIDIA H200, revision 941940294c.
RECORD = "experiments/results/ladder.json"
MEASURED: Rows = (
    (90, "float16", 64, 4096, False, {
        "unfused": 34419.8,
        "fa": 31920.4,
        "fa_warps": 13485.1,
        "fa_tc": 462.9,
        "fa_int8": 602.6,
    }),
    (90, "float16", 64, 4096, True, {
        "unfused": 34420.8,
        "fa": 16617.7,
        "fa_warps": 7014.4,
        "fa_tc": 260.2,
        "fa_int8": 346.1,
    }),
    (90, "float16", 128, 4096, False, {
        "unfused": 65291.6,
        "fa": 79647.7,
        "fa_warps": 23596.2,
        "fa_tc": 745.4,
        "fa_int8": 732.9,
    }),
    (90, "float16", 128, 4096, True, {
        "unfused": 64849.7,
        "fa": 40399.2,
        "fa_warps": 12232.8,
        "fa_tc": 409.0,
        "fa_int8": 473.1,
    }),
    (90, "float16", 256, 4096, False, {
        "unfused": 145536.2,
        "fa": 181014.2,
        "fa_warps": 76625.1,
        "fa_tc": 1406.8,
        "fa_int8": 1256.5,
    }),
    (90, "float16", 256, 4096, True, {
        "unfused": 147423.0,
        "fa": 91369.0,
        "fa_warps": 38955.7,
        "fa_tc": 757.1,
        "fa_int8": 770.3,
    }),
)  # fmt: skip

#: fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise: NVIDIA H200, revision e2e1cc9c80.
RECORD_8_BIT = "experiments/results/peers_int8.json"
MEASURED_8_BIT: Rows = (
    (90, "float16", 128, 1024, False, {
        "fa_tc": 208.5,
        "balanced": 282.7,
        "aggressive": 324.0,
    }),
    (90, "float16", 128, 4096, False, {
        "fa_tc": 729.5,
        "balanced": 708.1,
        "aggressive": 747.3,
    }),
    (90, "float16", 128, 8192, False, {
        "fa_tc": 1386.2,
        "balanced": 1248.7,
        "aggressive": 1280.6,
    }),
    (90, "float16", 128, 16384, False, {
        "fa_tc": 2727.0,
        "balanced": 2358.1,
        "aggressive": 2396.4,
    }),
    (90, "float16", 128, 8192, True, {
        "fa_tc": 734.8,
        "balanced": 755.2,
        "aggressive": 754.0,
    }),
    (90, "float16", 64, 16384, False, {
        "fa_tc": 3398.6,
        "balanced": 3424.8,
        "aggressive": 3363.3,
    }),
    (90, "float16", 256, 8192, False, {
        "fa_tc": 1366.3,
        "balanced": 1128.8,
        "aggressive": 1119.1,
    }),
    (90, "float16", 128, 4608, False, {
        "fa_tc": 343.4,
        "balanced": 333.0,
        "aggressive": 350.3,
    }),
    (90, "float16", 128, 118800, False, {
        "fa_tc": 238525.8,
        "balanced": 202440.7,
        "aggressive": 180696.6,
    }),
)  # fmt: skip
