// ptx_bits -- integer and bit instructions, one row of the result for each, in the order of
// tests/interpret/ptx_cases.py.
#include "prims/base.cuh"

constexpr int COUNT = 256;

#define ROW(TEXT, ...)                                \
  do {                                                \
    uint32_t r;                                       \
    asm volatile(TEXT : "=r"(r) : __VA_ARGS__);       \
    y[row++ * COUNT + i] = r;                         \
  } while (0)
#define ROW1(NAME) ROW(NAME " %0, %1;", "r"(a))
#define ROW2(NAME) ROW(NAME " %0, %1, %2;", "r"(a), "r"(b))
#define ROW3(NAME) ROW(NAME " %0, %1, %2, %3;", "r"(a), "r"(b), "r"(c))
#define LOP3(TABLE) ROW("lop3.b32 %0, %1, %2, %3, " TABLE ";", "r"(a), "r"(b), "r"(c))

extern "C" __global__ void integers(
    const uint32_t* x,  // [3, COUNT]
    uint32_t* y) {      // [rows, COUNT]
  const int i = threadIdx.x;
  const uint32_t a = x[i], b = x[COUNT + i], c = x[2 * COUNT + i];
  int row = 0;
  LOP3("0x96");
  LOP3("0xe8");
  LOP3("0xca");
  LOP3("0x1d");
  ROW3("prmt.b32");
  ROW3("prmt.b32.f4e");
  ROW3("prmt.b32.b4e");
  ROW3("prmt.b32.rc8");
  ROW3("prmt.b32.ecl");
  ROW3("prmt.b32.ecr");
  ROW3("prmt.b32.rc16");
  ROW3("shf.l.wrap.b32");
  ROW3("shf.l.clamp.b32");
  ROW3("shf.r.wrap.b32");
  ROW3("shf.r.clamp.b32");
  ROW("bfe.u32 %0, %1, %2, %3;", "r"(a), "r"(b & 63), "r"(c & 63));
  ROW("bfe.s32 %0, %1, %2, %3;", "r"(a), "r"(b & 63), "r"(c & 63));
  ROW("bfi.b32 %0, %1, %2, %3, %4;", "r"(a), "r"(b), "r"(c & 63), "r"(b & 31));
  ROW3("dp4a.u32.u32");
  ROW3("dp4a.s32.s32");
  ROW3("dp4a.u32.s32");
  ROW3("dp2a.lo.s32.u32");
  ROW3("dp2a.hi.u32.s32");
  ROW1("popc.b32");
  ROW1("clz.b32");
  ROW1("brev.b32");
  ROW1("bfind.u32");
  ROW1("bfind.s32");
  ROW1("bfind.shiftamt.u32");
  ROW2("mul.hi.u32");
  ROW2("mul.hi.s32");
  ROW3("mad.lo.s32");
  ROW3("mad.hi.u32");
  ROW3("sad.s32");
  ROW2("add.sat.s32");
  ROW2("sub.sat.s32");
  ROW2("shl.b32");
  ROW2("shr.u32");
  ROW2("shr.s32");
  ROW("div.s32 %0, %1, %2;", "r"(a), "r"(b | 1));
  ROW("rem.s32 %0, %1, %2;", "r"(a), "r"(b | 1));
  ROW2("min.s32");
  ROW2("max.u32");
  ROW1("abs.s32");
  ROW1("cnot.b32");
  ROW("slct.u32.s32 %0, %1, %2, %3;", "r"(a), "r"(b), "r"(c));
  ROW("set.lt.u32.s32 %0, %1, %2;", "r"(a), "r"(b));
}
