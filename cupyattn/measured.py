"""Times of the rungs, from which ``variant="auto"`` chooses.

Written by ``python -m experiments.fastest`` from experiments/results/ladder.json:
NVIDIA H200, revision 04e47e8a12.
"""

RECORD = "experiments/results/ladder.json"

#: Compute capability times ten, dtype, head_dim, length, causal, and the microseconds of each rung.
MEASURED: tuple[tuple[int, str, int, int, bool, dict[str, float]], ...] = (
    (90, "float16", 64, 4096, False, {
        "unfused": 34374.0,
        "fa": 31926.3,
        "fa_warps": 13484.8,
        "fa_tc": 538.9,
        "fa_int8": 931.8,
    }),
    (90, "float16", 64, 4096, True, {
        "unfused": 34348.9,
        "fa": 16616.0,
        "fa_warps": 7036.2,
        "fa_tc": 296.5,
        "fa_int8": 564.1,
    }),
    (90, "float16", 128, 4096, False, {
        "unfused": 64781.3,
        "fa": 79058.1,
        "fa_warps": 23595.3,
        "fa_tc": 848.7,
        "fa_int8": 1672.6,
    }),
    (90, "float16", 128, 4096, True, {
        "unfused": 64787.0,
        "fa": 40408.0,
        "fa_warps": 12277.8,
        "fa_tc": 444.6,
        "fa_int8": 958.1,
    }),
    (90, "float16", 256, 4096, False, {
        "unfused": 145457.4,
        "fa": 181009.5,
        "fa_warps": 76632.3,
        "fa_tc": 1554.3,
        "fa_int8": 3189.3,
    }),
    (90, "float16", 256, 4096, True, {
        "unfused": 145703.0,
        "fa": 90346.8,
        "fa_warps": 38597.7,
        "fa_tc": 827.5,
        "fa_int8": 1793.1,
    }),
)  # fmt: skip
