"""Find static INT8 scales for each layer of a recorded model. RECORDING is what
`cupyattn.interop.torch.record(model)` saved; `replace_attention_with_int8(pipe, quant=...)` takes
what `cupyattn.diffusion.Calibrations.load` reads of the output."""

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
        help="in per cent: what code 127 stands for (99)",
    )  # fmt: skip
    parser.add_argument("--of", choices=OF, default=OF[0], help="of what it is one (maxima)")
    parser.add_argument(
        "--bins", type=int, metavar="N", default=1, help="ranges of steps with own scales (1)"
    )
    parser.add_argument(
        "--smooth-k", action="store_true", help="scales of keys less their mean, which calls find"
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
