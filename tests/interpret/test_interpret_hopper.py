"""Hopper's hazards in the interpreter: the micro-kernels of its primitives, each robbed of a line.

Every kernel here runs right as it stands (tests/interpret/test_interpret_prims.py,
tests/gpu/test_prims.py).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cupyattn.compiler.modules import ModuleSpec
from cupyattn.interpret import KernelFault
from cupyattn.interpret.executor import run_kernel
from cupyattn.plans.records import TensorMap
from tests.prims.prim import FOLDER, Prim
from tests.prims.prims_cases import PRIMS
from tests.support.marks import slow_unless

BY_NAME = {prim.name: prim for prim in PRIMS}


@dataclass(frozen=True)
class Theft:
    """What is taken out of a micro-kernel, and what must be found.

    Parameters
    ----------
    what : str
        One sentence.
    prim : str
        Which primitive's test.
    line : str
        The text that goes, where it comes first.
    kind, says : str
        Of the finding, and a part of its message.
    instead : str
        What comes in its place.
    """

    what: str
    prim: str
    line: str
    kind: str
    says: str
    instead: str = ""


THEFTS = [
    Theft("operands written by threads, no proxy fence", "wgmma_ss-float16-64",
          "  fence_proxy_async();\n", "race", "no fence.proxy.async stands between"),
    Theft("no barrier behind the proxy fence", "wgmma_ss-float16-64",
          "  __syncthreads();  // both operands are complete\n", "race", "nothing orders"),
    Theft("accumulators used before the wait", "wgmma_ss-float16-64",
          "    wgmma_wait_group<0>();\n", "in flight", "while a wgmma that holds it is not waited"),
    Theft("a wait for all groups but one", "wgmma_ss-float16-64",
          "    wgmma_wait_group<0>();\n", "in flight", "while a wgmma that holds it",
          instead="    wgmma_wait_group<1>();\n"),
    Theft("a group that is never closed", "wgmma_ss-float16-64",
          "    wgmma_commit_group();\n", "in flight", "while a wgmma that holds it"),
    Theft("accumulators changed, no wgmma.fence", "wgmma_ss-float16-64",
          "    wgmma_fence();\n", "race", "no wgmma.fence stands between a change"),
    Theft("fragments of A loaded, no wgmma.fence", "wgmma_rs-float16-64",
          "\n  wgmma_fence();\n", "race", "no wgmma.fence stands between a change", instead="\n"),
    Theft("a box read before it has arrived", "tma-float16",
          "  mbarrier_wait_parity(full, 0);  // every box has arrived\n", "in flight",
          "read while an asynchronous copy"),
    Theft("a barrier that the copy engine has not been shown", "tma-float16",
          "    fence_mbarrier_init();\n", "race", "no fence.mbarrier_init"),
    Theft("a wait for a phase that nobody ends", "tma-float16",
          "    mbarrier_arrive_expect_tx(full, BOXES * BOX_BYTES);  // one phase for all of them\n",
          "deadlock", "at an mbarrier",
          instead="    mbarrier_arrive_expect_tx(full, BOXES * BOX_BYTES + 16);\n"),
    Theft("a box that begins between two 16 bytes", "tma-float16",
          "X_map, full, at[4 * b],", "misaligned", "no multiple of 16 bytes",
          instead="X_map, full, at[4 * b] + 1,"),
    Theft("shared memory written by threads, then by the copy engine", "tma-float16",
          "  fence_proxy_async();\n", "race", "no fence.proxy.async stands between"),
    Theft("a box stored from before the array", "tma_store",
          "Y_map, shared + b * BOX_BYTES, at[4 * b],", "out of bounds", "from before the array",
          instead="Y_map, shared + b * BOX_BYTES, at[4 * b] - 8,"),
    Theft("boxes that the copy engine has not been shown", "tma_store",
          "  fence_proxy_async();\n  __syncthreads();  // the boxes are complete\n",
          "race", "no fence.proxy.async stands between",
          instead="  __syncthreads();\n"),
    Theft("boxes overwritten before they have been read", "tma_store",
          "    cp_async_bulk_wait_group_read();\n", "in flight", "still reads it"),
    Theft("barriers used before they are initialised", "mbarrier",
          "  __syncthreads();  // the barriers are initialised before anyone waits or arrives\n",
          "race", "nothing orders that after the write by warp 0 lane 0"),
    Theft("a row overwritten while it is read", "mbarrier",
          "      mbarrier_wait_parity(empty[stage], parity ^ 1);  // this row is no longer read\n",
          "race", "nothing orders that after the read by"),
    Theft("a row read before it is written", "mbarrier",
          "      mbarrier_wait_parity(full[stage], parity);  // the row is there\n",
          "never written", "read before anything was written"),
    Theft("bytes counted off before the other lanes have written", "mbarrier",
          "      __syncwarp();  // every lane has written\n", "race",
          "nothing orders that after the write by warp 0"),
    Theft("bytes counted off without a fence", "mbarrier",
          "        __threadfence_block();  // whoever sees the bytes counted sees the row\n",
          "race", "nothing orders that after the write by warp 0"),
]  # fmt: skip


def robbed(theft: Theft, folder: Path) -> ModuleSpec:
    """Return a copy of a micro-kernel without one of its lines."""
    prim = BY_NAME[theft.prim]
    copy = Path(shutil.copytree(FOLDER, folder / "kernels"))
    path = copy / prim.spec.path.name
    text = path.read_text()
    assert theft.line in text, f"{path.name} has changed"
    path.write_text(text.replace(theft.line, theft.instead, 1))
    return replace(prim.spec, source=path)


def execute(prim: Prim, spec: ModuleSpec) -> None:
    arguments = prim.arguments()
    expected = prim.expected(**arguments)
    for name, value in arguments.items():
        if isinstance(value, np.ndarray):
            arguments[name] = np.array(value)
            arguments[name].flags.writeable = name in expected
    mapped = {a.buffer: arguments[a.buffer] for a in arguments.values() if isinstance(a, TensorMap)}
    passed = [arguments[name] for name in prim.parameters(arguments)]
    run_kernel(spec, prim.entry, passed, block=prim.block, mapped=mapped, arch="sm_90a")
    prim.check({name: a for name, a in arguments.items() if isinstance(a, np.ndarray)})


@pytest.mark.parametrize(
    "theft", slow_unless(lambda i, _: not i % 2, THEFTS), ids=lambda theft: theft.what
)
def test_a_missing_line_is_found(theft: Theft, tmp_path: Path) -> None:
    prim = BY_NAME[theft.prim]
    execute(prim, prim.spec)  # as it stands
    with pytest.raises(KernelFault) as caught:
        execute(prim, robbed(theft, tmp_path))
    finding = caught.value.finding
    assert finding.kind == theft.kind and theft.says in finding.message, finding
    assert finding.location is not None and finding.kernel == prim.entry
    assert finding.location.chain()[-1].file.endswith(f"prims_{prim.header}.cu")
