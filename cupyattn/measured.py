"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.fastest``.
"""

#: Compute capability times ten, dtype, head_dim, length, causal, and microseconds by name.
Rows = tuple[tuple[int, str, int, int, bool, dict[str, float]], ...]

#: Every rung: NVIDIA H200, revision c0542d3d1c.
RECORD = "experiments/results/ladder.json"
MEASURED: Rows = (
    (90, "float16", 64, 4096, False, {
        "unfused": 34416.8,
        "fa": 31921.2,
        "fa_warps": 13487.1,
        "fa_tc": 465.3,
        "fa_int8": 543.1,
    }),
    (90, "float16", 64, 4096, True, {
        "unfused": 34422.0,
        "fa": 16622.8,
        "fa_warps": 7011.0,
        "fa_tc": 256.5,
        "fa_int8": 315.2,
    }),
    (90, "float16", 128, 4096, False, {
        "unfused": 64866.6,
        "fa": 79067.3,
        "fa_warps": 23597.1,
        "fa_tc": 734.2,
        "fa_int8": 679.1,
    }),
    (90, "float16", 128, 4096, True, {
        "unfused": 64803.6,
        "fa": 40405.8,
        "fa_warps": 12250.0,
        "fa_tc": 402.3,
        "fa_int8": 392.7,
    }),
    (90, "float16", 256, 4096, False, {
        "unfused": 146168.3,
        "fa": 182100.5,
        "fa_warps": 76621.4,
        "fa_tc": 1388.2,
        "fa_int8": 1202.4,
    }),
    (90, "float16", 256, 4096, True, {
        "unfused": 146106.0,
        "fa": 90899.8,
        "fa_warps": 38757.9,
        "fa_tc": 734.5,
        "fa_int8": 704.7,
    }),
)  # fmt: skip

#: fa_tc, and fa_int8 as the classes of `auto.QUANT` quantise: NVIDIA H200, revision 597d5ce6e1.
RECORD_8_BIT = "experiments/results/peers_int8.json"
MEASURED_8_BIT: Rows = (
    (90, "float16", 128, 512, False, {
        "fa_tc": 121.6,
        "balanced": 174.4,
        "aggressive": 186.0,
    }),
    (90, "float16", 128, 1024, False, {
        "fa_tc": 213.0,
        "balanced": 237.4,
        "aggressive": 243.6,
    }),
    (90, "float16", 128, 2048, False, {
        "fa_tc": 379.3,
        "balanced": 368.5,
        "aggressive": 376.6,
    }),
    (90, "float16", 128, 4096, False, {
        "fa_tc": 737.2,
        "balanced": 655.4,
        "aggressive": 636.4,
    }),
    (90, "float16", 128, 8192, False, {
        "fa_tc": 1401.6,
        "balanced": 1187.9,
        "aggressive": 1166.6,
    }),
    (90, "float16", 128, 16384, False, {
        "fa_tc": 2748.4,
        "balanced": 2260.7,
        "aggressive": 2181.2,
    }),
    (90, "float16", 128, 8192, True, {
        "fa_tc": 745.4,
        "balanced": 656.2,
        "aggressive": 676.3,
    }),
    (90, "float16", 128, 16384, True, {
        "fa_tc": 1449.1,
        "balanced": 1210.7,
        "aggressive": 1209.9,
    }),
    (90, "float16", 64, 4096, False, {
        "fa_tc": 908.4,
        "balanced": 927.0,
        "aggressive": 1034.8,
    }),
    (90, "float16", 64, 8192, False, {
        "fa_tc": 1746.0,
        "balanced": 1737.6,
        "aggressive": 1830.3,
    }),
    (90, "float16", 64, 16384, False, {
        "fa_tc": 3456.9,
        "balanced": 3338.0,
        "aggressive": 3451.1,
    }),
    (90, "float16", 256, 4096, False, {
        "fa_tc": 705.6,
        "balanced": 595.4,
        "aggressive": 583.4,
    }),
    (90, "float16", 256, 8192, False, {
        "fa_tc": 1382.3,
        "balanced": 1095.1,
        "aggressive": 1033.0,
    }),
    (90, "float16", 256, 16384, False, {
        "fa_tc": 2723.3,
        "balanced": 2064.6,
        "aggressive": 1870.3,
    }),
    (90, "float16", 128, 4608, False, {
        "fa_tc": 346.8,
        "balanced": 314.0,
        "aggressive": 306.9,
    }),
    (90, "float16", 64, 4096, False, {
        "fa_tc": 154.2,
        "balanced": 169.1,
        "aggressive": 204.1,
    }),
    (90, "float16", 128, 118800, False, {
        "fa_tc": 238094.5,
        "balanced": 199226.0,
        "aggressive": 173150.6,
    }),
    (90, "float16", 96, 8192, False, {
        "fa_tc": 845.9,
        "balanced": 867.5,
        "aggressive": 821.8,
    }),
    (90, "float16", 72, 16384, False, {
        "fa_tc": 2180.0,
        "balanced": 2214.8,
        "aggressive": 2228.6,
    }),
)  # fmt: skip
