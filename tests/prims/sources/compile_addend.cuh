// compile_addend.cuh -- one constant, two includes away from the kernel.
#pragma once

#define ADDEND 3.0f
