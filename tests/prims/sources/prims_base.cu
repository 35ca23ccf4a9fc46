// prims_base -- the integer helpers and constants of base.cuh, evaluated on the device.
#include "prims/base.cuh"

extern "C" __global__ void base(int* integers, float* floats) {  // [10], [3]
  int i = 0;
  for (const int n : {ceil_div(7, 3), ceil_div(6, 3), ceil_div(0, 3), round_up(33, 16),
                      round_up(32, 16), greatest_common_divisor(24, 8),
                      greatest_common_divisor(8, 10), greatest_common_divisor(5, 8),
                      int(sizeof(Vec<short, 4>)), int(alignof(Vec<short, 4>))})
    integers[i++] = n;
  floats[0] = NEG_INF;
  floats[1] = LOG2E;
  floats[2] = LN2;
}
