"""The table of PERFORMANCE.md that compares the founding notes' figures with measurements.

The notes speak of an A100 and of kernels that were to be written; everything measured here is of
the device that the records name. A line whose records are missing is left out. A line without a
measurement says so, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from docs import performance_answers as answers
from docs import performance_int8

#: Verdicts of the records on a figure. A figure of an A100 that says nothing beside another
#: device's is `ELSEWHERE`; one that holds for a part of what was measured is `IN_PART`.
HOLDS, IN_PART, REFUTED = "holds", "holds in part", "refuted"
ELSEWHERE, UNMEASURED = "of another device", "not measured"


@dataclass(frozen=True)
class Claim:
    """One figure of the notes.

    Parameters
    ----------
    part : str
        Of the notes.
    says : str
    needs : tuple of str
        Names of records.
    measured : callable
        ``measured(*records)``: what is there instead, in one cell of a table.
    verdict : str
        `HOLDS`, `IN_PART`, `REFUTED`, `ELSEWHERE` or `UNMEASURED`.
    source : str
        What it is read from where that is no record.
    """

    part: str
    says: str
    needs: tuple[str, ...]
    measured: Callable[..., str]
    verdict: str
    source: str = ""


def unmeasured(part: str, says: str, why: str) -> Claim:
    """Return a line for what has no record."""
    return Claim(part, says, (), lambda: f"not measured: {why}", UNMEASURED)


CLAIMS = (
    Claim("summary", "1.7 to 2.2 times FP16 FlashAttention", ("ladder", "peers_int8"),
          answers.int8_speed, IN_PART),
    Claim("summary", "INT8 beats FlashAttention-2 by 68 %", ("ladder",), answers.flash_2, HOLDS),
    Claim("summary, 4.2, 8.1", "140 TFLOP/s in FP16, 235 as INT8", ("ladder",),
          answers.rates_at_4096, ELSEWHERE),
    Claim("summary", "7 to 9 ms a step in FP16, 4 to 6 as INT8", ("dit_quality",),
          answers.step_time, REFUTED),
    Claim("summary", "32 to 40 % less memory", ("dit_memory",), answers.pool_peak, REFUTED),
    Claim("summary", "less than 0.5 % of PSNR lost", ("dit_quality",), answers.psnr_lost, REFUTED),
    Claim("1.1", "Q and K as codes: 670 MB read for 1,073, 37 % fewer", ("counters",),
          answers.bytes_moved, REFUTED),
    Claim("2.1", "312 TFLOP/s FP16 and 625 TOP/s INT8 to be had", ("gemm", "int8_layers"),
          answers.fastest_products, ELSEWHERE),
    Claim("2.1", "products reach 90 to 95 % of that in FP16, 85 to 90 % in INT8, streaming kernels "
          "60 to 75 %", ("gemm", "int8_layers", "ladder", "quantise"), answers.of_peak, REFUTED),
    Claim("2.2", "memory moves 2 TB/s", ("decode",), answers.memory_rate, ELSEWHERE),
    unmeasured("2.2", "latencies of 4 (L1), 50 (L2) and 400 cycles (memory)",
               "no choice here hangs on one; copies run a stage or more ahead"),
    Claim("2.3", "rows padded by 8 bytes against 32-way conflicts", ("counters",),
          answers.conflicts, IN_PART),
    Claim("2.3", "conflicts leave 300 GB/s, padding gives 1.8 TB/s, 9 times", ("counters",),
          answers.conflict_rate, REFUTED),
    Claim("2.3", "52 of 96 KB of shared memory", ("breakdown",), answers.shared_memory, REFUTED),
    Claim("4.1", "batch 16, 32 heads of 4,096 x 128 in 7.2 ms, INT8 in 4.2",
          ("diffusion_shapes", "large_batches"), answers.latency, REFUTED),
    Claim("4.1", "from 512 to 16,384: 1.2, 2.1, 4.5, 7.2, 16.4, 34.2 ms in FP16, 1.1, 1.6, 2.8, "
          "4.2, 8.6, 16.8 as INT8", ("peers_int8",), answers.by_length, REFUTED),
    Claim("4.1", "the same, of batch 16 and 32 heads", ("large_batches",),
          performance_int8.large_batches, REFUTED),
    Claim("4.3", "37 % fewer bytes where codes take the places of Q, K and V", ("large_batches",),
          performance_int8.handed_over, IN_PART),
    Claim("4.1", "INT8 from 1.1 times at 512 to 2.0 at 16,384", ("peers_int8",),
          answers.int8_by_length, REFUTED),
    Claim("integration", "240 TFLOP/s, by timestep 235 and 4.3 ms", ("diffusion_gains",),
          answers.adaptive, REFUTED),
    Claim("4.2", "Q K^T 85, softmax 15, P V 72, in all 172 TFLOP/s; as INT8 165, 12, 72 and 249",
          ("breakdown", "ladder"), answers.parts_alone, REFUTED),
    Claim("4.3", "311 MB at the peak in FP16, 134 MB as INT8", ("long_sequences",),
          answers.footprint, REFUTED),
    Claim("4.3", "113 MB of Q, K, V in FP16 and 70 or 71 as INT8, 134 of scores, 32 of softmax "
          "workspace", ("long_sequences",), answers.workspace, REFUTED),
    Claim("4.4", "PSNR 36.2 dB in FP16, 31.8 uniform, 33.1 by timestep, 34.5 with late steps in "
          "FP16, INT4 29.2", ("dit_quality",), answers.psnr, IN_PART),
    Claim("4.4", "FID 12.4 in FP16, 12.7 to 15.1 as INT8, less than 0.5 % more", ("dit_quality",),
          answers.frechet, IN_PART),
    Claim("4.4", "LPIPS 0.085 in FP16, 0.087 to 0.098 as INT8", ("dit_quality",), answers.likeness,
          UNMEASURED),
    unmeasured("4.4", "8 of 10 people prefer INT8", "nobody was asked"),
    Claim("4.5", "368 GFLOP/s per W in FP16 at 380 W, 671 as INT8 at 350", ("energy",),
          answers.energy_used, ELSEWHERE),
    Claim("README, 4.5", "INT8 1.82 times as efficient as FP16 FlashAttention", ("energy",),
          answers.energy_gain, HOLDS),
    Claim("5.1", "110 FLOP per byte, so memory sets the ceiling", ("peers",), answers.intensity,
          REFUTED),
    Claim("5.1", "a ceiling of 220 TFLOP/s, of which FP16 reaches 70 % and INT8 67", ("ladder",),
          answers.share_of_roof, REFUTED),
    Claim("5.2", "Q K^T is the bottleneck: 1,000 of 3,100 cycles of a tile", ("breakdown",),
          answers.bottleneck, IN_PART),
    Claim("5.2, 10.1", "WMMA: Q K^T 5 times as fast, the whole 1.8 times, 235 to 340 TFLOP/s",
          ("ladder",), answers.tensor_cores, REFUTED),
    Claim("6.1", "1.2 ms at batch 1, 8.1 at 8, 16.2 at 16", ("long_sequences", "ladder",
          "diffusion_shapes"), answers.by_batch, HOLDS),
    Claim("6.1", "weak scaling 99 %", ("scaling",), answers.weak, REFUTED),
    Claim("6.2", "4.2 ms on one device, 2.2 on two, 1.1 on four: 470 and 940 TFLOP/s, 99 %",
          ("scaling",), answers.strong, IN_PART),
    Claim("6.3", "32,768 tokens: 1.6 ms a head, 50 ms for 32", ("diffusion_shapes",),
          answers.long_sequence, ELSEWHERE),
    Claim("7.1, README", "0.4 % by rounding to codes (2.4 %), 4.5 % of scores (0.3 %)",
          ("numerics_claims",), answers.codes_lost, REFUTED),
    Claim("7.1", "e_q 0.047, 0.06 of a logit", ("numerics_claims",), answers.half_a_step, HOLDS),
    Claim("7.2", "one scale uses 0.002 % of the codes late; by timestep 85 % (README: 90)",
          ("timestep_ablation",), answers.range_reached, IN_PART),
    Claim("7.2", "a fifth less error by timestep", ("timestep_ablation",), answers.timesteps,
          IN_PART),
    Claim("8.2", "INT4 400 TFLOP/s", ("precision_ablation",), answers.four_bits, REFUTED),
    Claim("8.2", "INT4 50 MB of Q and K for 70", ("dit_memory",), answers.four_bits_kept, REFUTED),
    Claim("9.3", "less than 70 MB a head", ("long_sequences",), answers.a_head, HOLDS),
    Claim("10.1", "prefetching K and V: 4.2 to 3.8 ms, 10 % less", ("tile_sweep_fa_tc",),
          answers.more_stages, IN_PART),
    Claim("10.2", "a causal mask saves half of the softmax", ("ladder",), answers.causal_share,
          IN_PART),
    Claim("README", "both branches of guidance in one launch: 1.8 times", ("diffusion_gains",),
          answers.way("guidance in one launch"), REFUTED),
    Claim("integration", "guidance in one launch: 300 TFLOP/s, 3.3 ms", ("diffusion_gains",),
          answers.guidance, REFUTED),
    Claim("README, 10.2", "a fifth of the keys pruned saves 20 to 40 %", ("diffusion_gains",),
          answers.way("20% of keys pruned"), REFUTED),
    Claim("README", "sparse attention makes long sequences linear", ("diffusion_gains",),
          answers.sparse, IN_PART),
    Claim("README", "fine-tuning loses at most 0.5 %", ("dit_fine_tune",), answers.fine_tuning,
          HOLDS),
    Claim("kernels", "fa needs 264 KB of shared memory for 128 rows, 66 KB for 64, 33 for 32", (),
          answers.fa_shared_memory, IN_PART, "[attn_fa.cu](../kernels_cu/attn_fa.cu)"),
    Claim("linear layers", "INT8 products 1.5 to 2 times", ("int8_layers",), answers.products,
          IN_PART),
    Claim("linear layers", "less than 0.5 % more FID", ("dit_linear",),
          performance_int8.linear_frechet, IN_PART),
    Claim("linear layers", "models 1.7 to 1.9 times as fast, 45 to 50 % smaller",
          ("diffusers_blocks",), answers.blocks, REFUTED),
    Claim("linear layers", "40 to 60 % less memory, 75 at most", ("checkpoints",),
          answers.checkpoint, HOLDS),
    Claim("linear layers", "Kandinsky 20 to 11 GB (19.5 to 10.2), 32 to 16 GB",
          ("checkpoints", "kandinsky_block"), answers.kandinsky, IN_PART),
    Claim("linear layers", "60 % of parameters eligible, error 0.0023",
          ("checkpoints", "kandinsky_block"), answers.eligible, REFUTED),
)  # fmt: skip
