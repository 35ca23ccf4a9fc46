"""A small model of diffusers that adapters, casts, offloading and INT8 layers come to and leave.

A world takes steps. Its twin is a model without INT8 that takes the same steps. The twin has the
model's numbers without INT8, and the numbers after restoring.
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
from diffusers.hooks import HookRegistry

import cupyattn as ca
from cupyattn import interop
from cupyattn.interop.diffusers import replace_attention_with_int8
from cupyattn.interop.torch import Int8Linear, replace_linear_with_int8
from experiments._harness import small_transformers as small
from experiments._harness.slot_bounds import Quantised, base_of, slots

CPU = torch.device("cpu")
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Layers that take adapters, by family: projections of attention and of the MLP.
TARGETS = {
    "kandinsky": (["to_query", "to_value"], ["feed_forward.in_layer", "feed_forward.out_layer"]),
    **dict.fromkeys(("flux", "wan", "sd3"), (["to_q", "to_v"], ["net.0.proj", "net.2"])),
}
#: Parts of the model that become INT8: all, the layers of attention, or all except the MLP.
PATTERNS: tuple[dict[str, Any], ...] = ({}, {"include": "att"}, {"exclude": "ff|feed"})
_GROUPS = "group_offloading"
#: Ways to offload, by their names in a step.
OFFLOADS = ("blocks", "leaves", "blocks on disk", "leaves on disk", "layers", "buffers", "model")


class NothingToDo(Exception):
    """A step that has nothing to act on, such as the removal of an adapter where there is none."""


class World:
    """A model, and what was done to it.

    Parameters
    ----------
    family, dtype : str
    seed : int
    int8 : bool
        Whether steps that replace and restore do so; the twin takes none.
    moves : bool
        Whether steps that offload do so: they change no numbers, so that the twin takes none.
    """

    def __init__(self, family: str, dtype: str, seed: int, *, int8: bool, moves: bool) -> None:
        self.family, self.int8, self.moves = family, int8, moves
        self.model = small.transformer(family, seed)
        if family != "kandinsky":
            self.model.to(TYPES[dtype])
        self.call = small.caller(family, seed)
        self.adapters: list[str] = []
        self.made = 0
        self.offloaded = ""
        self.is_lost = False  # diffusers left other numbers in the places of weights
        self.handles: list[Any] = []
        self.quantised: dict[str, Quantised] = {}
        self.kept: dict[str, torch.Tensor] = {}  # weights of layers that are INT8, as they were
        self._folder = tempfile.TemporaryDirectory(prefix="cupyattn-world-")

    def close(self) -> None:
        """Remove the files that were written."""
        self._folder.cleanup()

    @property
    def is_int8(self) -> bool:
        """Whether any layer is INT8 now."""
        return any(isinstance(layer, Int8Linear) for layer in self.model.modules())

    def do(self, kind: str, arguments: Mapping[str, Any]) -> None:
        """Take a step.

        Raises
        ------
        NothingToDo
        """
        getattr(self, kind)(**arguments)

    def _need(self, there: Any) -> None:
        if not there:
            raise NothingToDo

    # ---- adapters --------------------------------------------------------------------------------

    def load(self, rank: int, part: int, dora: bool, from_file: bool, seed: int) -> None:
        """Add an adapter that is drawn by its seed: by a configuration, or loaded as tensors."""
        self._need("disk" not in self.offloaded and not self._is_fused() and not self._is_cast())
        name, targets = f"adapter_{self.made}", TARGETS[self.family][part]
        way = self.offloaded
        if by_accelerate := way in ("layers", "buffers", "model"):
            self.onload(read_back=True)  # as pipelines do round their load_lora_weights
        torch.manual_seed(seed)
        if from_file:
            state = {}
            for slot_name, slot in slots(self.model).items():
                if any(slot_name.endswith(target) for target in targets):
                    base: Any = base_of(slot)
                    for matrix, size in (
                        ("lora_A", (rank, base.in_features)), ("lora_B", (base.out_features, rank))
                    ):  # fmt: skip
                        state[f"{slot_name}.{matrix}.weight"] = torch.randn(size) * 0.1
            self.model.load_lora_adapter(state, prefix=None, adapter_name=name)
        else:
            config = peft.LoraConfig(
                r=rank, target_modules=targets, use_dora=dora, init_lora_weights=False
            )
            self.model.add_adapter(config, name)
            for parameter, x in self.model.named_parameters():
                if f"lora_magnitude_vector.{name}." in parameter:
                    # As of a file: peft begins with norms of the weights, which INT8 changes.
                    x.data.copy_(torch.rand(x.shape) + 0.5)
        self.made += 1
        self.adapters.append(name)
        if by_accelerate:
            self.offload(way)

    def swap(self, chosen: int, weight: float) -> None:
        """Let one adapter act, or all of them, or none."""
        self._need(self.adapters)
        if chosen % 4 == 3:
            self.model.disable_adapters()
            return
        self.model.enable_adapters()
        names = self.adapters if chosen % 4 == 2 else [self.adapters[chosen % len(self.adapters)]]
        self.model.set_adapters(list(names), [weight] * len(names))

    def unload(self, chosen: int, everything: bool) -> None:
        """Remove an adapter, or all of them."""
        self._need(self.adapters and "disk" not in self.offloaded)
        if everything or len(self.adapters) == 1:
            self.model.unload_lora()
            self.adapters.clear()
        else:
            self.model.delete_adapters(self.adapters.pop(chosen % len(self.adapters)))

    def merge(self, safe: bool) -> None:
        """Fuse the adapters that act into the weights."""
        self._need(self.adapters and not self.offloaded and not self._is_cast())
        self.model.fuse_lora(safe_fusing=safe)

    def unmerge(self) -> None:
        """Take fused adapters out again."""
        self._need(self.adapters and not self.offloaded and not self._is_cast())
        self.model.unfuse_lora()

    def save_adapter(self) -> None:
        """Write an adapter, and load it again under its name."""
        self._need(self.adapters and not self.offloaded)
        self.model.save_lora_adapter(Path(self._folder.name) / "adapter", self.adapters[0])

    # ---- types and places ------------------------------------------------------------------------

    def cast(self, dtype: str) -> None:
        """Convert the model. Kandinsky 5 computes in float32 alone once all of it is converted."""
        self._need(self.family != "kandinsky" and not self.offloaded and not self._is_cast())
        self.model.to(TYPES[dtype])

    def layerwise(self) -> None:
        """Let diffusers keep weights in 8 bits between calls."""
        self._need(not self.offloaded and not self._is_cast())
        self.model.enable_layerwise_casting(torch.float8_e4m3fn, self.model.dtype)

    def _is_cast(self) -> bool:
        modules = self.model.modules()
        return any("layerwise_casting" in vars(m)["_diffusers_hook"].hooks
                   for m in modules if "_diffusers_hook" in vars(m))  # fmt: skip

    def offload(self, way: str) -> None:
        """Offload the model in one of `OFFLOADS`."""
        self._need(not self.offloaded)
        if self.moves:
            if way in ("layers", "buffers"):
                accelerate.cpu_offload(self.model, CPU, offload_buffers=way == "buffers")
            elif way == "model":
                accelerate.cpu_offload_with_hook(self.model, CPU)
            else:
                folder = Path(self._folder.name) / str(len(list(Path(self._folder.name).iterdir())))
                kind = "block_level" if way.startswith("blocks") else "leaf_level"
                path = str(folder) if "disk" in way else None
                self.model.enable_group_offload(CPU, CPU, kind, 1, offload_to_disk_path=path)
        self.offloaded = way

    def onload(self, read_back: bool) -> None:
        """Remove the hooks that offload; groups on disk lose their numbers if nothing is read back.

        diffusers itself reads nothing back.
        """
        self._need(self.offloaded)
        if self.moves and self.offloaded in ("layers", "buffers", "model"):
            accelerate.hooks.remove_hook_from_module(self.model, recurse=True)
        elif self.moves:
            for module in self.model.modules() if read_back else ():
                hook = HookRegistry.check_if_exists_or_initialize(module).get_hook(_GROUPS)
                if hook is not None:
                    hook.group.onload_()
            registry = HookRegistry.check_if_exists_or_initialize(self.model)
            registry.remove_hook(_GROUPS, recurse=True)
            for x in (*self.model.parameters(), *self.model.buffers()):
                x.data = x.data.clone()  # at an address as before, so that torch adds as before
            self.is_lost = "disk" in self.offloaded and not read_back
        self.offloaded = ""

    # ---- projections -----------------------------------------------------------------------------

    def _is_fused(self) -> bool:
        return any(getattr(module, "fused_projections", False) for module in self.model.modules())

    def fuse(self) -> None:
        """Fuse the projections of attention."""
        self._need(self.family != "kandinsky" and not self.adapters)
        self._need(not self.offloaded and not self._is_cast())
        self.model.fuse_qkv_projections()
        for name, slot in slots(self.model).items():
            layer = base_of(slot)
            if isinstance(layer, Int8Linear) and name not in self.quantised:
                self._remember_fused(name, layer)

    def _remember_fused(self, name: str, layer: Int8Linear) -> None:
        original = vars(layer)["_original"].module
        weight = (layer if original is None else original).weight.detach().clone()
        self.quantised[name] = Quantised(weight, layer.strategy)
        self.kept[name] = weight

    def unfuse(self) -> None:
        """Take fused projections out again."""
        self._need(self.family != "kandinsky" and self._is_fused() and not self.offloaded)
        self.model.unfuse_qkv_projections()

    # ---- INT8 ------------------------------------------------------------------------------------

    def replace(self, part: int, strategy: str, originals: str, again: bool) -> None:
        """Replace linear layers."""
        if not self.int8:
            return
        before = {
            name: base_of(slot).weight.detach().clone()
            for name, slot in slots(self.model).items()
            if not isinstance(base_of(slot), Int8Linear)
        }
        if again:
            before |= {
                name: self.kept[name].to(base_of(slot).weight_dtype)
                for name, slot in slots(self.model).items()
                if name in self.kept and isinstance(base_of(slot), Int8Linear)
            }
        config = ca.Int8Config(strategy=strategy, min_elements_for_int8=0)
        handle = replace_linear_with_int8(
            self.model, config=config, backend="mirror", originals=originals, again=again,
            **PATTERNS[part],
        )  # fmt: skip
        if again:
            self.handles = [one for one in self.handles if type(one) is not type(handle)]
            self.quantised.clear()
        self.handles.append(handle)
        for name in handle.replaced:
            name = name.removesuffix(".base_layer")
            self.quantised[name] = Quantised(before[name], strategy)
            self.kept[name] = before[name]

    def attention(self, again: bool) -> None:
        """Replace attention."""
        if self.int8:
            options = {"min_length": 1, "policy": "balanced", "again": again}
            handle = replace_attention_with_int8(self.model, **options)
            if again:
                self.handles = [h for h in self.handles if type(h) is not type(handle)]
            self.handles.append(handle)

    def restore(self, by_handle: bool) -> None:
        """Take back everything, or what the last handle replaced."""
        if not self.int8:
            return
        self._need(self.handles)
        if by_handle:
            self.handles[-1].restore()
            self.handles.pop()
        else:
            interop.restore(self.model)
            self.handles.clear()
        self.quantised = {
            name: one for name, one in self.quantised.items() if name in self._int8_slots()
        }

    def _int8_slots(self) -> set[str]:
        own = slots(self.model).items()
        return {name for name, slot in own if isinstance(base_of(slot), Int8Linear)}

    def came_back(self) -> dict[str, torch.Tensor]:
        """Return the weights that were replaced and are there again, as they must be by now."""
        names = self.kept.keys() - self._int8_slots()
        found = {name: self.kept.pop(name) for name in names}
        return {name: weight for name, weight in found.items() if name in slots(self.model)}

    # ---- calls and files -------------------------------------------------------------------------

    def run(self) -> torch.Tensor:
        """Call the model."""
        found: torch.Tensor = self.call(self.model)
        return found

    def compiled(self) -> torch.Tensor:
        """Call the model as torch compiles it."""
        torch._dynamo.reset()
        found: torch.Tensor = self.call(torch.compile(self.model, backend="eager"))
        torch._dynamo.reset()
        return found

    def save(self, way: str) -> None:
        """Write the model's tensors, or the model, or let it write itself; read them back."""
        self._need(not self.offloaded)
        if way == "state":
            file = io.BytesIO()
            torch.save(self.model.state_dict(), file)
            file.seek(0)
            self.model.load_state_dict(torch.load(file))
        elif way == "model":
            self._need(not any(hasattr(m, "_int8_layer") for m in self.model.modules()))
            self._need(not self._is_cast())
            file = io.BytesIO()
            torch.save(self.model, file)
            file.seek(0)
            again = torch.load(file, weights_only=False)
            if not torch.equal(self.call(again), self.run()):
                raise AssertionError("a model that was saved and loaded computes something else")
        elif way == "copy":
            self._need(not self._is_cast())
            again = copy.deepcopy(self.model)
            if not torch.equal(self.call(again), self.run()):
                raise AssertionError("a copy computes something else")
        else:
            self.model.save_pretrained(Path(self._folder.name) / "model")
