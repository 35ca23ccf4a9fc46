"""Pipelines of diffusers with small random weights: one of each family that is promised to work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

#: Seed of weights, prompts and latents.
SEED = 0


@dataclass(frozen=True)
class Case:
    """A family: its pipeline, and how it is called.

    Parameters
    ----------
    make : callable
        Returns the pipeline.
    call : callable
        Returns the arguments of one call but steps, latents and output.
    """

    make: Callable[[], Any]
    call: Callable[[], dict[str, Any]]


def parts(**named: Any) -> dict[str, Any]:
    """No text encoder, no VAE: prompts are embedded already and results are latents."""
    absent = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return absent | named


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED))


def stable_diffusion() -> Any:
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=32,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=2,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    scheduler = diffusers.PNDMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", skip_prk_steps=True,
        steps_offset=1,
    )  # fmt: skip
    return diffusers.StableDiffusionPipeline(
        **parts(unet=unet, scheduler=scheduler, safety_checker=None, feature_extractor=None),
        requires_safety_checker=False,
    )


def stable_diffusion_call() -> dict[str, Any]:
    prompts = {"prompt_embeds": noise(1, 7, 32), "negative_prompt_embeds": noise(1, 7, 32) * 0.5}
    return prompts | {"height": 128, "width": 128, "guidance_scale": 5.0}


def sdxl() -> Any:
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, cross_attention_dim=64,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=(2, 4),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), use_linear_projection=True,
        addition_embed_type="text_time", addition_time_embed_dim=8, norm_num_groups=8,
        transformer_layers_per_block=(1, 1), projection_class_embeddings_input_dim=80,
    )  # fmt: skip
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
        timestep_spacing="leading",
    )  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        **parts(unet=unet, scheduler=scheduler, text_encoder_2=None, tokenizer_2=None)
    )


def sdxl_call() -> dict[str, Any]:
    both = {"prompt_embeds": noise(1, 7, 64), "pooled_prompt_embeds": noise(1, 32)}
    negative = {f"negative_{name}": x * 0.5 for name, x in both.items()}
    return both | negative | {"height": 128, "width": 128, "guidance_scale": 5.0}


def sd3() -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=1, in_channels=4, out_channels=4, num_layers=2,
        attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        caption_projection_dim=32, pooled_projection_dim=32, pos_embed_max_size=16,
    )  # fmt: skip
    absent = dict.fromkeys(("text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return diffusers.StableDiffusion3Pipeline(
        **parts(transformer=transformer, scheduler=scheduler), **absent
    )


def sd3_call() -> dict[str, Any]:
    both = {"prompt_embeds": noise(1, 7, 32), "pooled_prompt_embeds": noise(1, 32)}
    negative = {f"negative_{name}": x * 0.5 for name, x in both.items()}
    return both | negative | {"height": 128, "width": 128, "guidance_scale": 5.0}


def flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return diffusers.FluxPipeline(
        **parts(transformer=transformer, text_encoder_2=None, tokenizer_2=None),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def flux_call() -> dict[str, Any]:
    """True guidance: two passes a step."""
    both = {"prompt_embeds": noise(1, 7, 32), "pooled_prompt_embeds": noise(1, 32)}
    negative = {f"negative_{name}": x * 0.5 for name, x in both.items()}
    return both | negative | {"height": 256, "width": 256, "true_cfg_scale": 3.0}


def pixart() -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=16, num_layers=2, patch_size=1, attention_head_dim=8, num_attention_heads=2,
        caption_channels=32, in_channels=4, cross_attention_dim=16, out_channels=8,
        use_additional_conditions=False,
    )  # fmt: skip
    scheduler = diffusers.DPMSolverMultistepScheduler()
    return diffusers.PixArtSigmaPipeline(**parts(transformer=transformer, scheduler=scheduler))


def padded(keys: int, of: int = 7) -> torch.Tensor:
    """Return the mask of a prompt's tokens without padding, (1, of), bool."""
    return torch.arange(of)[None] < keys


def pixart_call() -> dict[str, Any]:
    """A prompt that is long enough for INT8 to take the look at it, which has a mask."""
    both = {"prompt_embeds": noise(1, 40, 32), "prompt_attention_mask": padded(30, 40).float()}
    negative = {f"negative_{name}": x * 1 for name, x in both.items()}
    options = {"negative_prompt": None, "use_resolution_binning": False}
    return both | negative | options | {"height": 128, "width": 128, "guidance_scale": 5.0}


def wan() -> Any:
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16,
        out_channels=16, text_dim=32, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return diffusers.WanPipeline(**parts(transformer=transformer, scheduler=scheduler))


def wan_call() -> dict[str, Any]:
    prompts = {"prompt_embeds": noise(1, 7, 32), "negative_prompt_embeds": noise(1, 7, 32) * 0.5}
    return prompts | {"height": 128, "width": 128, "num_frames": 5, "guidance_scale": 5.0}


def hunyuan_video() -> Any:
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1, text_embed_dim=32,
        pooled_projection_dim=32, rope_axes_dim=(4, 4, 8),
    )  # fmt: skip
    return diffusers.HunyuanVideoPipeline(
        **parts(transformer=transformer, text_encoder_2=None, tokenizer_2=None),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def hunyuan_video_call() -> dict[str, Any]:
    prompts = {"prompt_embeds": noise(1, 7, 32), "pooled_prompt_embeds": noise(1, 32)}
    prompts["prompt_attention_mask"] = padded(4).float()
    return prompts | {"height": 64, "width": 64, "num_frames": 5}


def cogvideox() -> Any:
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2,
        time_embed_dim=8, text_embed_dim=32, sample_width=16, sample_height=16, sample_frames=5,
        patch_size=2, temporal_compression_ratio=4, max_text_seq_length=7,
    )  # fmt: skip
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=3.0
    )
    return diffusers.CogVideoXPipeline(**parts(transformer=transformer, scheduler=scheduler))


def cogvideox_call() -> dict[str, Any]:
    prompts = {"prompt_embeds": noise(1, 7, 32), "negative_prompt_embeds": noise(1, 7, 32) * 0.5}
    return prompts | {"height": 128, "width": 128, "num_frames": 5, "guidance_scale": 5.0}


def kandinsky5() -> Any:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=16, in_text_dim=32, in_text_dim2=32, time_dim=32, out_visual_dim=16,
        patch_size=(1, 2, 2), model_dim=32, ff_dim=64, num_text_blocks=1, num_visual_blocks=2,
        axes_dims=(4, 6, 6),
    )  # fmt: skip
    return diffusers.Kandinsky5T2VPipeline(
        **parts(transformer=transformer, text_encoder_2=None, tokenizer_2=None),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0),
    )


def kandinsky5_call() -> dict[str, Any]:
    both = {
        "prompt_embeds_qwen": noise(1, 7, 32), "prompt_embeds_clip": noise(1, 32),
        "prompt_cu_seqlens": torch.tensor([0, 7], dtype=torch.int32),
    }  # fmt: skip
    negative = {f"negative_{name}": x * 1 for name, x in both.items()}
    return both | negative | {"height": 128, "width": 128, "num_frames": 5, "guidance_scale": 5.0}


def qwen_image() -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    return diffusers.QwenImagePipeline(
        **parts(transformer=transformer), scheduler=diffusers.FlowMatchEulerDiscreteScheduler()
    )


def qwen_image_call() -> dict[str, Any]:
    both = {"prompt_embeds": noise(1, 7, 32), "prompt_embeds_mask": padded(4)}
    negative = {f"negative_{name}": x * 1 for name, x in both.items()}
    return both | negative | {"height": 256, "width": 256, "true_cfg_scale": 3.0}


def chroma() -> Any:
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8, approximator_hidden_dim=32, approximator_layers=1,
    )  # fmt: skip
    return diffusers.ChromaPipeline(
        **parts(transformer=transformer), scheduler=diffusers.FlowMatchEulerDiscreteScheduler()
    )


def chroma_call() -> dict[str, Any]:
    """The mask is one of numbers, which the model's attention adds to the scores."""
    both = {"prompt_embeds": noise(1, 7, 32), "prompt_attention_mask": padded(4).float()}
    negative = {f"negative_{name}": x * 1 for name, x in both.items()}
    return both | negative | {"height": 256, "width": 256, "guidance_scale": 3.0}


def z_image() -> Any:
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=32, axes_dims=[4, 6, 6], axes_lens=[128, 32, 32],
    )  # fmt: skip
    return diffusers.ZImagePipeline(
        **parts(transformer=transformer), scheduler=diffusers.FlowMatchEulerDiscreteScheduler()
    )


def z_image_call() -> dict[str, Any]:
    """Both branches in a batch, whose prompts are of different lengths."""
    prompts = {"prompt_embeds": [noise(7, 32)], "negative_prompt_embeds": [noise(40, 32)]}
    return prompts | {"height": 256, "width": 256, "guidance_scale": 3.0}


CASES = {
    "sd15": Case(stable_diffusion, stable_diffusion_call),
    "sdxl": Case(sdxl, sdxl_call),
    "sd3": Case(sd3, sd3_call),
    "flux": Case(flux, flux_call),
    "pixart": Case(pixart, pixart_call),
    "wan": Case(wan, wan_call),
    "hunyuan_video": Case(hunyuan_video, hunyuan_video_call),
    "cogvideox": Case(cogvideox, cogvideox_call),
    "kandinsky5": Case(kandinsky5, kandinsky5_call),
    "qwen_image": Case(qwen_image, qwen_image_call),
    "chroma": Case(chroma, chroma_call),
    "z_image": Case(z_image, z_image_call),
}


def make(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a pipeline of a family, its weights the same every time."""
    torch.manual_seed(SEED)
    pipe = CASES[family].make()
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        for x in part.parameters() if isinstance(part, torch.nn.Module) else ():
            if not x.any():  # gates that training opens
                torch.nn.init.normal_(x, std=0.1)
    return pipe.to(dtype)


def moved(x: torch.Tensor, pipe: Any) -> torch.Tensor:
    return x.to(pipe._execution_device, pipe.dtype if x.is_floating_point() else x.dtype)


def generate(pipe: Any, family: str, steps: int = 4) -> torch.Tensor:
    """Return the latents that a pipeline makes, the same every time."""
    given = CASES[family].call()
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            given[name] = moved(x, pipe)
        elif isinstance(x, list):
            given[name] = [moved(one, pipe) for one in x]
    generator = torch.Generator().manual_seed(SEED)
    found = pipe(
        **given, num_inference_steps=steps, generator=generator, output_type="latent",
        return_dict=False,
    )  # fmt: skip
    return found[0]


def adapter(model: Any, *names: str, rank: int = 4) -> dict[str, torch.Tensor]:
    """Return a LoRA for layers of a pipeline's transformer, as ``load_lora_weights`` takes it."""
    state = {}
    for name in names:
        layer = model.get_submodule(name)
        state[f"transformer.{name}.lora_A.weight"] = torch.randn(rank, layer.in_features)
        state[f"transformer.{name}.lora_B.weight"] = torch.randn(layer.out_features, rank)
    return state
