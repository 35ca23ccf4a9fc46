// compile_add.cuh -- what compile_add.cu includes; it includes a header in its turn.
#pragma once

#include "compile_addend.cuh"
