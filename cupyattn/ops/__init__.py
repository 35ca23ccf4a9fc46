"""The operations that users call, one file each, and the one way that all of them run.

1. ``ops/NAME``: arguments become settings, which can be compared, and arrays by buffer.
2. `cupyattn.runtime.recent`: a call with the same settings and forms of arrays goes on at 6.
3. `cupyattn.problem`: the call is checked by descriptions of its arrays
   (`cupyattn.arrays.described`); variant, form and tiles are settled once, in one record.
4. ``plans/NAME``: the launches, pure data made of that record.
5. `cupyattn.runtime.ready`: they are compiled, loaded and laid out, and kept.
6. Arrays meet the problem: views, and copies where kernels cannot read one where it lies. Then
   launches on the device, or in the interpreter; the mirror branches off after 3.
7. The results in the kind and the layout of the caller's arrays.

`cupyattn.ops.operation` has these steps. An operation says what `resolve`, `plan`, `mirror` and
`restore` are for it. A new one is three files of one name: here, in plans/ and in reference/, its
mirror; `act_quant` is the shortest to begin from, and CONTRIBUTING.md lists what else there is to
write. The mirror of the backward pass is in gradients/, beside what gradients are and their bounds.
"""
