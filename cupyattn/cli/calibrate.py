"""Find static INT8 scales for each layer of a recorded model. RECORDING is a file saved by
`cupyattn.interop.torch.record(model)`. Read the output with
`cupyattn.diffusion.Calibrations.load`, and pass the result as `replace_attention_with_int8(pipe,
quant=...)`."""

from __future__ import annotations

import argparse

from cupyattn.cli import flags, output
from cupyattn.diffusion.arguments import check_percentile
from cupyattn.diffusion.calibration import OF
from cupyattn.diffusion.layer_scales import calibrate
from cupyattn.files import check_folder
from cupyattn.measure.words import counted, printable

HEADER = ("layer", "heads", "head_dim", "calls per bin", "largest scale of Q", "of K")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("recording", metavar="RECORDING", help="safetensors of a recorder")
    parser.add_argument("--output", metavar="FILE", required=True, help="safetensors of scales")
    parser.add_argument(
        "--percentile", type=float, metavar="P", default=99.0,
        help="in per cent: the value that becomes code 127 (99)",
    )  # fmt: skip
    parser.add_argument(
        "--of", choices=OF, default=OF[0], help="population of the percentile (maxima)"
    )
    parser.add_argument(
        "--bins", type=int, metavar="N", default=1, help="ranges of steps with separate scales (1)"
    )
    parser.add_argument(
        "--smooth-k", action="store_true", help="scales of keys less their mean, computed in calls"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    flags.check_whole(args, "bins")
    check_percentile(args.percentile)
    check_folder("--output", args.output)
    found = calibrate(
        args.recording, args.percentile, of=args.of, num_bins=args.bins, smooth_k=args.smooth_k
    )
    found.save(args.output)
    rows = [
        [
            printable(name), str(one.heads), str(one.head_dim), " ".join(map(str, one.batches)),
            f"{float(one.q_scale.max()):.3g}", f"{float(one.k_scale.max()):.3g}",
        ]
        for name, one in found.items()
    ]  # fmt: skip
    output.print_table(HEADER, rows)
    output.say(f"\nscales of {counted(len(found), 'layer')} are in {printable(args.output)}")
    return 0
