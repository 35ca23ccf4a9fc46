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

#: fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise: NVIDIA H200, revision 7c6c12c5c0.
RECORD_8_BIT = "experiments/results/peers_int8.json"
MEASURED_8_BIT: Rows = (
    (90, "float16", 128, 1024, False, {
        "fa_tc": 208.6,
        "balanced": 262.2,
        "aggressive": 294.2,
    }),
    (90, "float16", 128, 4096, False, {
        "fa_tc": 730.0,
        "balanced": 678.8,
        "aggressive": 709.1,
    }),
    (90, "float16", 128, 8192, False, {
        "fa_tc": 1389.4,
        "balanced": 1214.7,
        "aggressive": 1257.1,
    }),
    (90, "float16", 128, 16384, False, {
        "fa_tc": 2733.8,
        "balanced": 2317.0,
        "aggressive": 2359.2,
    }),
    (90, "float16", 128, 8192, True, {
        "fa_tc": 738.4,
        "balanced": 691.8,
        "aggressive": 723.6,
    }),
    (90, "float16", 64, 16384, False, {
        "fa_tc": 3405.4,
        "balanced": 3470.5,
        "aggressive": 3447.9,
    }),
    (90, "float16", 256, 8192, False, {
        "fa_tc": 1368.2,
        "balanced": 1096.4,
        "aggressive": 1055.3,
    }),
    (90, "float16", 128, 4608, False, {
        "fa_tc": 343.6,
        "balanced": 323.5,
        "aggressive": 337.7,
    }),
    (90, "float16", 128, 118800, False, {
        "fa_tc": 234061.7,
        "balanced": 199865.7,
        "aggressive": 180089.6,
    }),
)  # fmt: skip
