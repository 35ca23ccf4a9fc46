"""A diffusers pipeline with INT8 attention, whose precision follows the noise of each step.

Run it with ``python examples/diffusers_pipeline.py``. The pipeline is a small Flux with random
weights, so nothing is downloaded. Replace it with ``FluxPipeline.from_pretrained(...)``.
"""

import sys

try:
    import torch
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )
except ImportError as error:
    install = "pip install torch diffusers"
    sys.exit(f"diffusers_pipeline.py needs torch and diffusers: {install} ({error}).")

from cupyattn.interop.diffusers import replace_attention_with_int8


def pipeline() -> FluxPipeline:
    """Return a pipeline that makes latents of given prompt embeddings."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    others = ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    return FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        **dict.fromkeys(others),
    )


def main() -> None:
    """Sample with the model's own attention and with INT8, from the same noise."""
    pipe = pipeline().to("cuda" if torch.cuda.is_available() else "cpu")
    arguments = {
        "prompt_embeds": torch.randn(1, 7, 32, device=pipe.device),
        "pooled_prompt_embeds": torch.randn(1, 32, device=pipe.device),
        "latents": torch.randn(1, 256, 4, device=pipe.device),
        "height": 256, "width": 256, "num_inference_steps": 4, "output_type": "latent",
    }  # fmt: skip
    native = pipe(**arguments).images
    with replace_attention_with_int8(pipe, policy="adaptive") as handle:
        latents = pipe(**arguments).images
        print(handle.report())
    print(f"INT8 is {((latents - native).norm() / native.norm()).item():.3%} away")


if __name__ == "__main__":
    main()
