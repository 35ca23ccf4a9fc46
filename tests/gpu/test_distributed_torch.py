"""Groups on torch's process groups over NCCL, and context parallelism of diffusers on two devices.

`tests/interop/test_context_parallel.py` says the same of gloo. Ranks are processes of torchrun.
"""

from __future__ import annotations

import re

import pytest

from tests.support.torch_ranks import processes, torchrun

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
    pytest.skip("needs a torch with CUDA and two devices", allow_module_level=True)

RANKS = "tests.interop.torch_ranks"


def test_groups_over_nccl() -> None:
    torchrun(2, RANKS, "cuda", "groups")


@pytest.mark.parametrize(
    "arguments",
    [
        ("wan", "2", "1", "precision", "bfloat16", '{"train": true}'),
        ("wan", "1", "2", "precision", "bfloat16", '{"train": true}'),
        ("wan", "2", "1", "balanced", "bfloat16", '{"convert_to_fp32": false}'),
        ("wan", "2", "1", "aggressive", "bfloat16"),
        ("wan_uneven", "2", "1", "balanced", "bfloat16", '{"ring_anything": true}'),
        ("wan_uneven", "1", "2", "precision", "bfloat16", '{"ulysses_anything": true}'),
        ("qwen", "2", "1", "precision", "bfloat16"),
        ("qwen", "1", "2", "balanced", "bfloat16"),
    ],
    ids="-".join,
)  # fmt: skip
def test_models_of_diffusers_on_two_devices(arguments: tuple[str, ...]) -> None:
    said = torchrun(2, RANKS, "cuda", "context_parallel", *arguments)
    assert " from native, one process " in said


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("raises", "rank 1 raised KeyError: 'of the caller'"),
        ("dies", "rank 1 did not come to 'parallel_attention, call 5' within 15 s"),
        ("dies while it sends", "rank 0 waited longer than 15 s for arrays of others|rank 1 .*"),
        ("differs", "rank 1 called parallel_attention with scale=0.5, rank 0 with scale=0.25: "
                    "give all ranks the same scale"),
    ],
)  # fmt: skip
def test_a_process_that_fails_ends_the_other_with_one_sentence(kind: str, said: str) -> None:
    found = processes(2, RANKS, "cuda", "fault", kind)
    sentences = re.findall(r"rank 0 says: (.*)", found[0][1])
    assert len(sentences) == 1 and re.fullmatch(said, sentences[0]), found
