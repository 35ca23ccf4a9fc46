"""The operations that users call, one file each, and the one way that all of them run.

1. ``ops/NAME``: arguments become settings, which can be compared, and arrays by buffer.
2. `cupyattn.runtime.recent`: a call with known settings and forms of arrays continues at 6.
3. `cupyattn.problem`: the call is checked by descriptions of its arrays
   (`cupyattn.arrays.described`); variant, form and tiles are settled once, in one record.
4. ``plans/NAME``: the launches, pure data made from that record.
5. `cupyattn.runtime.ready`: kernels are compiled and loaded, memory is laid out, and all is kept.
6. Arrays are bound to the problem: as views, or as copies if kernels cannot read them in place.
   Then kernels run on the device or in the interpreter. The mirror branches off after 3.
7. Results get the kind and the layout of the caller's arrays.

`cupyattn.ops.operation` has these steps. An operation defines `resolve`, `plan`, `mirror` and
`restore`. A new one is three files of one name: here, in plans/, and in reference/ for its mirror.
`act_quant` is the shortest example, and CONTRIBUTING.md lists the rest. The mirror of the backward
pass is in gradients/, beside the definition of gradients and their bounds.
"""
